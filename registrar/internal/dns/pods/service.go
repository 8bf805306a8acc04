package pods

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

const (
	// maxQuery is the largest query that is read, in bytes. Clients stay far
	// below; a larger datagram is dropped, a larger TCP message ends its connection.
	maxQuery = 4096
	// maxReadErrors in a row mean that a socket is broken and is opened again.
	maxReadErrors = 16
	// fairShare is how many datagrams of a socket that is never empty are served
	// before other pods' have their turn; the scheduler alone would let a flood go
	// on for 10 ms.
	fairShare = 64
	// readErrorPause keeps a failing socket from turning in circles.
	readErrorPause = 10 * time.Millisecond
)

// Responder decides about a query; *responder.Responder is one.
type Responder interface {
	Respond(q responder.Query) responder.Decision
}

// Forwarder asks upstream resolvers; *forward.Forwarder is one.
type Forwarder interface {
	Exchange(ctx context.Context, req forward.Request) ([]byte, error)
}

// service answers on the sockets of one pod while they are open.
type service struct {
	responder Responder
	forwarder Forwarder
	share     *forward.Share
	metrics   *Metrics
	log       *slog.Logger
	// pod is read for each query; it changes when the pod's upstreams do.
	pod func() table.Pod
	// upstreams are used when the pod has none of its own.
	upstreams func() []netip.AddrPort

	// running are the loops, connections and look-ups.
	running sync.WaitGroup
	// failed has the first error of a loop that ended though nobody closed its socket.
	failed chan error

	mu sync.Mutex
	// conns are the open TCP connections, guarded by mu; nil once the service ended.
	conns map[net.Conn]struct{}
}

// start serves the sockets until they are closed. ctx ends look-ups.
func (s *service) start(ctx context.Context, socks *sockets) {
	s.failed = make(chan error, len(socks.udp)+len(socks.tcp))
	s.conns = map[net.Conn]struct{}{}
	for _, c := range socks.udp {
		s.running.Go(func() { s.report(s.serveUDP(ctx, c)) })
	}
	for _, l := range socks.tcp {
		s.running.Go(func() { s.report(s.serveTCP(ctx, l)) })
	}
}

func (s *service) report(err error) {
	if !errors.Is(err, net.ErrClosed) {
		s.failed <- err
	}
}

// stop closes the connections and waits for everything that runs. The sockets
// are closed and the context of start is cancelled before.
func (s *service) stop() {
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close()
	}
	s.conns = nil
	s.mu.Unlock()
	s.running.Wait()
}

func (s *service) serveUDP(ctx context.Context, conn *net.UDPConn) error {
	buf := make([]byte, maxQuery+1)
	errs := 0
	for served := 1; ; served++ {
		if served%fairShare == 0 {
			runtime.Gosched()
		}
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if errs++; errors.Is(err, net.ErrClosed) || errs > maxReadErrors {
				return err
			}
			time.Sleep(readErrorPause)
			continue
		}
		errs = 0
		if n > maxQuery {
			s.metrics.udp.count(responder.Dropped)
			continue
		}
		s.handle(ctx, query{raw: buf[:n]}, func(reply []byte) {
			if _, err := conn.WriteToUDPAddrPort(reply, from); err != nil {
				s.metrics.writeErrors.Inc()
			}
		})
	}
}

// query is one message and how it came.
type query struct {
	raw []byte
	tcp bool
	// release is called once, when the query is done with. May be nil.
	release func()
}

// handle answers at once what can be, and forwards the rest from a goroutine of
// its own, so that a silent resolver never delays a mesh name. raw may be reused
// when handle returns; reply may be called later, from another goroutine.
func (s *service) handle(ctx context.Context, q query, reply func([]byte)) {
	done := func() {
		if q.release != nil {
			q.release()
		}
	}
	count := &s.metrics.udp
	if q.tcp {
		count = &s.metrics.tcp
	}
	pod := s.pod()
	d := s.decide(responder.Query{Raw: q.raw, TCP: q.tcp, IPv6: pod.IPv6})
	count.count(d.Outcome)
	switch {
	case d.Outcome != responder.Forwarded:
		answer(reply, d.Reply)
		done()
	case !s.share.TryAcquire():
		// Without a reason, which would cost more than the refusal.
		s.metrics.overload.Inc()
		answer(reply, d.ServerFailure(0, ""))
		done()
	default:
		req := forward.Request{Query: append([]byte(nil), q.raw...), Upstreams: pod.Upstreams, TCP: q.tcp}
		if len(req.Upstreams) == 0 {
			req.Upstreams = s.upstreams()
		}
		s.running.Go(func() {
			defer done()
			defer s.share.Release()
			answer(reply, s.lookUp(ctx, req, d))
		})
	}
}

func answer(reply func([]byte), msg []byte) {
	if msg != nil {
		reply(msg)
	}
}

// lookUp returns what goes back to the client; nil when the service ends meanwhile.
func (s *service) lookUp(ctx context.Context, req forward.Request, d responder.Decision) []byte {
	defer s.survive(req.Query)
	msg, err := s.forwarder.Exchange(ctx, req)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return d.ServerFailure(dns.ExtendedErrorCodeNoReachableAuthority, "mesh DNS: "+err.Error())
	}
	if msg = responder.Fit(msg, d.Limit); msg == nil {
		return d.ServerFailure(dns.ExtendedErrorCodeInvalidData, "mesh DNS: the upstream resolver's answer could not be read")
	}
	return msg
}

// decide asks the responder.
func (s *service) decide(q responder.Query) responder.Decision {
	d := responder.Decision{Outcome: responder.Dropped}
	func() {
		defer s.survive(q.Raw)
		d = s.responder.Respond(q)
	}()
	return d
}

// survive is deferred where bytes of a pod or of a resolver are parsed. Should
// they make the parser panic, that one query is dropped, counted and logged; the
// DNS of all other pods goes on.
func (s *service) survive(query []byte) {
	if p := recover(); p != nil {
		s.metrics.panics.Inc()
		s.log.Error("a message made the parser panic; please report it", "panic", p, "query", query, "stack", string(debug.Stack()))
	}
}
