package forward_test

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
)

// No look-up leaves a goroutine or a connection behind.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is set by hand.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// newForwarder has short times: 100 ms for a try, 2 s in all.
func newForwarder(tb testing.TB, change func(*forward.Config)) *forward.Forwarder {
	tb.Helper()
	cfg := forward.Config{
		Metrics:     forward.NewMetrics(prometheus.NewRegistry()),
		TryInterval: 100 * time.Millisecond, Timeout: 2 * time.Second,
	}
	if change != nil {
		change(&cfg)
	}
	f := forward.New(cfg)
	tb.Cleanup(f.Close)
	return f
}

func resolver(tb testing.TB, handle func(dns.ResponseWriter, *dns.Msg)) *dnstest.Resolver {
	tb.Helper()
	r := dnstest.NewResolver(tb, nil, "127.0.0.1:0")
	r.Handle(handle)
	return r
}

// query packs a question with EDNS of 4096 bytes.
func query(tb testing.TB, name string, qtype uint16) []byte {
	tb.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(4096, false)
	raw, err := m.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return raw
}

func unpack(tb testing.TB, raw []byte) *dns.Msg {
	tb.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(raw); err != nil {
		tb.Fatalf("unpack %x: %v", raw, err)
	}
	return m
}

// packetServer answers datagrams by its function, which runs in one goroutine.
func packetServer(tb testing.TB, serve func(query []byte, from net.Addr, reply func([]byte))) netip.AddrPort {
	tb.Helper()
	var lc net.ListenConfig
	conn, err := lc.ListenPacket(context.Background(), "udp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		buf := make([]byte, 65535)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			serve(append([]byte(nil), buf[:n]...), from, func(msg []byte) { _, _ = conn.WriteTo(msg, from) })
		}
	})
	tb.Cleanup(func() {
		_ = conn.Close()
		done.Wait()
	})
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

// closedPort is an address where nobody listens.
func closedPort(tb testing.TB) netip.AddrPort {
	tb.Helper()
	var lc net.ListenConfig
	conn, err := lc.ListenPacket(context.Background(), "udp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}
