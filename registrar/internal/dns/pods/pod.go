package pods

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

const (
	// aliveInterval is how often the capture is refreshed: three chances within
	// the 5 s after which it ends (dataplane decision 9).
	aliveInterval = 1500 * time.Millisecond
	// aliveRetry is the pause after a refresh that failed, for aliveEager from the
	// opening of the sockets on: the plugin programs the pod's rules at about the
	// same time, and a name that is asked for in between would miss the mesh.
	aliveRetry = 20 * time.Millisecond
	aliveEager = 5 * time.Second
	// aliveSlow is the pause after later failures.
	aliveSlow = time.Second
	// openRetry and openRetryMost are the first and the longest pause before
	// sockets are opened again.
	openRetry     = 20 * time.Millisecond
	openRetryMost = time.Second
	// drainTimeout is how long look-ups may go on at a graceful stop, after the
	// capture was withdrawn.
	drainTimeout = time.Second
	drainPoll    = 5 * time.Millisecond
)

// Alive keeps the capture of port 53 alive in one network namespace. Each call
// is bounded and comes from one goroutine at a time. plugins/capture has one.
type Alive interface {
	// Refresh captures for another 5 s. It fails while the pod's rules are not
	// programmed yet.
	Refresh() error
	// Withdraw ends the capture now.
	Withdraw() error
	// Close lets go of the namespace.
	Close() error
}

var (
	// errRemoved ends a pod at once.
	errRemoved = errors.New("pod removed")
	// errStopping ends a pod gracefully.
	errStopping = errors.New("mesh DNS stops")
)

// State says whether DNS is served in a pod.
type State uint8

const (
	// Failed pods have no sockets; it is tried again.
	Failed State = iota
	// Serving pods have all their sockets.
	Serving
	// Disabled pods asked for nothing.
	Disabled
)

// Status is how one pod is.
type Status struct {
	// State of the sockets.
	State State
	// Err says why the state is Failed.
	Err string
	// Captured is true while the capture is kept alive.
	Captured bool
	// CaptureErr says why Captured is false though the state is Serving.
	CaptureErr string
}

// pod is served by one goroutine, run. cancel ends it, done tells that it did.
type pod struct {
	set    *Set
	cancel context.CancelCauseFunc
	done   chan struct{}
	// tried is closed after the first attempt to open the sockets.
	tried chan struct{}

	mu     sync.Mutex
	conf   table.Pod
	status Status
}

func (p *pod) config() table.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conf
}

func (p *pod) setConfig(conf table.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conf = conf
}

func (p *pod) currentStatus() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

// setStatus reports a change, and counts it.
func (p *pod) setStatus(s Status) {
	p.mu.Lock()
	old := p.status
	p.status = s
	p.mu.Unlock()
	if old == s {
		return
	}
	m := p.set.cfg.Metrics
	m.serving.Add(step(old.State == Serving, s.State == Serving))
	m.captured.Add(step(old.Captured, s.Captured))
	p.set.cfg.OnChange(p.config().Key)
}

func step(from, to bool) float64 {
	switch {
	case from == to:
		return 0
	case to:
		return 1
	}
	return -1
}

// run serves the pod until ctx ends. It alone changes the status.
func (p *pod) run(ctx context.Context) {
	defer close(p.done)
	defer func() { p.setStatus(Status{Err: "stopped"}) }()
	pause := openRetry
	first := true
	for {
		opened, err := p.serve(ctx, func() {
			if first {
				close(p.tried)
				first = false
			}
		})
		if ctx.Err() != nil {
			return
		}
		if opened {
			pause = openRetry
		}
		p.set.cfg.Metrics.openErrors.Inc()
		p.setStatus(Status{State: Failed, Err: err.Error()})
		if first {
			close(p.tried)
			first = false
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, openRetryMost)
	}
}

