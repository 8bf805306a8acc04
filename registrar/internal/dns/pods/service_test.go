package pods_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// I9: one pod floods names whose resolver is dead, over UDP and TCP. Its mesh
// names are answered meanwhile, other pods notice nothing, what it holds is
// bounded, and what is too much is refused at once.
func TestFlood(t *testing.T) {
	limits := forward.Limits{Own: 4, Most: 32, Shared: 64}
	limiter := forward.NewLimiter(limits)
	w := newWorld(t, func(c *pods.Config) { c.Limiter = limiter })
	dead := dnstest.NewResolver(t, nil, "127.0.0.1:0")
	dead.Handle(dnstest.Silence)
	flooder, other := dnstest.NewNamespace(t), dnstest.NewNamespace(t)
	w.put(t,
		table.Pod{Key: key("flooder"), Netns: flooder.Path, Upstreams: []netip.AddrPort{dead.Addr}},
		table.Pod{Key: key("other"), Netns: other.Path})

	ctx, stop := context.WithCancel(t.Context())
	var floods sync.WaitGroup
	for _, network := range []string{"udp4", "udp4", "tcp4"} {
		conn, err := flooder.Dial(t, network, addr4)
		if err != nil {
			t.Fatal(err)
		}
		floods.Go(func() { flood(ctx, conn) })
	}
	dnstest.Eventually(t, func() string {
		if got := w.metric(t, "portolan_dns_overload_total"); got < 1000 {
			return fmt.Sprintf("%v queries were refused", got)
		}
		return ""
	})
	var slowestMesh, slowest time.Duration
	for range 50 {
		if n := limiter.InFlight(); n > limits.Most+limits.Own {
			t.Errorf("%d look-ups wait, at most %d may", n, limits.Most+limits.Own)
		}
		start := time.Now()
		// By TCP: what the flood does to its own UDP socket is the kernel's affair.
		if got := address(t, flooder, "tcp4", addr4, dns.TypeA); got != "198.18.0.1" {
			t.Errorf("mesh name in the flooding pod: %s", got)
		}
		slowestMesh = max(slowestMesh, time.Since(start))
		start = time.Now()
		m, err := other.Ask(t, "udp4", addr4, dnstest.Question("example.com", dns.TypeA))
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("other name in another pod: %v, %v", m, err)
		}
		slowest = max(slowest, time.Since(start))
	}
	stop()
	floods.Wait()
	t.Logf("during the flood a mesh name in the same pod took at most %s, another name in another pod %s", slowestMesh, slowest)
}

// flood sends as fast as it can, and reads what comes so that nobody blocks.
func flood(ctx context.Context, conn *dns.Conn) {
	var reader sync.WaitGroup
	reader.Go(func() { _, _ = io.Copy(io.Discard, conn.Conn) })
	q := dnstest.Question("dead.example.com", dns.TypeA)
	for ctx.Err() == nil {
		q.Id = dns.Id()
		if err := conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			break
		}
		// A full socket is part of it.
		_ = conn.WriteMsg(q)
	}
	_ = conn.Close()
	reader.Wait()
}

// RFC 7766: queries on one connection are answered as their answers come; a mesh
// name does not wait for a slow resolver, and nothing is lost.
func TestPipelining(t *testing.T) {
	w := newWorld(t, nil)
	goOn := make(chan struct{})
	slow := dnstest.NewResolver(t, nil, "127.0.0.1:0")
	slow.Handle(func(rw dns.ResponseWriter, q *dns.Msg) {
		<-goOn
		dnstest.Answer(rw, q)
	})
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path, Upstreams: []netip.AddrPort{slow.Addr}})
	conn, err := ns.Dial(t, "tcp4", addr4)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(dnstest.Patience)); err != nil {
		t.Fatal(err)
	}
	const n = 20
	open := map[uint16]bool{}
	for i := range uint16(n) {
		q := dnstest.Question("example.com", dns.TypeA)
		q.Id = i
		open[i] = true
		if err := conn.WriteMsg(q); err != nil {
			t.Fatal(err)
		}
	}
	mesh := dnstest.Question("payments.aether.internal", dns.TypeA)
	mesh.Id = n
	if err := conn.WriteMsg(mesh); err != nil {
		t.Fatal(err)
	}
	if m, err := conn.ReadMsg(); err != nil || m.Id != n || len(m.Answer) != 1 {
		t.Fatalf("first answer %v, %v; want the mesh name's", m, err)
	}
	close(goOn)
	for range n {
		m, err := conn.ReadMsg()
		if err != nil || len(m.Answer) != 1 || !open[m.Id] {
			t.Fatalf("answer %v, %v; open are %v", m, err, open)
		}
		delete(open, m.Id)
	}
}

