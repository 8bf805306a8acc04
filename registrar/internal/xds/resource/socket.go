package resource

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

// unackedTimeout is how long a peer of the mesh hop may leave data unacknowledged.
// Without it a node that died takes the requests in flight, and those that follow on
// its pooled connections, with it for the kernel's quarter of an hour.
const unackedTimeout = 15 * time.Second

// Linux's IPPROTO_TCP and TCP_USER_TIMEOUT.
const (
	ipprotoTCP     = 6
	tcpUserTimeout = 18
)

// keepalive finds a peer that is gone while the connection is idle. The kernel
// gives up at the first unanswered probe that is older than unackedTimeout.
func keepalive() *corev3.TcpKeepalive {
	return &corev3.TcpKeepalive{KeepaliveTime: u32(30), KeepaliveInterval: u32(5), KeepaliveProbes: u32(3)}
}

// deadPeer finds a peer that is gone while data is in flight, whatever protocol the
// connection carries.
func deadPeer() []*corev3.SocketOption {
	return []*corev3.SocketOption{{
		Description: "TCP_USER_TIMEOUT",
		Level:       ipprotoTCP,
		Name:        tcpUserTimeout,
		Value:       &corev3.SocketOption_IntValue{IntValue: unackedTimeout.Milliseconds()},
		State:       corev3.SocketOption_STATE_PREBIND,
	}}
}
