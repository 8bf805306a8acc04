package publisher

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// Config is what Publisher needs. Engine is owned by the Publisher from then on.
type Config struct {
	Engine    *projection.Engine
	Cache     *cache.Cache
	Catalogue Catalogue
	Names     Names
	Log       *slog.Logger
	// Domain and TrustDomain of the mesh, and its address ranges.
	Domain      string
	TrustDomain string
	VIPRanges   []netip.Prefix
	// FlatNamespaces are those whose services also have a one-label name.
	FlatNamespaces []string
	// Self is this node's locality at the start; load assignments prefer it.
	Self model.Locality
	// XDSSocket is named in messages when no Envoy is connected.
	XDSSocket string
	// Now is the clock.
	Now func() time.Time
}

// Publisher is the single writer of the projection and of the xDS cache. Its
// methods are safe for concurrent use; none waits for a file, a peer or a stream
// unless its name begins with Await.
type Publisher struct {
	cfg   Config
	log   *slog.Logger
	cache *cache.Cache

	// mu guards everything below, and the engine.
	mu     sync.Mutex
	engine *projection.Engine
	// self is this node's locality.
	self model.Locality
	// synced: the registry told all its records. connected: an Envoy is there.
	synced, connected bool
	// changed is closed and replaced whenever synced or connected change, and with
	// every change of the projection while somebody watches it.
	changed chan struct{}
	watched int

	// pending is what changed and was not given to Envoy yet, by service.
	pending map[model.ServiceKey]*pendingChange
	// given are the service clusters that the cache holds, and whose they are.
	given map[string]givenCluster
	// names are the same, by service.
	names map[model.ServiceKey]map[string]struct{}
	// awaited is the step of each service that waits for acknowledgements.
	awaited map[model.ServiceKey]*awaitedStep
	// withdrawn has the waiters for the withdrawal of an endpoint, by UID.
	withdrawn map[string][]withdrawal

	table routeTable
	dns   nameTable
	// pods are those of this node whose resources the cache holds.
	pods map[model.AttachmentKey]localPod
	// kickSave and kickTell wake settle for work that must not be done under mu.
	kickSave, kickTell chan struct{}
}

// givenCluster is one service cluster in the cache.
type givenCluster struct {
	service model.ServiceKey
	port    uint16
	// kind is how Envoy gets it; a name keeps its source for good (dataplane
	// decision 5). Endpoints: nobody asked for the cluster, only for its endpoints.
	kind cache.Kind
	// both: of kind WildcardCluster, and given on demand too.
	both bool
	// tombstone: the name leads nowhere.
	tombstone bool
}

// withdrawal is somebody who waits for an endpoint to be taken from its service.
type withdrawal struct {
	service model.ServiceKey
	gone    chan struct{}
}

// New returns a Publisher over an engine that knows the saved services and a
// cache that is still held.
func New(cfg Config) (*Publisher, error) {
	p := &Publisher{
		cfg: cfg, log: cfg.Log, cache: cfg.Cache, engine: cfg.Engine, self: cfg.Self,
		changed:   make(chan struct{}),
		pending:   map[model.ServiceKey]*pendingChange{},
		given:     map[string]givenCluster{},
		names:     map[model.ServiceKey]map[string]struct{}{},
		awaited:   map[model.ServiceKey]*awaitedStep{},
		withdrawn: map[string][]withdrawal{},
		kickSave:  make(chan struct{}, 1),
		kickTell:  make(chan struct{}, 1),
		table:     newRouteTable(),
		dns:       newNameTable(),
		pods:      map[model.AttachmentKey]localPod{},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// The table of nobody: Envoy must find its route table even on an empty mesh.
	if err := p.applyTable(); err != nil {
		return nil, fmt.Errorf("build the first route table: %w", err)
	}
	return p, nil
}

// OnRegistry takes one event of the registry's watch.
func (p *Publisher) OnRegistry(ev registry.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	switch ev.Kind {
	case registry.Upsert:
		if err := p.engine.Upsert(ev.Endpoint, now); err != nil {
			p.log.Warn("endpoint is not usable and left out", "uid", ev.Endpoint.UID, "error", err)
		}
	case registry.Delete:
		p.engine.Delete(ev.UID, ev.Generation, now)
	case registry.Complete:
		p.synced = true
		p.engine.Synced()
		p.notify()
		p.wake()
	}
	p.flush()
	if ev.Kind == registry.Delete {
		for _, w := range p.withdrawn[ev.UID] {
			if pc := p.pending[w.service]; pc != nil {
				pc.waiters = append(pc.waiters, w.gone)
			} else {
				close(w.gone)
			}
		}
		delete(p.withdrawn, ev.UID)
	}
}

// Run answers demand, saves the catalogue, tells DNS and lets time pass, until
// ctx ends. Call it once.
func (p *Publisher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { p.settle(ctx) })
	defer wg.Wait()
	expiry := time.NewTimer(0)
	defer expiry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.cache.DemandReady():
			p.onDemand(p.cache.TakeDemand())
		case <-expiry.C:
			expiry.Reset(p.expire())
		}
	}
}

