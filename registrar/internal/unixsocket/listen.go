// Package unixsocket opens the unix sockets that the registrar serves on.
//
// A socket lies in a directory that is made for it, with the owner and mode that
// its peers need. One process at a time serves on a path: a lock file beside the
// socket says so for as long as the process lives, however it ends, and a socket
// file that a crash left behind is removed (CNI-20, MESH-42).
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxPath is the longest path of a unix socket on Linux, without its final NUL.
	maxPath = len(unix.RawSockaddrUnix{}.Path) - 1
	// dialTimeout bounds the question whether somebody serves on an old socket.
	dialTimeout = time.Second
)

// Keep as an owner leaves the owner as it is.
const Keep = -1

// ErrInUse is wrapped by Listen's error when another process serves on the path.
var ErrInUse = errors.New("another process serves on it")

// Config says where a socket is and who may use it.
type Config struct {
	// Path of the socket, absolute. The lock file is Path with ".lock" added.
	Path string
	// UID and GID own the socket. Keep leaves an owner as it is.
	UID, GID int
	// Mode of the socket; 0 is 0660.
	Mode fs.FileMode
	// Users are the UIDs that may connect; connections of others are closed at
	// once. The mode keeps them out already: this holds when somebody changes it.
	// Empty is everybody.
	Users []uint32
	// Lost is called when the socket was removed and cannot be made again, with the
	// reason, and with nil once it could; one call at a time. It is optional.
	Lost func(err error)
}

// Listen binds the socket. It fails if another process serves on the path, which
// it finds by the lock file and by dialling, and if there is something at the
// path that is no socket. When somebody removes the socket, or its directory,
// while it is served, it is made again; connections that are there go on. Closing
// the listener removes the socket and gives the lock back.
func Listen(ctx context.Context, cfg Config) (net.Listener, error) {
	if cfg.Mode == 0 {
		cfg.Mode = 0o660
	}
	if err := check(cfg); err != nil {
		return nil, err
	}
	s, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return watch(ctx, cfg, s), nil
}

// open makes the directory, takes the lock and binds the socket.
func open(ctx context.Context, cfg Config) (*socket, error) {
	if err := makeDirectory(cfg); err != nil {
		return nil, fmt.Errorf("directory of socket %s: %w", cfg.Path, err)
	}
	lock, err := acquire(cfg.Path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", cfg.Path, err)
	}
	l, err := bind(ctx, cfg)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", cfg.Path, err), lock.Close())
	}
	s := &socket{Listener: l, lock: lock}
	if s.file, err = os.Lstat(cfg.Path); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", cfg.Path, err), s.close())
	}
	return s, nil
}

func check(cfg Config) error {
	switch {
	case !filepath.IsAbs(cfg.Path):
		return fmt.Errorf("socket path %q is not absolute", cfg.Path)
	case len(cfg.Path) > maxPath:
		return fmt.Errorf("socket path %s has %d bytes, %d are allowed: choose a shorter one", cfg.Path, len(cfg.Path), maxPath)
	case cfg.Mode&^fs.ModePerm != 0:
		return fmt.Errorf("mode %v of socket %s: only permission bits are allowed", cfg.Mode, cfg.Path)
	}
	return nil
}

// makeDirectory makes the socket's directory; one that exists is left alone. It
// stays ours, so that nobody else can put another socket in our place; the
// socket's users may pass through it.
func makeDirectory(cfg Config) error {
	dir := filepath.Dir(cfg.Path)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil { //nolint:gosec // G301: the parents are shared with other sockets' users
		return err
	}
	mode := fs.FileMode(0o700)
	if cfg.Mode&0o060 != 0 {
		mode |= 0o050
	}
	if cfg.UID != Keep || cfg.Mode&0o006 != 0 {
		mode |= 0o001
	}
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.Chown(dir, Keep, cfg.GID); err != nil {
		return err
	}
	return os.Chmod(dir, mode) // Mkdir's was cut by the umask
}

// acquire takes the lock at path. The file stays for good: who removed it could
// let two processes hold two locks of one name.
func acquire(path string) (*os.File, error) {
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%w (it holds %s): stop it first", ErrInUse, path)
		} else {
			err = fmt.Errorf("lock %s: %w", path, err)
		}
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// bind makes the socket, after it removed a dead one.
func bind(ctx context.Context, cfg Config) (net.Listener, error) {
	if err := removeDead(ctx, cfg.Path); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", cfg.Path)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chown(cfg.Path, cfg.UID, cfg.GID), os.Chmod(cfg.Path, cfg.Mode)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// removeDead removes the socket file of a process that is gone.
func removeDead(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("a %s is in the way: remove it or choose another path", kind(info.Mode()))
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(fmt.Errorf("%w without its lock file: stop it first", ErrInUse), conn.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("find out whether somebody serves on it: %w", err)
	}
	return os.Remove(path)
}

func kind(mode fs.FileMode) string {
	switch mode.Type() {
	case fs.ModeDir:
		return "directory"
	case fs.ModeSymlink:
		return "symbolic link"
	default:
		return "file"
	}
}
