package projection

import (
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// simCluster is a cluster as the simulated Envoy has it.
type simCluster struct {
	id         ClusterID
	sni        string
	identities []string
	tombstone  bool
	endpoints  []ClusterEndpoint
}

// sameButEndpoints says whether two clusters have the same bytes; a change of endpoints
// is another resource.
func sameButEndpoints(a, b *simCluster) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, y := *a, *b
	x.endpoints, y.endpoints = nil, nil
	return reflect.DeepEqual(x, y)
}

// simEnvoy is what matters of Envoy: the last route table, the clusters, those that warm,
// and the names that it asked for, which it never forgets and never asks for again.
type simEnvoy struct {
	routes  map[string]string // domain -> cluster, "" refuses
	capped  bool              // the catch-all answers itself
	active  map[string]*simCluster
	warming map[string]*simCluster
	asked   map[string]bool
}

func newSimEnvoy() *simEnvoy {
	return &simEnvoy{
		routes: map[string]string{}, active: map[string]*simCluster{}, warming: map[string]*simCluster{}, asked: map[string]bool{},
	}
}

// route returns the cluster that an authority leads to; ok is false if it is refused.
// Every authority given to it has the form of the mesh.
func (v *simEnvoy) route(name string) (cluster string, ok bool) {
	if c, found := v.routes[name]; found {
		return c, c != ""
	}
	if host, _, hasPort := strings.Cut(name, ":"); hasPort {
		if c, found := v.routes[host+":*"]; found {
			return c, c != ""
		}
	}
	return name, !v.capped
}

// applyCluster takes a cluster of a CDS response: a new one, or one that is changed,
// warms beside the old one until it has endpoints.
func (v *simEnvoy) applyCluster(name string, c *simCluster) {
	delete(v.warming, name)
	switch {
	case c == nil:
		delete(v.active, name)
	case c.tombstone:
		v.active[name] = &simCluster{tombstone: true}
	default:
		fresh := *c
		fresh.endpoints = nil
		v.warming[name] = &fresh
	}
}

// applyEndpoints takes a load assignment: it is the old cluster's and the warming one's.
func (v *simEnvoy) applyEndpoints(name string, endpoints []ClusterEndpoint) {
	if c := v.active[name]; c != nil && !c.tombstone {
		c.endpoints = endpoints
	}
	v.promote(name, endpoints)
}

// promote ends the warming of a cluster, by its endpoints or by the fetch timeout, when
// it takes those that the old one had.
func (v *simEnvoy) promote(name string, endpoints []ClusterEndpoint) {
	if c := v.warming[name]; c != nil {
		c.endpoints = endpoints
		v.active[name] = c
		delete(v.warming, name)
	}
}

// simStream is one resource type of the xDS stream: at most one response is without its
// acknowledgement (XDS-R11).
type simStream[T any] struct {
	inflight *T
	applied  bool
}

type routesMessage struct {
	version int
	table   map[string]string
	capped  bool
}

type clustersMessage struct {
	clusters map[string]*simCluster
	versions map[string]int
}

type endpointsMessage struct {
	endpoints map[string][]ClusterEndpoint
	versions  map[string]int
}

// simPublisher does what the real one has to do, by the documentation of this package
// only. Its three streams are not ordered among each other, which is worse than real.
type simPublisher struct {
	engine *Engine
	envoy  *simEnvoy
	disk   store
	// trace tells what happens.
	trace func(format string, args ...any)

	table         map[string]string
	capped        bool
	tableVersion  int // of table; sent and acked are behind it
	tableSent     int
	tableAcked    int
	stepTable     map[model.ServiceKey]int // the table version that has the step's hosts
	stepToken     map[model.ServiceKey]uint64
	demanded      map[string]model.ServiceKey // what Envoy asked for, and whose it is
	clusters      map[string]*simCluster
	clusterWant   map[string]int
	clusterSent   map[string]int
	clusterAcked  map[string]int
	endpointsWant map[string]int
	endpointsSent map[string]int
	endpointAcked map[string]int
	// early are names that were asked for before their service existed, or as an alias.
	early map[string]bool

	rds simStream[routesMessage]
	cds simStream[clustersMessage]
	eds simStream[endpointsMessage]
}

func newSimPublisher(e *Engine, v *simEnvoy, disk store, trace func(string, ...any)) *simPublisher {
	p := &simPublisher{engine: e, disk: disk, trace: trace}
	p.connect(v)
	return p
}

