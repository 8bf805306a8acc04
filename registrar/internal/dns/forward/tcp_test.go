package forward_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
)

// large answers with n records of about 100 bytes; over UDP, truncated when told.
func large(n int, truncate bool) func(dns.ResponseWriter, *dns.Msg) {
	return func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		m.Compress = true
		if _, tcp := w.RemoteAddr().(*net.TCPAddr); !tcp && truncate {
			m.Truncated = true
		} else {
			for range n {
				m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{strings.Repeat("t", 88)}})
			}
		}
		_ = w.WriteMsg(m)
	}
}

// A truncated answer is asked for again over TCP, from the same resolver, and so
// is one that is larger than anybody asked for over UDP. When TCP fails, what the
// resolver could say comes through, marked as truncated.
func TestExchangeTruncated(t *testing.T) {
	drop := func(w dns.ResponseWriter, q *dns.Msg) {
		if _, tcp := w.RemoteAddr().(*net.TCPAddr); tcp {
			_ = w.Close()
			return
		}
		large(0, true)(w, q)
	}
	dropLarge := func(w dns.ResponseWriter, q *dns.Msg) {
		if _, tcp := w.RemoteAddr().(*net.TCPAddr); tcp {
			_ = w.Close()
			return
		}
		large(50, false)(w, q)
	}
	for _, tc := range []struct {
		name      string
		handle    func(dns.ResponseWriter, *dns.Msg)
		answers   int
		truncated bool
		tcp       int64
	}{
		{name: "small", handle: large(3, false), answers: 3},
		{name: "truncated", handle: large(300, true), answers: 300, tcp: 1},
		{name: "larger than asked", handle: large(50, false), answers: 50, tcp: 1},
		{name: "truncated, no TCP", handle: drop, truncated: true, tcp: 1},
		{name: "larger than asked, no TCP", handle: dropLarge, truncated: true, tcp: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := resolver(t, tc.handle)
			f := newForwarder(t, func(c *forward.Config) { c.TryInterval = 5 * time.Second; c.Timeout = 5 * time.Second })
			reply, err := f.Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeTXT), Upstreams: []netip.AddrPort{r.Addr}})
			if err != nil {
				t.Fatal(err)
			}
			m := unpack(t, reply)
			if len(m.Answer) != tc.answers || m.Truncated != tc.truncated || r.TCP.Load() != tc.tcp || r.UDP.Load() != 1 {
				t.Errorf("%d answers, truncated %t, %d by TCP, %d by UDP; want %d, %t, %d, 1",
					len(m.Answer), m.Truncated, r.TCP.Load(), r.UDP.Load(), tc.answers, tc.truncated, tc.tcp)
			}
		})
	}
}

// streamServer accepts connections, of which each ends after some answers.
func streamServer(tb testing.TB, perConn int) (netip.AddrPort, *atomic.Int64) {
	tb.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var conns atomic.Int64
	var done sync.WaitGroup
	done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns.Add(1)
			done.Go(func() {
				defer conn.Close()
				for range perConn {
					frame := make([]byte, 2)
					if _, err := io.ReadFull(conn, frame); err != nil {
						return
					}
					msg := make([]byte, binary.BigEndian.Uint16(frame))
					if _, err := io.ReadFull(conn, msg); err != nil {
						return
					}
					msg[2] |= 0x80
					_, _ = conn.Write(append(frame, msg...))
				}
			})
		}
	})
	tb.Cleanup(func() {
		_ = l.Close()
		done.Wait()
	})
	return l.Addr().(*net.TCPAddr).AddrPort(), &conns
}

// Queries over TCP use one connection after the other has its answer, so that
// clients that only speak TCP do not use up the node's ports; a connection that
// the resolver closed is replaced without an error.
func TestExchangeReusesConnections(t *testing.T) {
	for _, tc := range []struct {
		name    string
		perConn int
		want    int64
	}{
		{name: "kept open", perConn: 1000, want: 1},
		{name: "closed after each answer", perConn: 1, want: 20},
		{name: "closed after some answers", perConn: 5, want: 4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server, conns := streamServer(t, tc.perConn)
			f := newForwarder(t, func(c *forward.Config) { c.TryInterval = 5 * time.Second; c.Timeout = 5 * time.Second })
			for range 20 {
				if _, err := f.Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{server}, TCP: true}); err != nil {
					t.Fatal(err)
				}
			}
			if got := conns.Load(); got != tc.want {
				t.Errorf("%d connections, want %d", got, tc.want)
			}
			f.Close()
		})
	}
}

// Queries that run at the same time never share a connection: no answer can be
// taken for another's.
func TestExchangeConcurrentTCP(t *testing.T) {
	r := resolver(t, dnstest.Answer)
	f := newForwarder(t, func(c *forward.Config) { c.TryInterval = 5 * time.Second; c.Timeout = 5 * time.Second })
	var all sync.WaitGroup
	for i := range 8 {
		name := string(rune('a'+i)) + ".example.com."
		all.Go(func() {
			for range 50 {
				reply, err := f.Exchange(t.Context(), forward.Request{Query: query(t, name, dns.TypeA), Upstreams: []netip.AddrPort{r.Addr}, TCP: true})
				if err != nil {
					t.Error(err)
					return
				}
				if got := unpack(t, reply).Answer[0].Header().Name; got != name {
					t.Errorf("answer for %q, want %q", got, name)
					return
				}
			}
		})
	}
	all.Wait()
}
