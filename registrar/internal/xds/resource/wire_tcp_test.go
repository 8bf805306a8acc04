package resource_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// database is a service with a tcp port behind a VIP of each family, a client that
// is captured, and a pod whose server does f.
func database(t *testing.T, f func(*net.TCPConn)) (m *mesh, client, pod *meshPod) {
	t.Helper()
	m = newMesh(t)
	client = m.addPod("client", "client", "")
	pod = m.addPod("db-1", "db", "5432=tcp")
	pod.ServeTCP(t, "127.0.0.1:5432", f)
	var captured []netip.AddrPort
	for _, vip := range []string{"198.18.0.10", "fd70:6f72:746f::a"} {
		addr := netip.AddrPortFrom(netip.MustParseAddr(vip), 5432)
		captured = append(captured, addr)
		m.setService(service{name: "db", ports: "5432=tcp", vip: addr.Addr()})
		m.setEndpoints(addr.String(), pod)
	}
	m.lab.RedirectTCP(client.Pod, vipRanges, captured...)
	m.xds.Sync()
	return m, client, pod
}

// Raw TCP through VIP:port over both families: protocols in which the server speaks
// first, or the client sends four bytes and waits, wait for no timeout of Envoy's
// (XDS-25, XDS-26).
func TestWireTCP(t *testing.T) {
	m, client, _ := database(t, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "hello\n")
		buf := make([]byte, 4)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			_, _ = fmt.Fprintf(c, "got %s\n", buf)
		}
	})
	for _, address := range []string{"198.18.0.10:5432", "[fd70:6f72:746f::a]:5432"} {
		c, err := client.DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		for _, step := range []struct{ send, want string }{{"", "hello\n"}, {"ping", "got ping\n"}, {"pong", "got pong\n"}} {
			_, _ = io.WriteString(c, step.send)
			buf := make([]byte, len(step.want))
			if _, err := io.ReadFull(c, buf); err != nil || string(buf) != step.want {
				t.Fatalf("%s: sent %q, got %q, %v, want %q", address, step.send, buf, err, step.want)
			}
		}
		_ = c.Close()
	}
	m.unwaited()
	if got := m.unspoken(); len(got) != 0 {
		t.Errorf("Envoy waited for clients to speak: %v", got)
	}
	asked := m.xds.Asked()
	if asked["198.18.0.10:5432"] != 1 || asked["[fd70:6f72:746f::a]:5432"] != 1 || len(asked) != 2 {
		t.Errorf("asked for %v", asked)
	}
}

// unspoken returns by listener how many connections were held back until Envoy's patience
// with a client that has to speak first was over.
func (m *mesh) unspoken() map[string]int64 {
	m.Helper()
	out := map[string]int64{}
	for name, n := range m.envoy.Stats(`^listener\..*\.downstream_pre_cx_timeout$`) {
		if n != 0 {
			out[strings.Split(name, ".")[1]] = n
		}
	}
	return out
}

// Megabytes in both directions at once, and each side ends its own direction: what
// was sent before the end arrives whole.
func TestWireTCPHalfClose(t *testing.T) {
	const size = 8 << 20
	_, client, _ := database(t, func(c *net.TCPConn) {
		// Everything is read before anything is answered: the answer can only come if
		// the end of the client's direction arrives and the other stays open.
		data, err := io.ReadAll(c)
		if err != nil {
			return
		}
		_, _ = io.Copy(c, bytes.NewReader(data))
	})
	c, err := client.DialContext(t.Context(), "tcp", "198.18.0.10:5432")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	sent := make([]byte, size)
	_, _ = rand.Read(sent)
	if _, err := c.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("got %d bytes, %v; want the %d that were sent", len(got), err, size)
	}
}

// A raw TCP client that dials a port which is no tcp port is reset at its first
// bytes, whatever they are, and never sees a byte of HTTP (contract 2).
func TestWireTCPToHTTPListener(t *testing.T) {
	_, client, _ := database(t, func(*net.TCPConn) {})
	for _, first := range []string{"\x00", "SSH-2.0-OpenSSH\r\n", "*1\r\n$4\r\nPING\r\n", "\x16\x03\x01\x02\x00\x01", "EHLO x\r\n", "ping\n"} {
		c, err := client.DialContext(t.Context(), "tcp", "198.18.0.10:7777")
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, _ = io.WriteString(c, first)
		got, err := io.ReadAll(c)
		if len(got) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: got %q, %v; want a closed connection", first, got, err)
		}
		_ = c.Close()
	}
}

// Who says nothing is closed when Envoy's patience is over, and sees not a byte: a raw TCP
// client of 15001 (the silent half of the rule above), and a stranger at 15008, where a TLS
// client speaks first whatever its application does (XDS-26). How long that is is in the
// golden files: HTTP clients connect long before they speak.
func TestWireSilent(t *testing.T) {
	t.Parallel() // it waits for Envoy's timeouts
	m, client, pod := database(t, func(c *net.TCPConn) { _, _ = io.WriteString(c, "secret") })
	stranger := m.lab.AddPod()
	var wg sync.WaitGroup
	for _, tt := range []struct {
		from *wiretest.Namespace
		to   string
	}{
		{client.Namespace, "198.18.0.10:7777"},
		{stranger.Namespace, netip.AddrPortFrom(pod.Addr, resource.InboundPort).String()},
	} {
		wg.Go(func() {
			c, err := tt.from.DialContext(t.Context(), "tcp", tt.to)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			got, err := io.ReadAll(c)
			if len(got) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: got %q, %v; want a closed connection", tt.to, got, err)
			}
		})
	}
	wg.Wait()
	if got, want := m.unspoken(), map[string]int64{"out_http": 1, "in": 1}; !maps.Equal(got, want) {
		t.Errorf("Envoy's patience was over with %v, want %v", got, want)
	}
}

// What leads nowhere is closed without a byte: a VIP that no service has, and a
// connection that an application opens to 15002 itself, which asks nobody (I9).
func TestWireTCPNowhere(t *testing.T) {
	m, client, _ := database(t, func(*net.TCPConn) {})
	ghost := netip.MustParseAddrPort("198.18.0.99:5432")
	m.lab.RedirectTCP(client.Pod, nil, ghost)
	for _, address := range []string{ghost.String(), ghost.String(), "127.0.0.1:15002", "[::1]:15002"} {
		if got := m.greeting(client, address); got != "" {
			t.Errorf("%s: got %q", address, got)
		}
	}
	if asked := m.xds.Asked(); len(asked) != 1 || asked[ghost.String()] != 1 {
		t.Errorf("asked for %v, want only %s, once", asked, ghost)
	}
}