// connect starts with an Envoy: a fresh one, or one that knows things from before.
func (p *simPublisher) connect(v *simEnvoy) {
	p.envoy = v
	p.rds, p.cds, p.eds = simStream[routesMessage]{}, simStream[clustersMessage]{}, simStream[endpointsMessage]{}
	p.tableSent, p.tableAcked = 0, 0
	p.stepTable, p.stepToken = map[model.ServiceKey]int{}, map[model.ServiceKey]uint64{}
	p.demanded, p.clusters = map[string]model.ServiceKey{}, map[string]*simCluster{}
	p.clusterWant, p.clusterSent, p.clusterAcked = map[string]int{}, map[string]int{}, map[string]int{}
	p.endpointsWant, p.endpointsSent, p.endpointAcked = map[string]int{}, map[string]int{}, map[string]int{}
	p.early = map[string]bool{}
	p.buildTable()
	for _, name := range slices.Sorted(maps.Keys(v.asked)) {
		// A re-subscription: what Envoy holds, warm or not, is known by its versions. Load
		// assignments are sent again (XDS-R23).
		p.clusters[name] = v.active[name]
		if c := v.warming[name]; c != nil {
			p.clusters[name] = c
		}
		p.demand(name)
		p.endpointsWant[name]++
	}
}

// flush does what Changes say.
func (p *simPublisher) flush() {
	changes := p.engine.TakeDirty()
	p.disk.save(p.engine, changes)
	for _, c := range changes {
		names := slices.Clone(c.Awakened)
		if v, ok := p.engine.Shape(c.Service); ok && c.Shape {
			for _, cl := range v.Clusters {
				names = append(names, cl.Name)
			}
		}
		for _, name := range names {
			if _, ok := p.demanded[name]; ok {
				p.demand(name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(p.demanded)) {
			if p.demanded[name] != c.Service {
				continue
			}
			switch {
			case c.Shape, c.Clusters:
				p.demand(name)
			case c.Endpoints:
				if cl := p.clusters[name]; cl != nil && !cl.tombstone && slices.Contains(c.Ports, cl.id.Port) {
					p.refreshEndpoints(name)
				}
			}
		}
	}
	if slices.ContainsFunc(changes, func(c Change) bool { return c.Shape }) || p.engine.AtCap() != p.capped {
		p.buildTable()
	}
}

// buildTable makes the route table of all Views, and notes which steps it has.
func (p *simPublisher) buildTable() {
	table := map[string]string{}
	for k := range p.engine.Services() {
		v, _ := p.engine.Shape(k)
		for _, h := range v.VirtualHosts {
			for _, d := range h.Domains {
				if _, twice := table[d]; twice {
					panic("domain " + d + " is there twice")
				}
				table[d] = h.Cluster
			}
		}
		if p.stepToken[k] != v.Token {
			p.stepToken[k], p.stepTable[k] = v.Token, p.tableVersion+1
			p.trace("%s is %s with %d in table %d", k, v.Step, v.Committed, p.tableVersion+1)
		}
	}
	p.table, p.capped = table, p.engine.AtCap()
	p.tableVersion++
}

// demand answers for a name that Envoy asked for, now or earlier.
func (p *simPublisher) demand(name string) {
	a := p.engine.Resolve(name)
	p.demanded[name] = a.Service
	var want *simCluster
	switch a.Kind {
	case Tombstone:
		want = &simCluster{tombstone: true}
	case Real:
		want = &simCluster{id: a.Cluster.ID, sni: a.Cluster.SNI, identities: a.Cluster.Identities, endpoints: a.Cluster.Endpoints}
	case Refused:
	}
	if v, known := p.engine.Shape(a.Service); !known || v.Step == Leaving {
		p.early[name] = true
	}
	if old := p.clusters[name]; !sameButEndpoints(old, want) || old != nil && !reflect.DeepEqual(old.endpoints, want.endpoints) {
		if !sameButEndpoints(old, want) {
			p.clusterWant[name]++
		}
		p.endpointsWant[name]++
	}
	p.clusters[name] = want
}

// refreshEndpoints takes the endpoints of one cluster anew.
func (p *simPublisher) refreshEndpoints(name string) {
	if c, ok := p.engine.Cluster(name); ok {
		next := *p.clusters[name]
		next.endpoints = c.Endpoints
		if !reflect.DeepEqual(next.endpoints, p.clusters[name].endpoints) {
			p.endpointsWant[name]++
		}
		p.clusters[name] = &next
	}
}

// acked says whether an awaited acknowledgement has come. One about a cluster that Envoy
// never asked for counts as given.
func (p *simPublisher) acked(k model.ServiceKey, a Await) bool {
	switch a.Kind {
	case AwaitRoutes:
		return p.tableAcked >= p.stepTable[k]
	case AwaitCluster:
		_, held := p.demanded[a.Name]
		return !held || p.clusterAcked[a.Name] == p.clusterWant[a.Name]
	case AwaitEndpoints:
		_, held := p.demanded[a.Name]
		return !held || p.clusterAcked[a.Name] == p.clusterWant[a.Name] && p.endpointAcked[a.Name] == p.endpointsWant[a.Name]
	case AwaitClusters:
		for name := range p.demanded {
			if host, _, _ := strings.Cut(name, ":"); host == a.Name && p.clusterAcked[name] != p.clusterWant[name] {
				return false
			}
		}
		return true
	}
	panic("unknown await")
}

// advance hands one token back whose acknowledgements are complete.
func (p *simPublisher) advance() bool {
	for k := range p.engine.Services() {
		v, _ := p.engine.Shape(k)
		if v.Step == Settled || p.stepToken[k] != v.Token {
			continue
		}
		if !slices.ContainsFunc(v.Await, func(a Await) bool { return !p.acked(k, a) }) && p.engine.Advance(k, v.Token) {
			p.flush()
			return true
		}
	}
	return false
}

// stepRDS, stepCDS and stepEDS do the next thing that one stream has to do: send, let
// Envoy apply, or take the acknowledgement. They report whether there was any.
func (p *simPublisher) stepRDS() bool {
	switch s := &p.rds; {
	case s.inflight == nil && p.tableSent < p.tableVersion:
		s.inflight, s.applied = &routesMessage{version: p.tableVersion, table: p.table, capped: p.capped}, false
		p.tableSent = p.tableVersion
	case s.inflight == nil:
		return false
	case !s.applied:
		p.trace("Envoy applies routes %d", s.inflight.version)
		p.envoy.routes, p.envoy.capped, s.applied = s.inflight.table, s.inflight.capped, true
	default:
		p.tableAcked, s.inflight = s.inflight.version, nil
	}
	return true
}

func (p *simPublisher) stepCDS() bool {
	s := &p.cds
	switch {
	case s.inflight == nil:
		m := clustersMessage{clusters: map[string]*simCluster{}, versions: map[string]int{}}
		for name, want := range p.clusterWant {
			if p.clusterSent[name] != want {
				m.clusters[name], m.versions[name] = p.clusters[name], want
				p.clusterSent[name] = want
			}
		}
		if len(m.clusters) == 0 {
			return false
		}
		s.inflight, s.applied = &m, false
	case !s.applied:
		for name, c := range s.inflight.clusters {
			p.trace("Envoy applies cluster %s: %+v", name, c)
			p.envoy.applyCluster(name, c)
		}
		s.applied = true
	default:
		maps.Copy(p.clusterAcked, s.inflight.versions)
		s.inflight = nil
	}
	return true
}

func (p *simPublisher) stepEDS() bool {
	s := &p.eds
	switch {
	case s.inflight == nil:
		m := endpointsMessage{endpoints: map[string][]ClusterEndpoint{}, versions: map[string]int{}}
		for name, want := range p.endpointsWant {
			// A changed cluster's load assignment goes after the cluster's acknowledgement.
			if p.endpointsSent[name] != want && p.clusterAcked[name] == p.clusterWant[name] {
				m.versions[name], p.endpointsSent[name] = want, want
				m.endpoints[name] = nil
				if c := p.clusters[name]; c != nil {
					m.endpoints[name] = c.endpoints
				}
			}
		}
		if len(m.versions) == 0 {
			return false
		}
		s.inflight, s.applied = &m, false
	case !s.applied:
		for name, endpoints := range s.inflight.endpoints {
			p.envoy.applyEndpoints(name, endpoints)
		}
		s.applied = true
	default:
		maps.Copy(p.endpointAcked, s.inflight.versions)
		s.inflight = nil
	}
	return true
}
