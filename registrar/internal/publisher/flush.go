package publisher

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// pendingChange is what is still to be given to Envoy about one service.
type pendingChange struct {
	shape, clusters, gone bool
	// ports whose endpoint sets may differ.
	ports map[uint16]struct{}
	// awakened are names that led nowhere and lead to a cluster now.
	awakened map[string]struct{}
	// unsaved: the service's entry must reach the disk first, because a restart
	// goes on with the saved step. Endpoints alone never wait for it.
	unsaved bool
	// waiters are closed once the change is applied.
	waiters []chan struct{}
}

// flush takes what changed in the engine and gives Envoy what may be given now.
// The caller holds mu.
func (p *Publisher) flush() {
	for _, ch := range p.engine.TakeDirty() {
		pc := p.pending[ch.Service]
		if pc == nil {
			pc = &pendingChange{ports: map[uint16]struct{}{}, awakened: map[string]struct{}{}}
			p.pending[ch.Service] = pc
		}
		pc.shape = pc.shape || ch.Shape
		pc.clusters = pc.clusters || ch.Clusters
		pc.gone = ch.Gone
		for _, n := range ch.Ports {
			pc.ports[n] = struct{}{}
		}
		for _, n := range ch.Awakened {
			pc.awakened[n] = struct{}{}
		}
		if ch.Entry {
			pc.unsaved = pc.unsaved || ch.Shape || ch.Clusters || ch.Gone
			p.dns.save(ch.Service)
			p.wake()
		}
	}
	for _, c := range p.engine.TakeContests() {
		p.log.Warn("pods of several nodes claim one address: either the former one's record is about to go, or a node claims what is not its own; the other gets no requests meanwhile",
			"address", c.Addr.String(), "owner", c.Owner.UID, "owner_node", c.Owner.Node, "owner_service", c.Owner.Service.String(),
			"other", c.Other.UID, "other_node", c.Other.Node, "other_service", c.Other.Service.String())
	}
	p.apply()
}

// apply gives Envoy the pending changes that wait for no disk, as one batch, and
// then awaits the steps they are in. The caller holds mu.
func (p *Publisher) apply() {
	if p.watched > 0 {
		defer p.notify()
	}
	// Services of one name in several namespaces hand their flat name on among each other:
	// the virtual hosts of one without those of the other would have it twice, or not.
	unsaved := map[string]bool{}
	for key, pc := range p.pending {
		if pc.unsaved {
			unsaved[key.Name] = true
		}
	}
	var ready []model.ServiceKey
	for key, pc := range p.pending {
		if !pc.unsaved && (!pc.shape && !pc.gone || !unsaved[key.Name]) {
			ready = append(ready, key)
		}
	}
	if len(ready) == 0 {
		return
	}
	slices.SortFunc(ready, model.ServiceKey.Compare)
	b := newBatch()
	var stepping []model.ServiceKey
	urgent := false
	var waiters []chan struct{}
	for _, key := range ready {
		pc := p.pending[key]
		delete(p.pending, key)
		waiters = append(waiters, pc.waiters...)
		p.renewClusters(b, key, pc)
		if pc.shape || pc.gone {
			shape, _ := p.engine.Shape(key)
			p.reshape(b, key, shape)
			stepping = append(stepping, key)
			urgent = urgent || len(shape.Await) > 0
		}
	}
	p.applyBatch(b)
	p.updateTable(urgent)
	for _, key := range stepping {
		p.awaitStep(key)
	}
	for _, ch := range waiters {
		close(ch)
	}
}

