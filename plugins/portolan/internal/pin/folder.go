package pin

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Prepare makes dir, mode 0711 so that Envoy reaches what it is given but lists
// nothing, and makes it a shared mount unless it is one: pins made before would
// not be seen elsewhere. Plugins run side by side; a lock keeps them from mounting
// it on itself twice (C6).
func Prepare(dir string) error {
	if err := prepare(dir); err != nil {
		return fmt.Errorf("prepare folder of pins %s: %w", dir, err)
	}
	return nil
}

func prepare(dir string) error {
	if shared, err := isShared(dir); err == nil && shared {
		return nil
	}
	if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // Envoy's uid has to pass through
		return err
	}
	lock, err := os.Open(filepath.Dir(filepath.Clean(dir)))
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // and unlocks
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if shared, err := isShared(dir); err != nil || shared {
		return err
	}
	err = unix.Mount("", dir, "", unix.MS_SHARED, "")
	if errors.Is(err, unix.EINVAL) { // no mount yet
		if err = unix.Mount(dir, dir, "", unix.MS_BIND, ""); err == nil {
			err = unix.Mount("", dir, "", unix.MS_SHARED, "")
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", dir, err)
	}
	return nil
}

// isShared reports whether dir itself is a mount whose mounts propagate.
func isShared(dir string) (bool, error) {
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false, err
	}
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	return sharedIn(f, resolved)
}

// sharedIn looks dir up in the text of /proc/<pid>/mountinfo: the last mount on
// it is the one that is seen.
func sharedIn(mountinfo io.Reader, dir string) (bool, error) {
	shared := false
	lines := bufio.NewScanner(mountinfo)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
		fields := strings.Fields(lines.Text())
		if len(fields) < 7 || unescape(fields[4]) != dir {
			continue
		}
		shared = false
		for _, option := range fields[6:] {
			if option == "-" {
				break
			}
			if strings.HasPrefix(option, "shared:") {
				shared = true
			}
		}
	}
	return shared, lines.Err()
}

// unescape undoes the octal escapes of mountinfo: \040 is a blank.
func unescape(path string) string {
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] == '\\' && i+4 <= len(path) {
			if n, err := strconv.ParseUint(path[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(path[i])
	}
	return b.String()
}
