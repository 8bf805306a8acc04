package publisher

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// Catalogue keeps what must survive a restart, so that the same names get the
// same addresses and the same bytes.
type Catalogue interface {
	// Save stores entries and removes those of gone. It may block on the disk.
	Save(entries []projection.Entry, gone []model.ServiceKey) error
}

// Names is told what the mesh DNS answers: all names, each time.
type Names interface {
	SetNames(names map[string]Address)
}

// Address is what a name resolves to.
type Address struct {
	V4, V6 netip.Addr
}

const (
	// saveTimeout bounds how long a change waits for the disk. Routing goes on
	// without: a restart then begins from an older step.
	saveTimeout = 2 * time.Second
	// saveRetry is when a save that failed is tried again.
	saveRetry = 5 * time.Second
)

// nameTable is what DNS and the pods' captures are to know. Guarded by
// Publisher.mu.
type nameTable struct {
	// unsaved are the services whose entry is not on disk yet.
	unsaved  map[model.ServiceKey]struct{}
	services map[model.ServiceKey]serviceNames
	// dirty: services changed since they were told; tcpDirty: their TCP
	// ports did. telling: what was taken is about to be told.
	dirty, tcpDirty, telling bool
	// tcp is the sorted union, nil while it must be made anew.
	tcp []netip.AddrPort
	// pods programs the captures; nil before attach exists.
	pods func()
}

// serviceNames is one service's part.
type serviceNames struct {
	spellings []string
	address   Address
	tcp       []uint16
}

func newNameTable() nameTable {
	return nameTable{
		unsaved: map[model.ServiceKey]struct{}{}, services: map[model.ServiceKey]serviceNames{},
		dirty: true, tcpDirty: true,
	}
}

func (t *nameTable) save(key model.ServiceKey) { t.unsaved[key] = struct{}{} }

// set takes a service's shape, zero when it is gone, and reports whether there is
// something to tell.
func (t *nameTable) set(key model.ServiceKey, v projection.View) bool {
	old, had := t.services[key]
	n := serviceNames{spellings: v.Spellings, address: Address{V4: v.VIP4, V6: v.VIP6}, tcp: v.TCPPorts}
	known := len(n.spellings) > 0 && n.address.V4.IsValid()
	switch {
	case !known && !had:
		return false
	case known && had && old.address == n.address && slices.Equal(old.spellings, n.spellings) && slices.Equal(old.tcp, n.tcp):
		return false
	case known:
		t.services[key] = n
	default:
		delete(t.services, key)
	}
	t.dirty = true
	if !slices.Equal(old.tcp, n.tcp) || old.address != n.address {
		t.tcp, t.tcpDirty = nil, true
	}
	return true
}

// tcpPorts returns the sorted union of all services' TCP ports under both addresses.
func (t *nameTable) tcpPorts() []netip.AddrPort {
	if t.tcp == nil {
		t.tcp = []netip.AddrPort{}
		for _, n := range t.services {
			for _, a := range []netip.Addr{n.address.V4, n.address.V6} {
				for _, pt := range n.tcp {
					if a.IsValid() {
						t.tcp = append(t.tcp, netip.AddrPortFrom(a, pt))
					}
				}
			}
		}
		slices.SortFunc(t.tcp, netip.AddrPort.Compare)
	}
	return t.tcp
}

// names returns a new map of all names.
func (t *nameTable) names() map[string]Address {
	out := make(map[string]Address, 2*len(t.services))
	for _, n := range t.services {
		for _, s := range n.spellings {
			out[s] = n.address
		}
	}
	return out
}

// SyncPods says who programs the running pods' TCP port sets; it may block. Call
// it before Run.
func (p *Publisher) SyncPods(program func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dns.pods = program
}

// wake makes the settler look.
func (p *Publisher) wake() {
	for _, kick := range []chan struct{}{p.kickSave, p.kickTell} {
		select {
		case kick <- struct{}{}:
		default:
		}
	}
}

