package connection_test

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/connection"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

// The peers of the port get a reset, in both families and on a dual-stack listener;
// other ports' peers and the listener are left alone.
func TestReset(t *testing.T) {
	pod := netnstest.New(t)
	for _, row := range []struct{ network, listen, dial string }{
		{"tcp4", "127.0.0.1", "127.0.0.1"},
		{"tcp6", "::1", "::1"},
		{"tcp", "::", "127.0.0.1"},
	} {
		t.Run(row.network, func(t *testing.T) {
			ours := connect(t, pod, row.network, net.JoinHostPort(row.listen, "15008"), net.JoinHostPort(row.dial, "15008"))
			others := connect(t, pod, row.network, net.JoinHostPort(row.listen, "9090"), net.JoinHostPort(row.dial, "9090"))
			if n, err := connection.Count(pod.Path, 15008); err != nil || n != 1 {
				t.Errorf("%d connections, %v, want 1", n, err)
			}
			ended, err := connection.Reset(pod.Path, 15008)
			if err != nil || ended != 1 {
				t.Fatalf("ended %d connections, %v, want 1", ended, err)
			}
			if n, err := connection.Count(pod.Path, 15008); err != nil || n != 0 {
				t.Errorf("%d connections after a reset, %v", n, err)
			}
			if err := read(t, ours); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the peer got %v, want a reset", err)
			}
			if err := read(t, others); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the peer of another port got %v, want nothing", err)
			}
			var again net.Conn
			pod.Do(t, func() (err error) {
				again, err = net.Dial(row.network, net.JoinHostPort(row.dial, "15008"))
				return err
			})
			_ = again.Close()
		})
	}
	if _, err := connection.Reset("/run/netns/missing", 15008); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a namespace that is not there: %v, want os.ErrNotExist", err)
	}
}

// connect is the client's end of a connection in the pod that was accepted.
func connect(t *testing.T, pod *netnstest.Namespace, network, listen, dial string) net.Conn {
	t.Helper()
	listener := pod.Listen(t, net.ListenConfig{}, network, listen)
	t.Cleanup(func() { _ = listener.Close() })
	var client net.Conn
	pod.Do(t, func() (err error) {
		client, err = net.Dial(network, dial)
		return err
	})
	t.Cleanup(func() { _ = client.Close() })
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	return client
}

// read returns what became of a connection on which nothing is sent.
func read(t *testing.T, conn net.Conn) error {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err := conn.Read(make([]byte, 1))
	return err
}
