package forward_test

import (
	"bytes"
	"context"
	"errors"
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

// Forwarding changes nothing but the ID: cookies, options and types that nobody
// knows pass in both directions, and the client gets its own ID back. Each query
// has another ID and another source port.
func TestExchangeIsTransparent(t *testing.T) {
	var mu sync.Mutex // guards what the resolver saw and said
	ids, ports := map[string]bool{}, map[string]bool{}
	var got, answer []byte
	server := packetServer(t, func(q []byte, from net.Addr, reply func([]byte)) {
		mu.Lock()
		defer mu.Unlock()
		ids[string(q[:2])], ports[from.String()] = true, true
		got = q
		msg := bytes.Clone(q)
		msg[2] |= 0x80
		msg = append(msg, "trailing bytes that are no record"...)
		answer = msg
		reply(msg)
	})
	f := newForwarder(t, nil)
	const n = 30
	for range n {
		m := new(dns.Msg)
		m.SetQuestion("eXample.com.", 65280)
		m.SetEdns0(1232, true)
		opt := m.IsEdns0()
		opt.Option = append(opt.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"}, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte("local")})
		raw, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		before := bytes.Clone(raw)
		reply, err := f.Exchange(t.Context(), forward.Request{Query: raw, Upstreams: []netip.AddrPort{server}})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(raw, before) {
			t.Error("the query was modified")
		}
		mu.Lock()
		if !bytes.Equal(got[2:], raw[2:]) {
			t.Errorf("the resolver got\n%x, the client sent\n%x", got[2:], raw[2:])
		}
		if !bytes.Equal(reply[:2], raw[:2]) || !bytes.Equal(reply[2:], answer[2:]) {
			t.Errorf("the client got\n%x, the resolver sent\n%x", reply, answer)
		}
		mu.Unlock()
	}
	if len(ids) < n-2 || len(ports) < n/2 {
		t.Errorf("%d IDs and %d ports for %d queries", len(ids), len(ports), n)
	}
}

// The next resolver is asked when one fails, refuses or says nothing; when none
// has an answer the first refusal comes through; NXDOMAIN and FORMERR are answers.
func TestExchangeNextResolver(t *testing.T) {
	good := func(w dns.ResponseWriter, q *dns.Msg) { dnstest.Answer(w, q) }
	for _, tc := range []struct {
		name    string
		servers []func(dns.ResponseWriter, *dns.Msg)
		rcode   int
		answers int
		err     string
		asked   []int64
		// silent says that a try has to time out; then a slow machine may ask more often.
		silent bool
	}{
		{name: "first", servers: list(good, good), answers: 1, asked: []int64{1, 0}},
		{name: "SERVFAIL", servers: list(dnstest.Rcode(dns.RcodeServerFailure), good), answers: 1, asked: []int64{1, 1}},
		{name: "REFUSED", servers: list(dnstest.Rcode(dns.RcodeRefused), good), answers: 1, asked: []int64{1, 1}},
		{name: "NOTIMP", servers: list(dnstest.Rcode(dns.RcodeNotImplemented), good), answers: 1, asked: []int64{1, 1}},
		{name: "silence", servers: list(dnstest.Silence, good), answers: 1, asked: []int64{1, 1}, silent: true},
		{name: "closed port", servers: list(nil, good), answers: 1, asked: []int64{0, 1}},
		{name: "third", servers: list(nil, dnstest.Rcode(dns.RcodeServerFailure), good), answers: 1, asked: []int64{0, 1, 1}},
		{name: "NXDOMAIN", servers: list(dnstest.Rcode(dns.RcodeNameError), good), rcode: dns.RcodeNameError, asked: []int64{1, 0}},
		{name: "FORMERR", servers: list(dnstest.Rcode(dns.RcodeFormatError), good), rcode: dns.RcodeFormatError, asked: []int64{1, 0}},
		{name: "all refuse", servers: list(dnstest.Rcode(dns.RcodeRefused), dnstest.Rcode(dns.RcodeServerFailure)), rcode: dns.RcodeRefused, asked: []int64{1, 1}},
		{name: "refusal and closed port", servers: list(nil, dnstest.Rcode(dns.RcodeServerFailure), nil), rcode: dns.RcodeServerFailure, asked: []int64{0, 1, 0}},
		{name: "all closed", servers: list(nil, nil), err: "connection refused", asked: []int64{0, 0}},
		{name: "silence and closed port", servers: list(dnstest.Silence, nil), err: "no upstream resolver answered", asked: []int64{2, 0}, silent: true},
	} {
		for _, tcp := range []bool{false, true} {
			name := tc.name + map[bool]string{false: ", UDP", true: ", TCP"}[tcp]
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				var upstreams []netip.AddrPort
				var servers []*dnstest.Resolver
				for _, handle := range tc.servers {
					if handle == nil {
						upstreams, servers = append(upstreams, closedPort(t)), append(servers, nil)
						continue
					}
					r := resolver(t, handle)
					upstreams, servers = append(upstreams, r.Addr), append(servers, r)
				}
				f := newForwarder(t, func(c *forward.Config) {
					c.Timeout = time.Second
					if !tc.silent {
						c.TryInterval, c.Timeout = dnstest.Patience, dnstest.Patience
					}
				})
				reply, err := f.Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: upstreams, TCP: tcp})
				if tc.err != "" {
					if err == nil || !strings.Contains(err.Error(), tc.err) {
						t.Errorf("error %v, want %q", err, tc.err)
					}
				} else if err != nil {
					t.Fatal(err)
				} else if m := unpack(t, reply); m.Rcode != tc.rcode || len(m.Answer) != tc.answers {
					t.Errorf("reply %v, want rcode %d and %d answers", m, tc.rcode, tc.answers)
				}
				for i, s := range servers {
					if s == nil {
						continue
					}
					if got := s.UDP.Load() + s.TCP.Load(); got < tc.asked[i] || got > tc.asked[i] && !tc.silent {
						t.Errorf("resolver %d was asked %d times, want %d", i, got, tc.asked[i])
					}
				}
			})
		}
	}
}