// sleep says false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// serve opens the sockets, calls opened, and serves until ctx ends, a socket
// fails or the namespace is gone from its path. It says whether they were open.
func (p *pod) serve(ctx context.Context, opened func()) (bool, error) {
	conf := p.config()
	socks, err := p.set.open(ctx, conf)
	if err != nil {
		return false, err
	}
	// Look-ups outlive ctx while the capture is withdrawn and the rest drains.
	lookups, endLookups := context.WithCancel(context.WithoutCancel(ctx))
	defer endLookups()
	s := p.set.newService(p)
	s.start(lookups, socks)
	p.setStatus(Status{State: Serving, CaptureErr: "not captured yet"})
	opened()

	err = p.keepAlive(ctx, watch{service: s, netns: conf.Netns, id: socks.id})

	if errors.Is(context.Cause(ctx), errStopping) {
		drain(s)
	}
	endLookups()
	closeErr := socks.close()
	s.stop()
	return true, errors.Join(err, closeErr)
}

// drain lets look-ups that run finish, for a while.
func drain(s *service) {
	deadline := time.NewTimer(drainTimeout)
	defer deadline.Stop()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for s.share.InUse() > 0 {
		select {
		case <-deadline.C:
			return
		case <-poll.C:
		}
	}
}

// watch is what keepAlive looks at.
type watch struct {
	service *service
	netns   string
	id      identity
}

// gone says why the sockets serve nobody any more; nil while they do. Sockets
// keep a namespace in existence, so somebody has to notice, also while the
// registrar is away, that its pod ended.
func (w watch) gone() error {
	id, err := identityAt(w.netns)
	if err != nil {
		return fmt.Errorf("the network namespace is gone: %w", err)
	}
	if id != w.id {
		return fmt.Errorf("%s leads to another network namespace now", w.netns)
	}
	return nil
}

// keepAlive refreshes the capture until ctx ends (nil) or the sockets serve
// nobody any more (why), and withdraws it then.
func (p *pod) keepAlive(ctx context.Context, w watch) error {
	c := &capture{open: func() (Alive, error) { return p.set.cfg.OpenAlive(w.netns) }}
	defer c.close()
	eager := time.Now().Add(aliveEager)
	var next time.Duration
	for {
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case err := <-w.service.failed:
			timer.Stop()
			return fmt.Errorf("a socket failed: %w", err)
		case <-timer.C:
		}
		if err := w.gone(); err != nil {
			return err
		}
		first := !p.currentStatus().Captured
		if err := c.refresh(); err != nil {
			p.set.cfg.Metrics.aliveErrors.Inc()
			p.setStatus(Status{State: Serving, CaptureErr: err.Error()})
			next = aliveSlow
			if time.Now().Before(eager) {
				next = aliveRetry
			}
			continue
		}
		p.setStatus(Status{State: Serving, Captured: true})
		next = aliveInterval
		if first {
			// Pods that were opened together are not refreshed together for ever.
			next = rand.N(aliveInterval) //nolint:gosec // G404: the spread guards nothing
		}
	}
}

// capture opens an Alive when it is needed, and again after an error.
type capture struct {
	open  func() (Alive, error)
	alive Alive
}

func (c *capture) refresh() error {
	if c.alive == nil {
		alive, err := c.open()
		if err != nil {
			return err
		}
		c.alive = alive
	}
	if err := c.alive.Refresh(); err != nil {
		_ = c.alive.Close()
		c.alive = nil
		return err
	}
	return nil
}

// close withdraws the capture. It fails for a pod that is gone, which needs no withdrawal.
func (c *capture) close() {
	if c.alive == nil {
		return
	}
	_ = c.alive.Withdraw()
	_ = c.alive.Close()
}

// addresses are where DNS is served in a pod (contract 7).
func addresses(conf table.Pod, port uint16) []netip.AddrPort {
	list := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)}
	if conf.IPv6 {
		list = append(list, netip.AddrPortFrom(netip.IPv6Loopback(), port))
	}
	return list
}
