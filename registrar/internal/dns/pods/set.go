package pods

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// maxOpening bounds how many namespaces are entered at the same time, each on a
// thread of its own.
const maxOpening = 8

// Config is what a Set needs. Everything is required.
type Config struct {
	// Responder decides about queries.
	Responder Responder
	// Forwarder looks up what is not of the mesh.
	Forwarder Forwarder
	// Limiter bounds look-ups.
	Limiter *forward.Limiter
	// Upstreams returns the resolvers for pods that have none of their own.
	Upstreams func() []netip.AddrPort
	// OpenAlive opens the capture of port 53 in the namespace at a path.
	OpenAlive func(netns string) (Alive, error)
	// OnChange is told of every pod whose status changed. It must not block, and
	// must not call the set.
	OnChange func(model.AttachmentKey)
	// Metrics counts.
	Metrics *Metrics
	// Log is for what has no other reporter.
	Log *slog.Logger
	// Port on the loopback of the pods.
	Port uint16
}

// Set is the pods in which DNS is served. One goroutine at a time calls Apply
// and Close; Status may be called from anywhere.
type Set struct {
	cfg     Config
	opening chan struct{}

	mu   sync.Mutex
	pods map[model.AttachmentKey]*pod
}

// New returns an empty set.
func New(cfg Config) *Set {
	return &Set{cfg: cfg, opening: make(chan struct{}, maxOpening), pods: map[model.AttachmentKey]*pod{}}
}

// Apply removes pods and sets others, new or changed, and returns when what is
// removed is let go of, and everything that is set was tried to be opened once.
// What failed is tried again for as long as the pod stays; the end of ctx ends
// neither that nor this call.
func (s *Set) Apply(ctx context.Context, remove []model.AttachmentKey, set []table.Pod) {
	var ending []*pod
	for _, k := range remove {
		if p := s.take(k); p != nil {
			p.cancel(errRemoved)
			ending = append(ending, p)
		}
	}
	for _, conf := range set {
		if p := s.replaced(conf); p != nil {
			p.cancel(errRemoved)
			ending = append(ending, p)
		}
	}
	for _, p := range ending {
		<-p.done
	}
	var starting []*pod
	for _, conf := range set {
		starting = append(starting, s.put(ctx, conf))
	}
	for _, p := range starting {
		<-p.tried
	}
}

// take removes a pod from the set.
func (s *Set) take(k model.AttachmentKey) *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[k]
	delete(s.pods, k)
	return p
}

// replaced removes and returns the pod whose sockets do not fit conf any more,
// and gives the others their new configuration.
func (s *Set) replaced(conf table.Pod) *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[conf.Key]
	if p == nil {
		return nil
	}
	old := p.config()
	if old.Netns != conf.Netns || old.IPv6 != conf.IPv6 || old.Disabled != conf.Disabled {
		delete(s.pods, conf.Key)
		return p
	}
	p.setConfig(conf)
	return nil
}

// put returns the pod, and starts it when it is new.
func (s *Set) put(ctx context.Context, conf table.Pod) *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pods[conf.Key]; p != nil {
		return p
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	p := &pod{set: s, cancel: cancel, done: make(chan struct{}), tried: make(chan struct{}), conf: conf}
	s.pods[conf.Key] = p
	if conf.Disabled {
		p.status = Status{State: Disabled}
		close(p.tried)
		close(p.done)
		cancel(errRemoved)
		return p
	}
	go p.run(ctx)
	return p
}

// Status returns how a pod is; false for one that is not in the set.
func (s *Set) Status(k model.AttachmentKey) (Status, bool) {
	s.mu.Lock()
	p := s.pods[k]
	s.mu.Unlock()
	if p == nil {
		return Status{}, false
	}
	return p.currentStatus(), true
}

// Close ends all pods gracefully and at the same time: the capture first, so
// that names resolve without us, then, after what runs had a moment to finish,
// the sockets.
func (s *Set) Close() {
	s.mu.Lock()
	ending := make([]*pod, 0, len(s.pods))
	for _, p := range s.pods {
		ending = append(ending, p)
	}
	clear(s.pods)
	s.mu.Unlock()
	for _, p := range ending {
		p.cancel(errStopping)
	}
	for _, p := range ending {
		<-p.done
	}
}

// open opens the sockets of a pod, a few pods at a time.
func (s *Set) open(ctx context.Context, conf table.Pod) (*sockets, error) {
	select {
	case s.opening <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-s.opening }()
	return openSockets(ctx, conf.Netns, addresses(conf, s.cfg.Port))
}

func (s *Set) newService(p *pod) *service {
	return &service{
		responder: s.cfg.Responder, forwarder: s.cfg.Forwarder, share: s.cfg.Limiter.Share(),
		metrics: s.cfg.Metrics, log: s.cfg.Log, pod: p.config, upstreams: s.cfg.Upstreams,
	}
}
