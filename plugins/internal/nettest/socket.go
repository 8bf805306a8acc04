package nettest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Timeout bounds every network operation of a test.
const Timeout = 5 * time.Second

// Serve answers every connection or datagram at addr with label, until the test
// ends. The network is one of tcp4, tcp6, udp4, udp6.
func (n *Namespace) Serve(tb testing.TB, network, addr, label string) {
	tb.Helper()
	n.Do(tb, func() error {
		if strings.HasPrefix(network, "udp") {
			pc, err := (&net.ListenConfig{}).ListenPacket(context.Background(), network, addr)
			if err != nil {
				return err
			}
			tb.Cleanup(func() { _ = pc.Close() })
			go answerPackets(pc, label)
			return nil
		}
		l, err := (&net.ListenConfig{}).Listen(context.Background(), network, addr)
		if err != nil {
			return err
		}
		tb.Cleanup(func() { _ = l.Close() })
		go answerConnections(l, label)
		return nil
	})
}

func answerPackets(pc net.PacketConn, label string) {
	buf := make([]byte, 512)
	for {
		_, from, err := pc.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = pc.WriteTo([]byte(label), from)
	}
}

func answerConnections(l net.Listener, label string) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(conn, label)
		_ = conn.Close()
	}
}

// Dialer says how Dial makes its socket.
type Dialer struct {
	// Local is the local address; the zero value leaves it to the kernel.
	Local netip.AddrPort
	// Mark is the socket mark.
	Mark uint32
	// Reuse lets several sockets have one local port.
	Reuse bool
}

func (d Dialer) control(_, _ string, c syscall.RawConn) error {
	var mark, reuse error
	err := c.Control(func(fd uintptr) {
		if d.Mark != 0 {
			mark = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(d.Mark))
		}
		if d.Reuse {
			reuse = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		}
	})
	return errors.Join(err, mark, reuse)
}

// Dial opens a socket inside the namespace. The error is the kernel's.
func (n *Namespace) Dial(tb testing.TB, d Dialer, network, addr string) (net.Conn, error) {
	tb.Helper()
	dialer := net.Dialer{Timeout: Timeout, Control: d.control}
	if d.Local.IsValid() {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(d.Local)
	}
	var conn net.Conn
	var err error
	n.Do(tb, func() error {
		conn, err = dialer.DialContext(context.Background(), network, addr)
		return nil
	})
	if err == nil {
		tb.Cleanup(func() { _ = conn.Close() })
	}
	return conn, err
}

// Ask sends one datagram, or nothing over TCP, and returns what came back; an
// error of the kernel comes back as its text, silence as "no answer".
func Ask(tb testing.TB, conn net.Conn, patience time.Duration) string {
	tb.Helper()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		tb.Fatal(err)
	}
	if conn.LocalAddr().Network() == "udp" {
		if _, err := conn.Write([]byte("?")); err != nil {
			return describe(err)
		}
	}
	buf := make([]byte, 512)
	got, err := conn.Read(buf)
	if err != nil {
		return describe(err)
	}
	return string(buf[:got])
}

// Get dials and asks.
func (n *Namespace) Get(tb testing.TB, network, addr string) string {
	tb.Helper()
	conn, err := n.Dial(tb, Dialer{}, network, addr)
	if err != nil {
		return describe(err)
	}
	return Ask(tb, conn, Timeout)
}

func describe(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if netErr, ok := errors.AsType[net.Error](err); ok && netErr.Timeout() {
		return "no answer"
	}
	return err.Error()
}