func list(handlers ...func(dns.ResponseWriter, *dns.Msg)) []func(dns.ResponseWriter, *dns.Msg) {
	return handlers
}

// One lost datagram does not fail a name, with a single resolver either.
func TestExchangeLoss(t *testing.T) {
	var n atomic.Int64
	r := resolver(t, func(w dns.ResponseWriter, q *dns.Msg) {
		if n.Add(1) > 1 {
			dnstest.Answer(w, q)
		}
	})
	reply, err := newForwarder(t, nil).Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{r.Addr}})
	if err != nil || len(unpack(t, reply).Answer) != 1 {
		t.Errorf("%x, %v", reply, err)
	}
}

// A resolver that needs longer than one try is still listened to: its answer
// counts, although the next one was asked meanwhile.
func TestExchangeLateAnswer(t *testing.T) {
	second := make(chan struct{})
	first := resolver(t, func(w dns.ResponseWriter, q *dns.Msg) {
		<-second
		dnstest.Answer(w, q)
	})
	other := resolver(t, func(dns.ResponseWriter, *dns.Msg) { close(second) })
	f := newForwarder(t, func(c *forward.Config) { c.Timeout = 10 * time.Second })
	reply, err := f.Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{first.Addr, other.Addr}})
	if err != nil || len(unpack(t, reply).Answer) != 1 {
		t.Errorf("%x, %v", reply, err)
	}
}

// A look-up ends: when nobody answers, within its time; without resolvers and
// when the pod is gone, at once.
func TestExchangeEnds(t *testing.T) {
	silent := resolver(t, dnstest.Silence)
	f := newForwarder(t, func(c *forward.Config) { c.Timeout = 300 * time.Millisecond })
	req := forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{silent.Addr}}
	if _, err := f.Exchange(t.Context(), req); err == nil || !strings.Contains(err.Error(), "no upstream resolver answered: "+silent.Addr.String()+": no answer within 100ms") {
		t.Errorf("silence: error %v", err)
	}
	req.Upstreams = nil
	if _, err := f.Exchange(t.Context(), req); !errors.Is(err, forward.ErrNoUpstream) {
		t.Errorf("no resolvers: error %v", err)
	}
	req.Upstreams = []netip.AddrPort{silent.Addr}
	ctx, cancel := context.WithCancel(t.Context())
	silent.Handle(func(dns.ResponseWriter, *dns.Msg) { cancel() })
	slow := newForwarder(t, func(c *forward.Config) { c.TryInterval, c.Timeout = time.Hour, time.Hour })
	if _, err := slow.Exchange(ctx, req); err == nil {
		t.Error("a reply after the end of the context")
	}
}

