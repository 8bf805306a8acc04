package app

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// removePin takes a pin away, wherever it is mounted. One that is not there is success.
func removePin(path string) error {
	err := unmountAll(path)
	if err == nil {
		err = os.Remove(path)
	}
	if errors.Is(err, unix.EBUSY) {
		if err = unmountCopies(path); err == nil {
			err = os.Remove(path)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove pin %s: %w", path, err)
	}
	return nil
}

// unmountAll unmounts what is mounted on a path, which can be stacked.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount: %w", err)
		}
	}
}

// unmountCopies unmounts the pin at path wherever else this process has it. A container
// that is given the runtime's folder has a private copy of its own files there, and in
// that one of each pin that was there when it started: no unmounting elsewhere reaches it,
// and the pin's file cannot be removed before it is gone.
func unmountCopies(path string) error {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(mounts)) {
		// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[4] == path || filepath.Base(fields[4]) != filepath.Base(path) {
			continue
		}
		// A pin is on the folder that the plugin has mounted on itself, and on the one
		// beneath, where no path leads before the upper one is gone.
		errs = append(errs, unmountAll(filepath.Dir(fields[4])), unmountAll(fields[4]))
	}
	return errors.Join(errs...)
}

// removePins removes the folder of pins with all that is in it, and the mount that the
// plugin made of it.
func removePins(dir string) error {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, f := range files {
		errs = append(errs, removePin(filepath.Join(dir, f.Name())))
	}
	if err := errors.Join(append(errs, unmountAll(dir))...); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}