// settle does what may block, until ctx ends, for each service in this order: the
// catalogue on disk, then Envoy, then the pods' port sets, then DNS. Names that wait
// for Envoy's route table hold up no write, and so no endpoint that waits for one.
func (p *Publisher) settle(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { settleEvery(ctx, p.kickTell, func() { p.tellNames(ctx) }) })
	settleEvery(ctx, p.kickSave, p.saveCatalogue)
	wg.Wait()
}

// settleEvery calls fn after every kick, and now and then for what has failed.
func settleEvery(ctx context.Context, kick <-chan struct{}, fn func()) {
	retry := time.NewTicker(saveRetry)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-kick:
		case <-retry.C:
		}
		fn()
	}
}

// saveCatalogue stores the entries that changed and then gives Envoy what waited
// for it. When the disk is slow, Envoy gets it after saveTimeout all the same.
func (p *Publisher) saveCatalogue() {
	p.mu.Lock()
	keys := slices.SortedFunc(maps.Keys(p.dns.unsaved), model.ServiceKey.Compare)
	var entries []projection.Entry
	var gone []model.ServiceKey
	for _, key := range keys {
		delete(p.dns.unsaved, key)
		if e, ok := p.engine.Entry(key); ok {
			entries = append(entries, e)
		} else {
			gone = append(gone, key)
		}
	}
	p.mu.Unlock()
	if len(keys) == 0 {
		return
	}
	late := time.AfterFunc(saveTimeout, func() {
		p.log.Error("the catalogue takes long to be saved; routing goes on without", "services", len(keys))
		p.release(keys)
	})
	err := p.cfg.Catalogue.Save(entries, gone)
	late.Stop()
	p.release(keys)
	if err == nil {
		return
	}
	p.log.Error("the catalogue cannot be saved; routing goes on, and a restart would begin from an older state", "services", len(keys), "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		p.dns.save(key)
	}
}

// release gives Envoy the changes of services whose entries were saved, unless
// they changed again meanwhile.
func (p *Publisher) release(keys []model.ServiceKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		if _, again := p.dns.unsaved[key]; again {
			continue
		}
		if pc := p.pending[key]; pc != nil {
			pc.unsaved = false
		}
	}
	p.apply()
}

// routesTimeout bounds how long a name waits for Envoy's route table.
const routesTimeout = time.Second

// tellNames programs the pods' port sets when they changed, waits for the route
// table, then tells DNS: a name is answered only when the pods know its TCP ports
// (dataplane decision 8), and when Envoy routes it, so that its first request does
// not ask for a cluster by a spelling (I2).
func (p *Publisher) tellNames(ctx context.Context) {
	p.mu.Lock()
	t := &p.dns
	// DNS may know more than a registrar that has just started: it is told nothing
	// before the registry is synced, and then all, even if that is no name.
	if !t.dirty || !p.synced {
		p.mu.Unlock()
		return
	}
	p.updateTable(true)
	// A start waits for the names before Envoy is answered at all.
	starting := p.watched > 0
	names, pods, tcp := t.names(), t.pods, t.tcpDirty
	t.dirty, t.tcpDirty, t.telling = false, false, true
	p.mu.Unlock()
	if tcp && pods != nil {
		pods()
	}
	if !starting {
		p.awaitRoutes(ctx)
	}
	p.cfg.Names.SetNames(names)
	p.mu.Lock()
	defer p.mu.Unlock()
	t.telling = false
	if p.watched > 0 {
		p.notify()
	}
}

func (p *Publisher) awaitRoutes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, routesTimeout)
	defer cancel()
	if _, err := p.awaitOnce(ctx, []cache.Key{{Kind: cache.Route, Name: resource.RoutesName}}, present); err != nil {
		p.log.Debug("names are told before Envoy has their routes", "error", err)
	}
}