// An answer is taken only from the resolver that was asked, for this query: a
// guess with another ID, question or type is passed over, and ends nothing.
func TestExchangeIgnoresForeignAnswers(t *testing.T) {
	server := packetServer(t, func(q []byte, _ net.Addr, reply func([]byte)) {
		ok := bytes.Clone(q)
		ok[2] |= 0x80
		for _, change := range []func([]byte) []byte{
			func(m []byte) []byte { m[0] ^= 1; return m },
			func(m []byte) []byte { m[1] ^= 0x80; return m },
			func(m []byte) []byte { m[2] &^= 0x80; return m },
			func(m []byte) []byte { m[13] = 'x'; return m },
			func(m []byte) []byte { m[5] = 2; return m },
			func(m []byte) []byte { m[5] = 0; return m[:12] },
			func(m []byte) []byte { return m[:len(m)-30] },
			func(m []byte) []byte { m[len("\x07example\x03com")+14] = 28; return m },
			func([]byte) []byte { return []byte("garbage") },
			func([]byte) []byte { return nil },
		} {
			reply(change(bytes.Clone(ok)))
		}
		// Some resolvers normalise the case of a name.
		final := bytes.ToLower(ok[12:])
		reply(append(ok[:12:12], final...))
	})
	// The type is A, so that ToLower leaves it alone.
	raw := query(t, "EXAMPLE.com.", dns.TypeA)
	f := newForwarder(t, func(c *forward.Config) { c.TryInterval = 10 * time.Second; c.Timeout = 10 * time.Second })
	reply, err := f.Exchange(t.Context(), forward.Request{Query: raw, Upstreams: []netip.AddrPort{server}})
	if err != nil || unpack(t, reply).Question[0].Name != "example.com." {
		t.Errorf("%x, %v", reply, err)
	}
}

// A resolver that cannot read a query says so without the question; that is an answer.
func TestExchangeHeaderOnly(t *testing.T) {
	server := packetServer(t, func(q []byte, _ net.Addr, reply func([]byte)) {
		reply([]byte{q[0], q[1], 0x80, dns.RcodeFormatError, 0, 0, 0, 0, 0, 0, 0, 0})
	})
	reply, err := newForwarder(t, nil).Exchange(t.Context(), forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{server}})
	if err != nil || unpack(t, reply).Rcode != dns.RcodeFormatError {
		t.Errorf("%x, %v", reply, err)
	}
}

// A resolver that is dead does not cost every look-up its time: after three
// failures it is asked last, and after 10 s one look-up finds out whether it is
// back. An answer makes it the first again.
func TestExchangeDemotes(t *testing.T) {
	c := &clock{now: time.Unix(1000, 0)}
	first, second := resolver(t, dnstest.Silence), resolver(t, dnstest.Answer)
	f := newForwarder(t, func(cfg *forward.Config) { cfg.Now = c.Now; cfg.TryInterval = 250 * time.Millisecond })
	req := forward.Request{Query: query(t, "example.com.", dns.TypeA), Upstreams: []netip.AddrPort{first.Addr, second.Addr}}
	ask := func(want int64) {
		t.Helper()
		if _, err := f.Exchange(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		if got := first.UDP.Load(); got != want {
			t.Fatalf("the first resolver was asked %d times, want %d", got, want)
		}
	}
	for i := range int64(3) {
		ask(i + 1)
	}
	ask(3)
	c.advance(9 * time.Second)
	ask(3)
	c.advance(2 * time.Second)
	ask(4)
	ask(4)
	c.advance(11 * time.Second)
	first.Handle(dnstest.Answer)
	ask(5)
	ask(6)
	first.Handle(dnstest.Silence)
	ask(7)
	ask(8)
}
