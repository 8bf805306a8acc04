package publisher

import (
	"time"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// tableShare bounds the table's rebuilds: after one that took t, the next waits
// tableShare*t, so that at most a twentieth of one core goes into them. The first
// change after a quiet time is never delayed.
const tableShare = 20

// routeTable is the catalogue as virtual hosts, kept per service.
type routeTable struct {
	hosts map[model.ServiceKey][]*routev3.VirtualHost
	// dirty: hosts or atCap differ from what the cache holds.
	dirty bool
	atCap bool
	// notBefore is when the table may be rebuilt again.
	notBefore time.Time
	// timer is set while a rebuild waits for its turn.
	timer *time.Timer
}

func newRouteTable() routeTable {
	return routeTable{hosts: map[model.ServiceKey][]*routev3.VirtualHost{}}
}

func (t *routeTable) set(key model.ServiceKey, hosts []projection.VirtualHost) {
	t.dirty = true
	if len(hosts) == 0 {
		delete(t.hosts, key)
		return
	}
	built := make([]*routev3.VirtualHost, 0, len(hosts))
	for _, h := range hosts {
		built = append(built, resource.NewVirtualHost(resource.VirtualHost{Name: h.Name, Domains: h.Domains, Cluster: h.Cluster}))
	}
	t.hosts[key] = built
}

// updateTable rebuilds the table now, or soon when the last rebuild was a moment
// ago; urgent is for a step that waits for it. The caller holds mu.
func (p *Publisher) updateTable(urgent bool) {
	t := &p.table
	if atCap := p.engine.AtCap(); atCap != t.atCap {
		t.atCap, t.dirty = atCap, true
		if atCap {
			p.log.Warn("too many unknown names were asked for; further ones are refused by the route table itself", "names", p.engine.Asked())
		}
	}
	if !t.dirty || t.timer != nil && !urgent {
		return
	}
	if wait := t.notBefore.Sub(p.cfg.Now()); wait > 0 && !urgent {
		t.timer = time.AfterFunc(wait, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.table.timer = nil
			p.rebuildTable()
		})
		return
	}
	p.rebuildTable()
}

func (p *Publisher) rebuildTable() {
	if err := p.applyTable(); err != nil {
		p.log.Error("route table cannot be built; the last good one stays", "error", err)
	}
}

func (p *Publisher) applyTable() error {
	t := &p.table
	start := p.cfg.Now()
	hosts := make([]*routev3.VirtualHost, 0, len(t.hosts)*3)
	for _, h := range t.hosts {
		hosts = append(hosts, h...)
	}
	r, err := cache.NewResource(resource.RoutesName, resource.Routes(resource.RouteTable{
		VirtualHosts: hosts, Domain: p.cfg.Domain, AtCap: t.atCap,
	}))
	if err != nil {
		return err
	}
	p.cache.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Route: {r}}})
	now := p.cfg.Now()
	t.dirty = false
	t.notBefore = now.Add(tableShare * now.Sub(start))
	return nil
}
