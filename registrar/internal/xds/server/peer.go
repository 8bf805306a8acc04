package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
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
	if p, err := unixsocket.PeerOf(conn); err == nil && p.PID > 0 {
		name = fmt.Sprintf("pid %d", p.PID)
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

// peerName returns what peerCredentials called the peer of a stream.
func peerName(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(peerInfo); ok {
			return info.name
		}
	}
	return ""
}