// A client that speaks no DNS over TCP, or too many connections, cost the pod
// its own connections and nobody anything else.
func TestStreamAbuse(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	for name, in := range map[string][]byte{
		"empty message":   {0, 0},
		"short message":   append([]byte{0, 11}, make([]byte, 11)...),
		"too long":        append([]byte{0xff, 0xff}, make([]byte, 5000)...),
		"half a length":   {0},
		"cut off":         {0, 40, 1, 2, 3},
		"HTTP":            []byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"),
		"an answer":       append([]byte{0, 12, 1, 1, 0x80}, make([]byte, 9)...),
		"nothing at all":  nil,
		"malformed query": append([]byte{0, 12, 1, 1, 1, 0, 0, 1}, make([]byte, 6)...),
	} {
		conn, err := ns.Dial(t, "tcp4", addr4)
		if err != nil {
			t.Fatal(err)
		}
		tcp := conn.Conn.(*net.TCPConn)
		if _, err := tcp.Write(in); err != nil {
			t.Fatal(err)
		}
		_ = tcp.CloseWrite()
		_ = tcp.SetReadDeadline(time.Now().Add(dnstest.Patience))
		got, err := io.ReadAll(tcp)
		if errors.Is(err, net.ErrClosed) || isTimeout(err) {
			t.Errorf("%s: %v", name, err)
		}
		want := 0
		if name == "malformed query" {
			want = 14
		}
		if len(got) != want {
			t.Errorf("%s: answered %x", name, got)
		}
	}
	// More connections than a pod may have: the last ones are closed.
	var conns []*dns.Conn
	for range 140 {
		conn, err := ns.Dial(t, "tcp4", addr4)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	dnstest.Eventually(t, func() string {
		open, refused := w.metric(t, "portolan_dns_tcp_connections"), w.metric(t, "portolan_dns_tcp_refused_total")
		if open != 128 || refused != 12 {
			return fmt.Sprintf("%v connections are open and %v were refused, want 128 and 12", open, refused)
		}
		return ""
	})
	if m, err := dnstest.Exchange(t, conns[0], dnstest.Question("payments.aether.internal", dns.TypeA), dnstest.Patience); err != nil || len(m.Answer) != 1 {
		t.Errorf("the first connection: %v, %v", m, err)
	}
	if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
		t.Errorf("UDP meanwhile: %s", got)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// A query over UDP gets no more bytes than it asked for, and over TCP everything.
func TestAnswerSize(t *testing.T) {
	w := newWorld(t, nil)
	upstream := dnstest.NewResolver(t, nil, "127.0.0.1:0")
	upstream.Handle(func(rw dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		for range 30 {
			m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{strings.Repeat("t", 88)}})
		}
		_ = rw.WriteMsg(m)
	})
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path, Upstreams: []netip.AddrPort{upstream.Addr}})
	for _, tc := range []struct {
		network string
		size    uint16
		most    int
		whole   bool
	}{
		{network: "udp4", most: 512},
		{network: "udp4", size: 1232, most: 1232},
		{network: "udp4", size: 8000, most: 8000, whole: true},
		{network: "tcp4", most: 65535, whole: true},
	} {
		q := dnstest.Question("example.com", dns.TypeTXT)
		if tc.size > 0 {
			q.SetEdns0(tc.size, false)
		}
		conn, err := ns.Dial(t, tc.network, addr4)
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.WriteMsg(q); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(dnstest.Patience))
		raw, err := conn.ReadMsgHeader(nil)
		if err != nil {
			t.Fatal(err)
		}
		m := new(dns.Msg)
		if err := m.Unpack(raw); err != nil {
			t.Fatal(err)
		}
		if len(raw) > tc.most || m.Truncated == tc.whole || (len(m.Answer) == 30) != tc.whole {
			t.Errorf("%s, %d bytes: got %d with %d records, truncated %t", tc.network, tc.size, len(raw), len(m.Answer), m.Truncated)
		}
	}
}

