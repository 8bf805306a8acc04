package pin

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotNamespace says that a path leads to something else than a namespace.
var ErrNotNamespace = errors.New("not a network namespace")

// ID identifies a network namespace on this machine as long as it exists.
type ID struct {
	// Dev and Ino are those of its file in nsfs.
	Dev, Ino uint64
}

// Namespace is an open network namespace. Holding it open keeps it from being
// replaced behind the path by which it was opened (CNI-D6).
type Namespace struct {
	// ID of the namespace.
	ID   ID
	file *os.File
}

// Open opens the namespace at path. A path that is gone is fs.ErrNotExist, a file
// of another kind ErrNotNamespace. The caller closes it.
func Open(path string) (*Namespace, error) {
	// Not blocking, in case somebody put a FIFO there.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	id, err := identify(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return &Namespace{ID: id, file: f}, nil
}

// Path returns a path to the open namespace that is good in this process alone,
// while it is open.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/self/fd/%d", n.file.Fd()) }

// Close gives the namespace up.
func (n *Namespace) Close() error { return n.file.Close() }

// identify returns the ID of an open namespace.
func identify(f *os.File) (ID, error) {
	var fst unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fst); err != nil {
		return ID{}, fmt.Errorf("fstatfs: %w", err)
	}
	if fst.Type != unix.NSFS_MAGIC {
		return ID{}, ErrNotNamespace
	}
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		return ID{}, ErrNotNamespace
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return ID{}, fmt.Errorf("fstat: %w", err)
	}
	return ID{Dev: st.Dev, Ino: st.Ino}, nil
}

// Own returns the ID of the namespace that this thread, and so the plugin, is in.
func Own() (ID, error) {
	n, err := Open("/proc/thread-self/ns/net")
	if err != nil {
		return ID{}, fmt.Errorf("own network namespace: %w", err)
	}
	return n.ID, n.Close()
}

// Identify returns the ID of the namespace at path; errors are those of Open.
func Identify(path string) (ID, error) {
	n, err := Open(path)
	if err != nil {
		return ID{}, err
	}
	return n.ID, n.Close()
}
