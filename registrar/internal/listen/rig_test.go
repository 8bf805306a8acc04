package listen_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// listenOptions are the socket options of a listener.
type listenOptions struct {
	v6only bool
	device string
	reuse  bool
}

// listenAt listens at addr in the namespace until the test ends.
func listenAt(tb testing.TB, n *netnstest.Namespace, addr string, o listenOptions) net.Listener {
	tb.Helper()
	network := "tcp4"
	if strings.HasPrefix(addr, "[") {
		network = "tcp"
	}
	if o.v6only {
		network = "tcp6"
	}
	return n.Listen(tb, net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = o.apply(int(fd)) }), err)
	}}, network, addr)
}

func (o listenOptions) apply(fd int) error {
	if o.reuse {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return err
		}
	}
	if o.device != "" {
		return unix.BindToDevice(fd, o.device)
	}
	return nil
}

func openTable(tb testing.TB, path string) *listen.Table {
	tb.Helper()
	t, err := listen.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := t.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			tb.Error(err)
		}
	})
	return t
}

func read(tb testing.TB, t *listen.Table) listen.Snapshot {
	tb.Helper()
	s, err := t.Read()
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// reaches reports whether a connection to 127.0.0.1:port is accepted in the
// namespace: what the app hop of Envoy does, the oracle of these tests.
func reaches(tb testing.TB, n *netnstest.Namespace, port uint16) bool {
	tb.Helper()
	ok := false
	n.Do(tb, func() error {
		c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(context.Background(), "tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		if err != nil {
			return err
		}
		ok = true
		return c.Close()
	})
	return ok
}

const podAddress = "10.77.0.2"

// newPod returns a namespace with lo and an eth0 with addresses of both families.
func newPod(tb testing.TB) *netnstest.Namespace {
	tb.Helper()
	pod, outside := netnstest.New(tb), netnstest.New(tb)
	netnstest.Connect(tb, "eth0",
		netnstest.End{In: pod, Addrs: []string{podAddress + "/24", "fd00:77::2/64"}},
		netnstest.End{In: outside, Addrs: []string{"10.77.0.1/24", "fd00:77::1/64"}})
	return pod
}

// connect returns both ends of a connection to l.
func connect(tb testing.TB, n *netnstest.Namespace, l net.Listener) (client, server net.Conn) {
	tb.Helper()
	n.Do(tb, func() (err error) {
		client, err = (&net.Dialer{}).DialContext(context.Background(), "tcp", l.Addr().String())
		return err
	})
	server, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	return client, server
}
