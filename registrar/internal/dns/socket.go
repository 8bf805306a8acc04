package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is how often a process that waits for its predecessor looks.
const lockPoll = 100 * time.Millisecond

// lockSocket waits until no other process serves the socket, which it says by a
// lock on a file beside it. During an update two processes may overlap: the new
// one then waits, ready, instead of failing and being restarted with a back-off.
// The kernel gives the lock up with the process, however that ends.
func lockSocket(ctx context.Context, socket string, log *slog.Logger) (*os.File, error) {
	dir := filepath.Dir(socket)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("folder of the table's socket: %w", err)
	}
	// The folder may be there with another mode, made by whoever mounted it.
	if err := os.Chmod(dir, 0o700); err != nil { //nolint:gosec // G302: a folder needs its search bit
		return nil, fmt.Errorf("folder of the table's socket: %w", err)
	}
	path := socket + ".lock"
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the table's socket: %w", err)
	}
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()
	for waited := false; ; waited = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !waited {
			log.Warn("another mesh-DNS process holds the lock; waiting for it to end", "lock", path)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-ticker.C:
		}
	}
}

// listenSocket listens on the socket, for this user and root. The caller holds
// its lock, so what lies at the path is left over.
func listenSocket(ctx context.Context, socket string) (net.Listener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("left-over socket of the table: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("socket of the table: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("socket of the table: %w", err), l.Close())
	}
	return &ownerListener{Listener: l, uid: uint32(os.Geteuid())}, nil
}

// ownerListener accepts connections of one user and of root. The modes of socket
// and folder keep others out already; this holds when somebody changes them.
type ownerListener struct {
	net.Listener
	uid uint32
}

// Accept returns the next connection of an allowed user; others are closed.
func (l *ownerListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if uid, err := peerUID(conn); err == nil && (uid == 0 || uid == l.uid) {
			return conn, nil
		}
		_ = conn.Close()
	}
}

func peerUID(conn net.Conn) (uint32, error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(ctlErr, err); err != nil {
		return 0, err
	}
	return cred.Uid, nil
}
