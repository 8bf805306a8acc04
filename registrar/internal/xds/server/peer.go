package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// peerCredentials names the peer of every connection; it encrypts nothing and
// refuses nobody, the socket's owner and mode do that.
type peerCredentials struct {
	connections *atomic.Uint64
}

var _ credentials.TransportCredentials = peerCredentials{}

// peerInfo is the peer of one connection.
type peerInfo struct {
	credentials.CommonAuthInfo
	// name is the same for all connections of one process, as far as we can see.
	name string
}

// AuthType implements credentials.AuthInfo.
func (peerInfo) AuthType() string { return "unix-peer" }

// ServerHandshake implements credentials.TransportCredentials.
func (c peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	name := fmt.Sprintf("connection %d", c.connections.Add(1))
	if pid := peerPID(conn); pid > 0 {
		name = fmt.Sprintf("pid %d", pid)
	}
	return conn, peerInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity},
		name:           name,
	}, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("unix peer credentials are for servers")
}

// Info implements credentials.TransportCredentials.
func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix-peer"}
}

// Clone implements credentials.TransportCredentials.
func (c peerCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials.
func (peerCredentials) OverrideServerName(string) error { return nil }

// peerPID returns the process ID at the other end of a unix socket, or 0 where
// there is none: another kind of socket, or a process that our PID namespace
// does not show.
func peerPID(conn net.Conn) int32 {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return 0
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0
	}
	var pid int32
	if err := raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = cred.Pid
		}
	}); err != nil {
		return 0
	}
	return pid
}

// peerName returns what peerCredentials called the peer of a stream.
func peerName(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(peerInfo); ok {
			return info.name
		}
	}
	return ""
}
