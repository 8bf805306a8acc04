package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// maxStacked bounds the mounts that Unpin takes off one path.
const maxStacked = 64

// Path returns where the pin called name lies in dir.
func Path(dir, name string) string { return filepath.Join(dir, name) }

// Pin mounts the namespace at Path(dir, name), in a folder that is prepared, and
// returns that path. The same namespace pinned again is success; another one that
// is pinned there is replaced.
func Pin(dir, name string, n *Namespace) (string, error) {
	path := Path(dir, name)
	if id, err := Identify(path); err == nil && id == n.ID {
		return path, nil
	}
	if err := Unpin(dir, name); err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", fmt.Errorf("pin network namespace: %w", err)
	}
	err = f.Close()
	if err == nil {
		// The open file and not the path by which it was opened: that one may
		// mean another namespace by now.
		err = unix.Mount(n.Path(), path, "", unix.MS_BIND, "")
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("pin network namespace at %s: %w", path, err), os.Remove(path))
	}
	return path, nil
}

// Unpin takes the pin called name away. One that is not there is success.
func Unpin(dir, name string) error {
	path := Path(dir, name)
	for range maxStacked {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // not mounted, or nothing there
		}
		if err != nil {
			return fmt.Errorf("unpin network namespace at %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin network namespace: %w", err)
	}
	return nil
}
