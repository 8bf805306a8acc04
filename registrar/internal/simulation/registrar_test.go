package simulation

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/catalogue"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/embedded"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

func vipRanges() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")}
}

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

// pipeline is everything from the record stream on, as `registrar run` wires it.
type pipeline struct {
	db        *bbolt.DB
	backend   *embedded.Backend
	cache     *cache.Cache
	publisher *publisher.Publisher
	stop      context.CancelFunc
	running   sync.WaitGroup
}

// setting is what tests give a pipeline.
type setting struct {
	path       string // of state.db
	unknownCap int
	names      publisher.Names
	// wrap stands between the publisher and the catalogue on disk; nil leaves it.
	wrap func(publisher.Catalogue) publisher.Catalogue
	log  *slog.Logger
	// feed tells the records in the registry's place; nil leaves it to the registry.
	feed func(sink func(registry.Event))
}

// startPipeline opens the state file and starts what runs; the cache is still held.
func startPipeline(t *testing.T, s setting) *pipeline {
	t.Helper()
	p := &pipeline{}
	var err error
	p.db, _, err = state.Open(s.path, s.log)
	must(t, err)
	p.db.NoSync = true // what is lost in a crash is the test's to say
	p.backend, err = embedded.Open(embedded.Options{DB: p.db, TrustDomain: domain, Log: s.log, MeshName: func(key model.ServiceKey) string {
		return authority.Authority{Service: key.Name, Namespace: key.Namespace}.HostPort(domain)
	}})
	must(t, err)
	store, err := catalogue.Open(p.db, domain, s.log)
	must(t, err)
	cfg := engineConfig(s.unknownCap)
	saved, err := store.Load(func(e projection.Entry) error {
		_, err := projection.New(cfg, []projection.Entry{e}, time.Now())
		return err
	})
	must(t, err)
	engine, err := projection.New(cfg, saved, time.Now())
	must(t, err)
	var entries publisher.Catalogue = store
	if s.wrap != nil {
		entries = s.wrap(store)
	}
	p.cache = cache.New(cache.Config{})
	p.publisher, err = publisher.New(publisher.Config{
		Engine: engine, Cache: p.cache, Catalogue: entries, Names: s.names, Log: s.log,
		Domain: domain, TrustDomain: domain, VIPRanges: vipRanges(), FlatNamespaces: flatNamespaces(),
		XDSSocket: "xds.sock", Now: time.Now,
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	p.running.Go(func() { _ = p.publisher.Run(ctx) })
	if s.feed != nil {
		s.feed(p.publisher.OnRegistry)
	} else {
		p.running.Go(func() { _ = p.backend.Watch(ctx, p.publisher.OnRegistry) })
	}
	return p
}

// close ends everything. What was not stored yet is stored.
func (p *pipeline) close(t *testing.T) {
	t.Helper()
	p.stop()
	p.running.Wait()
	must(t, p.backend.Close())
	must(t, p.db.Close())
}

func engineConfig(unknownCap int) projection.Config {
	return projection.Config{
		Domain: domain, FlatNamespaces: flatNamespaces(), VIP4: vipRanges()[0], VIP6: vipRanges()[1],
		UnknownCap: unknownCap, Retention: projection.DefaultRetention,
	}
}

// told are the names that the mesh DNS answers.
type told struct {
	mu    sync.Mutex
	names map[string]publisher.Address
}

// SetNames implements publisher.Names.
func (n *told) SetNames(names map[string]publisher.Address) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names = names
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
