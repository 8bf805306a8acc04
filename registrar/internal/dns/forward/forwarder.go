package forward

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

const (
	// tryInterval is how long one resolver is waited for before the next one is
	// asked as well. The first one is still listened to: a slow answer counts.
	tryInterval = time.Second
	// lookupTimeout bounds a look-up. Clients give up after 5 s (resolv.conf(5));
	// a SERVFAIL before that tells them more than silence.
	lookupTimeout = 4 * time.Second
)

// ErrNoUpstream says that no resolver is configured.
var ErrNoUpstream = errors.New("no upstream resolver is configured; name one in the registrar's resolv.conf or by flag")

// Config is what a Forwarder needs.
type Config struct {
	// Metrics counts what happens upstream. Required.
	Metrics *Metrics
	// Now is the clock that remembers failing resolvers; nil for the real one.
	Now func() time.Time
	// TryInterval and Timeout replace the defaults of 1 s and 4 s when not 0.
	TryInterval, Timeout time.Duration
}

// Forwarder asks upstream resolvers from the network namespace of its process.
// Safe for concurrent use.
type Forwarder struct {
	metrics     *Metrics
	tryInterval time.Duration
	timeout     time.Duration
	health      *health
	idle        *idlePool
}

// New returns a forwarder. Close it to close its idle connections.
func New(cfg Config) *Forwarder {
	f := &Forwarder{
		metrics: cfg.Metrics, tryInterval: cfg.TryInterval, timeout: cfg.Timeout,
		idle: newIdlePool(),
	}
	now := cfg.Now
	if now == nil {
		now = time.Now
	}
	f.health = newHealth(now)
	if f.tryInterval == 0 {
		f.tryInterval = tryInterval
	}
	if f.timeout == 0 {
		f.timeout = lookupTimeout
	}
	return f
}

// Close closes idle connections. Look-ups that run end by their contexts.
func (f *Forwarder) Close() { f.idle.close() }

// Request is one query to forward.
type Request struct {
	// Query is a well-formed message with one question. It is not modified.
	Query []byte
	// Upstreams to ask, the preferred one first.
	Upstreams []netip.AddrPort
	// TCP asks over TCP at once; otherwise TCP is used for truncated answers.
	TCP bool
}

// Exchange returns the answer of the first resolver that has one, with the ID of
// the query. The next resolver is asked when one fails, answers SERVFAIL,
// REFUSED or NOTIMP, or is silent for a while; when none has an answer, the first
// such refusal is returned. An error means that no resolver said anything.
// It returns within the time of Config, or when ctx ends.
func (f *Forwarder) Exchange(ctx context.Context, req Request) ([]byte, error) {
	if len(req.Upstreams) == 0 {
		return nil, ErrNoUpstream
	}
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	start := time.Now()
	l := &lookup{f: f, req: req, order: f.health.order(req.Upstreams)}
	// Each resolver once, then the preferred one once more: over UDP a single
	// loss must not fail a name.
	l.left = len(l.order) + 1
	l.results = make(chan attempt, l.left)
	reply, err := l.run(ctx)
	if err != nil {
		f.metrics.exhausted.Inc()
		return nil, err
	}
	f.metrics.seconds.Observe(time.Since(start).Seconds())
	copy(reply[:2], req.Query[:2])
	return reply, nil
}

// lookup is the state of one Exchange; only its goroutine touches it.
type lookup struct {
	f       *Forwarder
	req     Request
	order   []netip.AddrPort
	next    int
	left    int
	running int
	results chan attempt
	// refusal is the first answer that no resolver bettered.
	refusal []byte
	lastErr error
}

// attempt is what came of asking one resolver.
type attempt struct {
	server netip.AddrPort
	reply  []byte
	err    error
}

func (l *lookup) run(ctx context.Context) ([]byte, error) {
	timer := time.NewTimer(l.f.tryInterval)
	defer timer.Stop()
	silent := l.start(ctx)
	for {
		select {
		case a := <-l.results:
			l.running--
			if ctx.Err() != nil {
				return l.giveUp()
			}
			if reply := l.take(a); reply != nil {
				return reply, nil
			}
			// A resolver that failed or refused would do so again at once; only
			// silence is worth another try.
			if l.next < len(l.order) {
				silent = l.start(ctx)
				timer.Reset(l.f.tryInterval)
			} else if l.running == 0 {
				return l.giveUp()
			}
		case <-timer.C:
			l.f.health.failed(silent)
			l.f.metrics.failures.timeout.Inc()
			l.lastErr = fmt.Errorf("%s: no answer within %s", silent, l.f.tryInterval)
			if l.left > 0 {
				silent = l.start(ctx)
				timer.Reset(l.f.tryInterval)
			}
		case <-ctx.Done():
			return l.giveUp()
		}
	}
}

// start asks the next resolver and returns it. The goroutine ends when ctx does,
// and never blocks on its result.
func (l *lookup) start(ctx context.Context) netip.AddrPort {
	server := l.order[l.next%len(l.order)]
	l.next++
	l.left--
	l.running++
	go func() {
		reply, err := l.f.ask(ctx, server, l.req)
		l.results <- attempt{server: server, reply: reply, err: err}
	}()
	return server
}

// take returns the reply if it settles the look-up.
func (l *lookup) take(a attempt) []byte {
	if a.err != nil {
		l.f.health.failed(a.server)
		l.f.metrics.failures.network.Inc()
		l.lastErr = fmt.Errorf("%s: %w", a.server, a.err)
		return nil
	}
	l.f.health.answered(a.server)
	switch a.reply[3] & 0xf {
	case dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented:
		l.f.metrics.failures.rcode.Inc()
		if l.refusal == nil {
			l.refusal = a.reply
		}
		return nil
	}
	return a.reply
}

func (l *lookup) giveUp() ([]byte, error) {
	if l.refusal != nil {
		return l.refusal, nil
	}
	if l.lastErr == nil {
		l.lastErr = context.DeadlineExceeded
	}
	return nil, fmt.Errorf("no upstream resolver answered: %w", l.lastErr)
}