// When no resolver answers, the client gets SERVFAIL with the reason.
func TestUpstreamFails(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}})
	for _, network := range []string{"udp4", "tcp4"} {
		q := dnstest.Question("example.com", dns.TypeA)
		q.SetEdns0(1232, false)
		m, err := ns.Ask(t, network, addr4, q)
		if err != nil {
			t.Fatal(err)
		}
		if m.Rcode != dns.RcodeServerFailure || !strings.Contains(m.IsEdns0().String(), "connection refused") {
			t.Errorf("%s: %v", network, m)
		}
	}
}

// panicker panics at one name.
type panicker struct {
	next      pods.Responder
	forwarder pods.Forwarder
}

func (p panicker) Respond(q responder.Query) responder.Decision {
	if strings.Contains(string(q.Raw), "boom\x06aether") {
		panic("boom")
	}
	return p.next.Respond(q)
}

// Exchange panics at one name.
func (p panicker) Exchange(ctx context.Context, req forward.Request) ([]byte, error) {
	if strings.Contains(string(req.Query), "boom") {
		panic("boom")
	}
	return p.forwarder.Exchange(ctx, req)
}

// Should a query or an answer make the parser panic, it is dropped, and DNS goes on.
func TestPanic(t *testing.T) {
	w := newWorld(t, func(c *pods.Config) {
		c.Responder, c.Forwarder = panicker{next: c.Responder}, panicker{forwarder: c.Forwarder}
	})
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	for _, network := range []string{"udp4", "tcp4"} {
		conn, err := ns.Dial(t, network, addr4)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"boom.aether.internal", "boom.example.com"} {
			if err := conn.WriteMsg(dnstest.Question(name, dns.TypeA)); err != nil {
				t.Fatal(err)
			}
		}
		m, err := dnstest.Exchange(t, conn, dnstest.Question("payments.aether.internal", dns.TypeA), dnstest.Patience)
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("%s: %v, %v", network, m, err)
		}
	}
	dnstest.Eventually(t, func() string {
		if got, n := w.metric(t, "portolan_dns_panics_total"), w.limiter.InFlight(); got != 4 || n != 0 {
			return fmt.Sprintf("%v panics, want 4; %d look-ups count as running, want 0", got, n)
		}
		return ""
	})
}

// What pods send by UDP that is no query costs nothing but the datagram.
func TestDatagramAbuse(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	conn, err := ns.Dial(t, "udp4", addr4)
	if err != nil {
		t.Fatal(err)
	}
	answer := slices.Concat([]byte{1, 1, 0x80}, make([]byte, 30))
	for _, in := range [][]byte{{}, {1}, make([]byte, 11), answer, make([]byte, 5000), make([]byte, 60000)} {
		if _, err := conn.Conn.Write(in); err != nil {
			t.Fatal(err)
		}
	}
	q := dnstest.Question("payments.aether.internal", dns.TypeA)
	if err := conn.WriteMsg(q); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(dnstest.Patience))
	buf := make([]byte, 65535)
	n, err := conn.Conn.Read(buf)
	if err != nil || binary.BigEndian.Uint16(buf) != q.Id {
		t.Errorf("first answer %x, %v; want the query's", buf[:n], err)
	}
}