// reshape follows a change of what a service is called and serves; a zero shape
// is a service that was forgotten.
func (p *Publisher) reshape(b *batch, key model.ServiceKey, shape projection.View) {
	p.table.set(key, shape.VirtualHosts)
	if p.dns.set(key, shape) {
		p.wake()
	}
	for _, c := range shape.Clusters {
		g, given := p.given[c.Name]
		// What was asked for before it existed, or was taken from Envoy, is still
		// subscribed and will not be asked for again (XDS-R4, XDS-D4).
		switch {
		case given && g.tombstone:
			// Names that led nowhere are forgotten when Envoy goes (I9); what all have is not.
			p.give(b, c.Name, g.kind)
		case given && g.kind != cache.Endpoints:
		case p.cache.Subscribed(cache.Key{Kind: cache.OnDemandCluster, Name: c.Name}):
			p.give(b, c.Name, cache.OnDemandCluster)
		case !given && p.cache.Subscribed(cache.Key{Kind: cache.Endpoints, Name: c.Name}):
			p.giveEndpoints(b, c.Name)
		}
	}
	p.warmAll(b)
	for _, c := range shape.Conflicts {
		p.log.Warn("pods of a service disagree", "service", key.String(), "conflict", c)
	}
}

// renewClusters rebuilds what the cache holds of one service: all of it after a
// change of shape or clusters, else the load assignments of the ports that
// changed.
func (p *Publisher) renewClusters(b *batch, key model.ServiceKey, pc *pendingChange) {
	all := pc.shape || pc.clusters || pc.gone
	for _, name := range slices.Sorted(maps.Keys(p.names[key])) {
		g := p.given[name]
		_, changed := pc.ports[g.port]
		switch {
		case all:
			p.give(b, name, g.kind)
		case changed && !g.tombstone:
			p.renewEndpoints(b, name, g)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(pc.awakened)) {
		if g, ok := p.given[name]; ok && g.service != key {
			p.give(b, name, g.kind)
		}
	}
}

// SetSelf says where this node is, if that was learned or changed after the start: which
// endpoints are near is in every load assignment.
func (p *Publisher) SetSelf(l model.Locality) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l == p.self {
		return
	}
	p.self = l
	b := newBatch()
	for _, name := range slices.Sorted(maps.Keys(p.given)) {
		g := p.given[name]
		if g.tombstone || p.pending[g.service] != nil {
			continue // the latter come with the change that waits for the disk, all of them
		}
		p.renewEndpoints(b, name, g)
	}
	p.applyBatch(b)
}

// renewEndpoints puts into the batch the load assignment of a cluster that the cache holds.
func (p *Publisher) renewEndpoints(b *batch, name string, g givenCluster) {
	if c, ok := p.engine.Cluster(name); ok {
		p.setEndpoints(b, c)
		return
	}
	// A second spelling that the projection has let go of, and Envoy has not.
	p.give(b, name, g.kind)
}

// give puts into the batch what a cluster name leads to now: the cluster with its
// load assignment, a tombstone, or its absence. Of kind Endpoints it is the load
// assignment alone, for who reads no clusters.
func (p *Publisher) give(b *batch, name string, kind cache.Kind) {
	if kind == cache.Endpoints {
		p.giveEndpoints(b, name)
		return
	}
	a := p.engine.Resolve(name)
	// A registrar that has just started gives upstreams to all before it knows what an
	// Envoy has on demand. Then both sources say the same: what is taken from one of
	// them would be missing.
	old, given := p.given[name]
	both := old.both || given && old.kind == cache.WildcardCluster && kind == cache.OnDemandCluster
	kinds := []cache.Kind{kind}
	if both {
		kind, kinds = cache.WildcardCluster, []cache.Kind{cache.WildcardCluster, cache.OnDemandCluster}
	}
	if a.Alias && kind == cache.WildcardCluster && !both {
		// What was warm before its service was forgotten is a mere spelling now (I2).
		p.engine.Forget(name)
		a = projection.Answer{Kind: projection.Refused}
	}
	p.forget(name)
	// Who still has the cluster, because its change is late or rejected, or reads
	// endpoints alone, must not keep those of a name that leads nowhere.
	endpoints := cache.Key{Kind: cache.Endpoints, Name: name}
	var msg proto.Message
	switch a.Kind {
	case projection.Real:
		cluster, err := resource.Cluster(p.serviceCluster(a.Cluster))
		if err != nil {
			p.log.Error("cluster cannot be built; its name is refused", "cluster", name, "error", err)
			break
		}
		msg = cluster
		p.setEndpoints(b, a.Cluster)
	case projection.Tombstone:
		msg = resource.Tombstone(name)
		b.remove(endpoints)
	case projection.Refused:
		b.remove(endpoints)
	}
	for _, k := range kinds {
		if msg == nil {
			b.remove(cache.Key{Kind: k, Name: name})
			continue
		}
		p.set(b, k, name, msg)
	}
	if msg != nil {
		p.note(name, givenCluster{
			service: a.Service, port: a.Cluster.ID.Port, kind: kind, both: both, tombstone: a.Kind == projection.Tombstone,
		})
	}
}

