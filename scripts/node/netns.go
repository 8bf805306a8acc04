package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// netnsDir is where runtimes keep network namespaces.
const netnsDir = "/run/netns"

// newNetns makes a network namespace that the file at path keeps alive.
//
// A program does it, not a thread of this process that unshares and ends: when
// such a thread is the first one, Go cannot end it, and it would hold the
// network namespace for as long as this process lives.
func newNetns(ctx context.Context, path string) error {
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	if _, err := output(ctx, "unshare", "--net="+path, "true"); err != nil {
		return errors.Join(fmt.Errorf("make a network namespace: %w", err), os.Remove(path))
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
