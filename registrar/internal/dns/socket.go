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

	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
)

// lockPoll is how often a process that waits for its predecessor looks.
const lockPoll = 100 * time.Millisecond

// listenSocket listens on the socket, for this user and root, once no other process
// does. During an update two processes may overlap: the new one then waits, ready,
// instead of failing and being restarted with a back-off.
func listenSocket(ctx context.Context, socket string, log *slog.Logger) (net.Listener, error) {
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()
	for waited := false; ; waited = true {
		l, err := unixsocket.Listen(ctx, unixsocket.Config{
			Path: socket, UID: unixsocket.Keep, GID: unixsocket.Keep, Mode: 0o600,
		})
		switch {
		case err == nil:
			// The folder may be there with another mode, made by whoever mounted it.
			if err := os.Chmod(filepath.Dir(socket), 0o700); err != nil { //nolint:gosec // a folder needs its search bit
				return nil, errors.Join(fmt.Errorf("folder of the table's socket: %w", err), l.Close())
			}
			return &ownerListener{Listener: l, uid: uint32(os.Geteuid())}, nil
		case !errors.Is(err, unixsocket.ErrInUse):
			return nil, err
		case !waited:
			log.Warn("another mesh-DNS process serves; waiting for it to end", "socket", socket)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-ticker.C:
		}
	}
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