func (p *Publisher) giveEndpoints(b *batch, name string) {
	g, given := p.given[name]
	switch {
	case !given || g.kind == cache.Endpoints:
		p.forget(name)
	case p.pending[g.service] != nil:
		return // they come with the change of their cluster, which may mean another port then
	}
	c, ok := p.engine.Cluster(name)
	if !ok {
		b.remove(cache.Key{Kind: cache.Endpoints, Name: name}) // the cache answers with an empty assignment
		return
	}
	p.setEndpoints(b, c)
	if _, ok := p.given[name]; !ok {
		p.note(name, givenCluster{service: c.ID.Service, port: c.ID.Port, kind: cache.Endpoints})
	}
}

// note does the bookkeeping of one cluster name.
func (p *Publisher) note(name string, g givenCluster) {
	p.given[name] = g
	if p.names[g.service] == nil {
		p.names[g.service] = map[string]struct{}{}
	}
	p.names[g.service][name] = struct{}{}
}

// forget drops the bookkeeping of one cluster name.
func (p *Publisher) forget(name string) {
	g, ok := p.given[name]
	if !ok {
		return
	}
	delete(p.given, name)
	delete(p.names[g.service], name)
	if len(p.names[g.service]) == 0 {
		delete(p.names, g.service)
	}
}

func (p *Publisher) serviceCluster(c projection.Cluster) resource.ServiceCluster {
	out := resource.ServiceCluster{
		Name: c.Name, SNI: c.SNI, Protocol: c.Protocol, Identities: c.Identities, TrustDomain: p.cfg.TrustDomain,
	}
	if c.Protocol == port.TCP {
		// Named after an address; in statistics after the service.
		out.StatName = fmt.Sprintf("%s.%s:%d", c.ID.Service.Name, c.ID.Service.Namespace, c.ID.Port)
	}
	return out
}

func (p *Publisher) setEndpoints(b *batch, c projection.Cluster) {
	la := resource.LoadAssignment{Name: c.EDSName, Self: p.self, Endpoints: make([]resource.Endpoint, 0, len(c.Endpoints))}
	for _, ep := range c.Endpoints {
		la.Endpoints = append(la.Endpoints, resource.Endpoint{
			Addr:   netip.AddrPortFrom(ep.Addr, resource.InboundPort),
			Weight: ep.Weight, Locality: ep.Locality, Draining: ep.Health == model.Draining,
		})
	}
	p.set(b, cache.Endpoints, c.EDSName, resource.Endpoints(la))
}

// set puts one resource into the batch. A message that cannot be serialised is a
// fault of a builder: it is logged and what Envoy has stays.
func (p *Publisher) set(b *batch, kind cache.Kind, name string, msg proto.Message) {
	r, err := cache.NewResource(name, msg)
	if err != nil {
		p.log.Error("resource cannot be serialised; the last good one stays", "kind", kind.String(), "name", name, "error", err)
		return
	}
	b.Set[kind] = append(b.Set[kind], r)
}

// batch collects one cache.Batch.
type batch struct{ cache.Batch }

func newBatch() *batch { return &batch{cache.Batch{Set: map[cache.Kind][]cache.Resource{}}} }

func (b *batch) remove(keys ...cache.Key) { b.Remove = append(b.Remove, keys...) }

func (b *batch) empty() bool {
	return len(b.Set) == 0 && len(b.Remove) == 0 && len(b.Absent) == 0 && len(b.Resend) == 0
}

func (p *Publisher) applyBatch(b *batch) {
	if !b.empty() {
		p.cache.Apply(b.Batch)
	}
}
