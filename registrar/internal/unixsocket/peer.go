package unixsocket

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a connection, as the kernel saw it when
// it connected.
type Peer struct {
	// PID is 0 for a process that our PID namespace does not show.
	PID int32
	// UID is the user it ran as.
	UID uint32
}

// PeerOf returns the peer of a connection that a Listen accepted. Another kind of
// connection is an error.
func PeerOf(conn net.Conn) (Peer, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return Peer{}, fmt.Errorf("connection on %s is no unix socket", conn.LocalAddr())
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("peer of %s: %w", conn.LocalAddr(), err)
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, credErr); err != nil {
		return Peer{}, fmt.Errorf("peer of %s: %w", conn.LocalAddr(), err)
	}
	return Peer{PID: cred.Pid, UID: cred.Uid}, nil
}
