package publisher

import (
	"maps"
	"slices"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// onDemand answers every name that Envoy began to ask for and that the cache does
// not hold: an unanswered name would stall all others (XDS-D1). It also notices
// Envoys that come and go.
func (p *Publisher) onDemand(d cache.Demand) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noticeEnvoy()
	p.evict(d.Dropped) // makes room for names that lead nowhere
	b := newBatch()
	for _, key := range d.Wanted {
		switch key.Kind {
		case cache.OnDemandCluster:
			p.give(b, key.Name, cache.OnDemandCluster)
		case cache.Endpoints:
			p.giveEndpoints(b, key.Name)
		case cache.Secret, cache.Route, cache.WildcardCluster, cache.Listener:
			// What exists of these is in the cache, perhaps since it was asked for.
			b.Absent = append(b.Absent, key)
		}
	}
	p.applyBatch(b)
	// Asking makes aliases part of a service, and can reach the cap.
	p.flush()
	p.updateTable(false)
}

// evict lets go of what nobody asks for any more.
func (p *Publisher) evict(dropped []cache.Key) {
	// What is made on demand is kept while it is asked for. Routes and secrets are
	// not: the next Envoy must find them.
	made := slices.DeleteFunc(slices.Clone(dropped), func(k cache.Key) bool {
		return k.Kind != cache.OnDemandCluster && k.Kind != cache.Endpoints
	})
	// A change may have put a load assignment back after its own readers had gone.
	for _, key := range dropped {
		if key.Kind == cache.OnDemandCluster {
			made = append(made, cache.Key{Kind: cache.Endpoints, Name: key.Name})
		}
	}
	left := newBatch()
	for _, key := range p.cache.Evict(made...) {
		switch g, ok := p.given[key.Name]; {
		case ok && g.both && key.Kind == cache.OnDemandCluster:
			g.both = false
			p.given[key.Name] = g
		case ok && g.kind == key.Kind:
			p.forget(key.Name)
		}
		if _, given := p.given[key.Name]; !given {
			p.engine.Forget(key.Name)
		}
		// Others may read its endpoints still.
		if endpoints := (cache.Key{Kind: cache.Endpoints, Name: key.Name}); key != endpoints && p.cache.Subscribed(endpoints) {
			p.giveEndpoints(left, key.Name)
		}
	}
	p.applyBatch(left)
}

// noticeEnvoy follows whether an Envoy of this node is connected.
func (p *Publisher) noticeEnvoy() {
	connected := p.cache.Metrics().Envoys > 0
	if connected == p.connected {
		return
	}
	p.connected = connected
	p.notify()
	if connected {
		p.log.Info("envoy connected")
		return
	}
	p.log.Warn("no Envoy is connected any more")
}

// warmAll gives every Envoy the clusters of declared upstreams before the first
// request (contract 1). They stay for good: taken from the wildcard, a name that
// is also asked for on demand would fail for seconds (dataplane decision 5). A
// name that was asked for on demand stays on demand.
func (p *Publisher) warmAll(b *batch) {
	for _, key := range slices.SortedFunc(maps.Keys(p.pods), model.AttachmentKey.Compare) {
		p.warm(b, p.pods[key].pod)
	}
}
