package pods

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// identity tells one network namespace from another as long as somebody holds it.
type identity struct {
	dev, ino uint64
}

// namespace is an open network namespace.
type namespace struct {
	file *os.File
	id   identity
}

// openNamespace opens the network namespace at path. It refuses the process' own:
// a pod in it has no network of its own, and queries that the node sends would
// come back to us.
func openNamespace(path string) (*namespace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	ns := &namespace{file: f}
	if err := ns.check(); err != nil {
		return nil, errors.Join(fmt.Errorf("open network namespace %s: %w", path, err), f.Close())
	}
	return ns, nil
}

func (ns *namespace) check() error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(ns.file.Fd()), &fs); err != nil {
		return err
	}
	// A pin without its mount is an empty file.
	if fs.Type != unix.NSFS_MAGIC {
		return errors.New("nothing is mounted there")
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.file.Fd()), &st); err != nil {
		return err
	}
	ns.id = identity{dev: st.Dev, ino: st.Ino}
	// Of this thread: /proc/self is the first thread's, which may be in a pod just now.
	if own, err := identityAt("/proc/thread-self/ns/net"); err == nil && own == ns.id {
		return errors.New("it is the node's own")
	}
	return nil
}

func (ns *namespace) close() error { return ns.file.Close() }

// identityAt says which namespace a path leads to now.
func identityAt(path string) (identity, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return identity{}, err
	}
	return identity{dev: st.Dev, ino: st.Ino}, nil
}

// do runs fn on a thread that is in the namespace. Sockets that fn opens stay in
// it. fn must not start goroutines that need the namespace.
func (ns *namespace) do(fn func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err, back := ns.enter(fn)
		if back == nil {
			runtime.UnlockOSThread()
		}
		// Without the unlock the thread ends with this goroutine: one that could
		// not go back must never run anything else.
		result <- errors.Join(err, back)
	}()
	return <-result
}

// enter returns what fn said, and whether the thread is back where it was.
func (ns *namespace) enter(fn func() error) (err, back error) {
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err), nil
	}
	defer own.Close()
	if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", ns.file.Name(), err), nil
	}
	err = fn()
	if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back != nil {
		return err, fmt.Errorf("leave network namespace %s: %w", ns.file.Name(), back)
	}
	return err, nil
}
