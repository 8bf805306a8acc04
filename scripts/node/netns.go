package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"syscall"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// netnsDir is where runtimes keep network namespaces.
const netnsDir = "/run/netns"

// newNetns makes a network namespace with lo up that the file at path keeps alive,
// as runtimes do before they call the first plugin.
func newNetns(path string) error {
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		clean, err := mountNetns(path)
		if clean {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return errors.Join(fmt.Errorf("make the network namespace %s: %w", path, err), removeNetns(path))
	}
	return nil
}

// mountNetns does newNetns's work on the calling thread, and reports whether the
// thread is back where it was. It must come back: Go never ends a process's first
// thread, which would hold the new namespace for as long as the process lives.
func mountNetns(path string) (clean bool, err error) {
	home, err := ns.GetCurrentNS()
	if err != nil {
		return true, err
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return true, err
	}
	err = errors.Join(upLoopback(), unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""))
	back := home.Set()
	return back == nil, errors.Join(err, back)
}

func upLoopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// removeNetns unmounts and removes a network namespace; a missing one is no error.
func removeNetns(path string) error {
	if err := syscall.Unmount(path, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}
