// Package disktest makes small disks for tests that fill them or make them
// read-only. Only tests import it; it is never shipped. It needs root.
package disktest

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Mount mounts a tmpfs with options, such as "size=256k,nr_inodes=10", until the
// test ends, and returns its folder.
func Mount(tb testing.TB, options string) (dir string) {
	tb.Helper()
	dir = tb.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		tb.Fatalf("mount a tmpfs: %v; run the tests as root", err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			tb.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// Remount changes the options of a mounted folder: flags such as unix.MS_RDONLY and
// a text such as "size=64m".
func Remount(tb testing.TB, dir string, flags uintptr, options string) {
	tb.Helper()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|flags, options); err != nil {
		tb.Fatalf("remount %s: %v", dir, err)
	}
}
