package capture

import (
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
)

const (
	// ioTimeout bounds one exchange with the kernel. It answers in milliseconds;
	// the bound keeps a lost answer from holding an ADD for ever.
	ioTimeout = 10 * time.Second
	// ioBuffer is the socket buffer of a connection, each way: the kernel answers
	// every message of a transaction, and refuses a transaction that is larger
	// than the send buffer.
	ioBuffer = 8 << 20
)

// dialer opens a connection to the nftables of a namespace.
type dialer func() (*nftables.Conn, error)

// dial opens a connection to the nftables of the calling thread's namespace. It
// holds one socket, for several exchanges, until CloseLasting.
func dial() (*nftables.Conn, error) {
	return nftables.New(nftables.AsLasting(), nftables.WithSockOptions(setUpSocket))
}

// setUpSocket bounds an exchange in time and gives it room.
func setUpSocket(c *netlink.Conn) error {
	return errors.Join(c.SetReadBuffer(ioBuffer), c.SetWriteBuffer(ioBuffer), c.SetDeadline(time.Now().Add(ioTimeout)))
}

// within runs fn on a thread of its own inside the namespace at path. A thread
// that cannot leave the namespace again is not reused.
func within(path string, fn func() error) error {
	netns, err := ns.GetNS(path)
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	defer func() { _ = netns.Close() }()
	return netns.Do(func(ns.NetNS) error { return fn() })
}

// withConn runs fn with a connection of its own and closes it.
func withConn(dial dialer, fn func(*nftables.Conn) error) error {
	conn, err := dial()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	return errors.Join(fn(conn), conn.CloseLasting())
}