// The bounds of how long nothing is done about time: services that are to be
// forgotten, and a route table that waits for its turn. A service becomes idle
// without a word to who waits, so the upper one is the retention if that is less:
// it is forgotten at most once as late as that again.
const (
	minExpiry = 100 * time.Millisecond
	maxExpiry = time.Minute
)

// expire forgets what is past its retention and returns when to look again.
func (p *Publisher) expire() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	next := p.engine.Expire(now)
	p.flush()
	longest := min(maxExpiry, p.engine.Retention())
	if next.IsZero() {
		return max(longest, minExpiry)
	}
	return max(min(next.Sub(now), longest), minExpiry)
}

// SetOldest says when the oldest local attachment was made: the addresses of
// services forgotten before it may be given to others (dataplane decision 8).
func (p *Publisher) SetOldest(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engine.Reusable(t)
}

// notify wakes who waits for synced or connected.
func (p *Publisher) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Missing names what a pod would have to wait for, or is empty.
func (p *Publisher) Missing() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.missing()
}

func (p *Publisher) missing() string {
	switch {
	case !p.synced:
		return "the registry is not synced yet"
	case !p.connected:
		return "no Envoy is connected to " + p.cfg.XDSSocket + ": start the node's Envoy, or look into its log"
	}
	return ""
}

// AwaitReady waits until the registry is synced and an Envoy is connected; the
// error names what is missing.
func (p *Publisher) AwaitReady(ctx context.Context) error {
	return p.awaitChange(ctx, p.missing)
}

// AwaitSynced waits until the registry has told all its records.
func (p *Publisher) AwaitSynced(ctx context.Context) error {
	return p.awaitChange(ctx, func() string {
		if p.synced {
			return ""
		}
		return p.missing()
	})
}

// AwaitProjected waits until these records are in the projection, what follows
// from them is in the cache, and Names was told.
func (p *Publisher) AwaitProjected(ctx context.Context, uids []string) error {
	p.mu.Lock()
	p.watched++
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.watched--
		p.mu.Unlock()
	}()
	return p.awaitChange(ctx, func() string {
		for _, uid := range uids {
			if !p.engine.Has(uid) {
				return "record " + uid + " has not come from the registry"
			}
		}
		switch {
		case len(p.pending) > 0:
			return "the catalogue is not saved"
		case p.dns.dirty || p.dns.telling:
			return "mesh DNS is not told yet"
		}
		return ""
	})
}

// awaitChange waits until missing, called with mu held, returns nothing.
func (p *Publisher) awaitChange(ctx context.Context, missing func() string) error {
	for {
		p.mu.Lock()
		text, changed := missing(), p.changed
		p.mu.Unlock()
		if text == "" {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s (%w)", text, ctx.Err())
		}
	}
}
