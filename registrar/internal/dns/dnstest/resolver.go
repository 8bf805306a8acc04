package dnstest

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
)

// Resolver is an upstream resolver: UDP and TCP on one address.
type Resolver struct {
	// Addr is where it listens.
	Addr netip.AddrPort
	// UDP and TCP count queries.
	UDP, TCP atomic.Int64

	mu     sync.Mutex
	handle func(w dns.ResponseWriter, q *dns.Msg)
}

// Answer is what a new Resolver answers to everything: an A record with the
// address 192.0.2.53, whatever the type.
func Answer(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.RecursionAvailable = true
	if len(q.Question) == 1 {
		m.Answer = []dns.RR{&dns.A{
			Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
			A:   net.IPv4(192, 0, 2, 53),
		}}
	}
	_ = w.WriteMsg(m)
}

// Rcode answers everything with a code.
func Rcode(code int) func(dns.ResponseWriter, *dns.Msg) {
	return func(w dns.ResponseWriter, q *dns.Msg) {
		_ = w.WriteMsg(new(dns.Msg).SetRcode(q, code))
	}
}

// Silence answers nothing.
func Silence(dns.ResponseWriter, *dns.Msg) {}

// NewResolver starts a resolver that lives until the test ends. In nil it
// listens in the namespace of the test; port 0 picks a free one.
func NewResolver(tb testing.TB, in *Namespace, addr string) *Resolver {
	tb.Helper()
	r := &Resolver{handle: Answer}
	var packet net.PacketConn
	var stream net.Listener
	listen := func() (err error) {
		packet, stream, err = listenBoth(netip.MustParseAddrPort(addr))
		return err
	}
	if in != nil {
		in.Do(tb, listen)
	} else if err := listen(); err != nil {
		tb.Fatalf("start a resolver: %v", err)
	}
	r.Addr = packet.LocalAddr().(*net.UDPAddr).AddrPort()
	for _, s := range []*dns.Server{{PacketConn: packet}, {Listener: stream, MaxTCPQueries: -1}} {
		count := &r.UDP
		if s.Listener != nil {
			count = &r.TCP
		}
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			count.Add(1)
			r.mu.Lock()
			handle := r.handle
			r.mu.Unlock()
			handle(w, q)
		})
		s.MsgAcceptFunc = func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = s.ActivateAndServe()
		}()
		<-started
		tb.Cleanup(func() {
			_ = s.ShutdownContext(context.WithoutCancel(tb.Context()))
			<-done
		})
	}
	return r
}

// listenBoth opens one port for both transports. The kernel picks a port that is
// free for UDP; should TCP have it in use, another one is tried.
func listenBoth(addr netip.AddrPort) (net.PacketConn, net.Listener, error) {
	var lc net.ListenConfig
	ctx := context.Background()
	for tries := 0; ; tries++ {
		packet, err := lc.ListenPacket(ctx, "udp", addr.String())
		if err != nil {
			return nil, nil, err
		}
		stream, err := lc.Listen(ctx, "tcp", packet.LocalAddr().String())
		if err == nil {
			return packet, stream, nil
		}
		_ = packet.Close()
		if addr.Port() != 0 || tries == 10 {
			return nil, nil, err
		}
	}
}

// Handle replaces what is answered.
func (r *Resolver) Handle(fn func(w dns.ResponseWriter, q *dns.Msg)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handle = fn
}
