package podserver

import (
	"context"
	"fmt"
	"net"
	"slices"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

// PeerCredentials refuses every caller whose uid is not allowed. The socket's
// mode already keeps others out; this holds when somebody changes the mode
// (CNI: a runtime calls as root).
type PeerCredentials struct {
	// UIDs may call.
	UIDs []uint32
}

var _ credentials.TransportCredentials = PeerCredentials{}

// peerInfo marks a connection whose peer was checked.
type peerInfo struct{ credentials.CommonAuthInfo }

// AuthType implements credentials.AuthInfo.
func (peerInfo) AuthType() string { return "peer-uid" }

// ServerHandshake reads the peer's uid from the kernel and compares it.
func (c PeerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	uid, err := peerUID(conn)
	if err != nil {
		return nil, nil, err
	}
	if !slices.Contains(c.UIDs, uid) {
		return nil, nil, fmt.Errorf("caller with uid %d may not use %s", uid, conn.LocalAddr())
	}
	return conn, peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}

// ClientHandshake implements credentials.TransportCredentials; this side is a server only.
func (c PeerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("peer credentials are for servers")
}

// Info implements credentials.TransportCredentials.
func (c PeerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "peer-uid"}
}

// Clone implements credentials.TransportCredentials.
func (c PeerCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials.
func (c PeerCredentials) OverrideServerName(string) error { return nil }

func peerUID(conn net.Conn) (uint32, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("connection on %s is no unix socket", conn.LocalAddr())
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("peer of %s: %w", conn.LocalAddr(), err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, fmt.Errorf("peer of %s: %w", conn.LocalAddr(), err)
	}
	if credErr != nil {
		return 0, fmt.Errorf("peer of %s: %w", conn.LocalAddr(), credErr)
	}
	return cred.Uid, nil
}
