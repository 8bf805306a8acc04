package node

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// netnsDir is where runtimes keep network namespaces.
const netnsDir = "/run/netns"

// newNetns makes a network namespace that the file at path keeps alive.
func newNetns(path string) error {
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	done := make(chan error)
	go func() {
		// The thread is not unlocked: it ends with this goroutine and takes its
		// network namespace with it.
		runtime.LockOSThread()
		done <- bindNewNetns(path)
	}()
	if err := <-done; err != nil {
		return errors.Join(fmt.Errorf("make a network namespace at %s: %w", path, err), os.Remove(path))
	}
	return nil
}

// bindNewNetns leaves the calling thread in the new namespace.
func bindNewNetns(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
}
