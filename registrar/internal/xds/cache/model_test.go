package cache_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// model is a random run: writers, a consumer of demand and Envoys that come, go,
// reject and dawdle, beside what all of them should end with.
type model struct {
	*mesh
	rand   *rand.Rand
	want   map[cache.Key]string
	envoys []*proxy
	held   bool
	awaits []*outcome
}

// proxy is one Envoy with its two streams. Its judges run in the goroutines of
// its clients, while the test waits for them to come to rest.
type proxy struct {
	mu      sync.Mutex // between the judges of both streams
	name    string
	streams [2]*xdstest.Client
	close   [2]func()
	// events counts what came on either stream, in order. pushed and assigned are
	// when a cluster and a load assignment last came; opened when a stream was.
	events           int
	pushed           [2]map[string]int
	assigned         map[string]int
	opened           [2]int
	unacknowledged   [2]map[string]int
	clusterHeldSince map[string]time.Time
	// demanded are names that it has or had on demand; an Envoy never gives one up.
	demanded map[string]bool
}

const modelNames = "abcde"

func (m *model) name() string { return string(modelNames[m.rand.IntN(len(modelNames))]) }

func (m *model) kind() cache.Kind { return cache.Kind(m.rand.IntN(len(cache.Kinds()))) }

// text is mostly good; Envoys reject "bad".
func (m *model) text() string {
	if m.rand.IntN(8) == 0 {
		return "bad"
	}
	return fmt.Sprint(m.rand.IntN(4))
}

func (m *model) connect(p *proxy, service cache.Service, resume bool) {
	if service == cache.OnDemand {
		clear(p.clusterHeldSince) // its end opens the gates
	}
	var had map[string]*xdstest.State
	if old := p.streams[service]; old != nil {
		p.close[service]()
		had = make(map[string]*xdstest.State)
		for _, kind := range cache.Kinds() {
			if serviceOf(kind) == service {
				had[kind.TypeURL()] = old.State(kind.TypeURL())
			}
		}
	}
	p.opened[service] = p.events
	p.unacknowledged[service] = make(map[string]int)
	if service == cache.ADS {
		p.pushed[cache.ADS] = make(map[string]int)
		maps.DeleteFunc(p.pushed[cache.OnDemand], func(_ string, at int) bool { return at <= p.opened[cache.OnDemand] })
	}
	p.streams[service], p.close[service] = m.open(options{
		node: "node", peer: p.name, service: service, judge: m.judge(p, service, m.rand.Uint64()),
	})
	if !resume {
		return
	}
	for _, kind := range cache.Kinds() {
		if state := had[kind.TypeURL()]; serviceOf(kind) == service && state != nil && len(state.Subscribed) > 0 {
			m.must(p.streams[service].Resume(kind.TypeURL(), state))
		}
	}
}

// judge rejects what is bad, by name or as a whole, withholds some answers, and
// checks every response.
func (m *model) judge(p *proxy, service cache.Service, seed uint64) xdstest.Judge {
	random := rand.New(rand.NewPCG(seed, 1))
	return func(resp *discoveryv3.DeltaDiscoveryResponse) verdict {
		p.mu.Lock()
		defer p.mu.Unlock()
		m.check(p, service, resp)
		for _, r := range resp.GetResources() {
			if m.content(xdstest.Resource{Body: r.GetResource()}) == "bad" {
				if random.IntN(2) == 0 {
					return xdstest.Nack(byDecoding(""))
				}
				return xdstest.Nack(byName(r.GetName()))
			}
		}
		if random.IntN(4) != 0 {
			return xdstest.Ack()
		}
		p.unacknowledged[service][resp.GetTypeUrl()]++
		if service == cache.OnDemand {
			for _, r := range resp.GetResources() {
				p.clusterHeldSince[r.GetName()] = time.Now()
			}
		}
		return xdstest.Withhold()
	}
}

// check holds the rules that every single response must follow.
func (m *model) check(p *proxy, service cache.Service, resp *discoveryv3.DeltaDiscoveryResponse) {
	if m.held {
		m.Errorf("answered while held: %s", describe(resp))
	}
	if p.unacknowledged[service][resp.GetTypeUrl()] > 0 {
		m.Errorf("second unacknowledged response (XDS-R11): %s", describe(resp))
	}
	seen := make(map[string]bool)
	for _, name := range append(resp.GetRemovedResources(), sentNames(resp)...) {
		if seen[name] {
			m.Errorf("%s is twice in a response (XDS-R8)", name)
		}
		seen[name] = true
	}
	if resp.GetTypeUrl() == resource.EndpointType && len(resp.GetRemovedResources()) > 0 {
		m.Errorf("load assignments removed (XDS-D5): %v", resp.GetRemovedResources())
	}
	for _, name := range sentNames(resp) {
		p.events++
		switch resp.GetTypeUrl() {
		case resource.ClusterType:
			p.pushed[service][name] = p.events
		case resource.EndpointType:
			p.assigned[name] = p.events
			if since, held := p.clusterHeldSince[name]; held && time.Since(since) < 2*time.Second {
				m.Errorf("assignment of %s before its cluster's acknowledgement", name)
			}
		}
	}
}

func sentNames(resp *discoveryv3.DeltaDiscoveryResponse) (names []string) {
	for _, r := range resp.GetResources() {
		names = append(names, r.GetName())
	}
	return names
}

// step does one random thing and lets everything come to rest.
func (m *model) step() {
	p := m.envoys[m.rand.IntN(len(m.envoys))]
	switch m.rand.IntN(21) {
	case 0, 1, 2, 3, 4, 5:
		m.write()
	case 6, 7, 8, 9:
		kind := m.kind()
		names := []string{m.name(), m.name()}
		if kind == cache.OnDemandCluster {
			p.demanded[names[0]], p.demanded[names[1]] = true, true
		}
		m.must(p.streams[serviceOf(kind)].Subscribe(kind.TypeURL(), names...))
	case 10, 11:
		kind := m.kind()
		if !p.asked(kind) {
			return
		}
		name := m.name()
		if kind == cache.OnDemandCluster {
			delete(p.clusterHeldSince, name) // opens the gate
		}
		m.must(p.streams[serviceOf(kind)].Unsubscribe(kind.TypeURL(), name))
	case 12:
		kind := []cache.Kind{cache.WildcardCluster, cache.Listener}[m.rand.IntN(2)]
		if p.asked(kind) && m.rand.IntN(3) == 0 {
			m.must(p.streams[cache.ADS].Unsubscribe(kind.TypeURL(), "*"))
		} else {
			m.must(p.streams[cache.ADS].Subscribe(kind.TypeURL(), "*"))
		}
	case 13, 14, 15:
		kind := m.kind()
		m.releaseOne(p, serviceOf(kind), kind.TypeURL())
	case 16, 17:
		m.consume()
	case 18:
		time.Sleep(time.Duration(m.rand.IntN(3000)) * time.Millisecond)
		synctest.Wait()
	case 19:
		m.rare(p)
	case 20:
		m.awaits = append(m.awaits, m.await(key(m.kind(), m.name()), key(m.kind(), m.name())))
	}
}

// asked reports whether the proxy subscribed to something of the kind. A first
// request without names would mean a wildcard.
func (p *proxy) asked(kind cache.Kind) bool {
	return len(p.streams[serviceOf(kind)].State(kind.TypeURL()).Subscribed) > 0
}

// rare is what happens seldom: a reconnect, or the content becoming incomplete.
func (m *model) rare(p *proxy) {
	if m.rand.IntN(4) == 0 && !m.held {
		m.Hold()
		m.held = true
		return
	}
	if m.held {
		m.held = false
		m.Release()
		synctest.Wait()
	}
	m.connect(p, cache.Service(m.rand.IntN(2)), m.rand.IntN(4) != 0)
}

func (m *model) write() {
	var b cache.Batch
	b.Set = make(map[cache.Kind][]cache.Resource)
	for range 1 + m.rand.IntN(4) {
		k := key(m.kind(), m.name())
		switch m.rand.IntN(6) {
		case 0:
			b.Remove = append(b.Remove, k)
			delete(m.want, k)
		case 1:
			b.Resend = append(b.Resend, k)
		default:
			content := m.text()
			b.Set[k.Kind] = append(b.Set[k.Kind], m.resources(k.Name, content)...)
			m.want[k] = content
		}
	}
	// Removals are made first.
	for kind, list := range b.Set {
		for _, r := range list {
			m.want[key(kind, r.Name)] = m.content(xdstest.Resource{Body: r.Body})
		}
	}
	m.Apply(b)
	synctest.Wait()
}

func (m *model) releaseOne(p *proxy, service cache.Service, typeURL string) {
	delete(p.unacknowledged[service], typeURL)
	if service == cache.OnDemand {
		clear(p.clusterHeldSince)
	}
	m.must(p.streams[service].Release(typeURL))
}

// consume answers demand as the publisher does: what is not there is absent, and
// what nobody asks for any more may go.
func (m *model) consume() {
	d := m.TakeDemand()
	var b cache.Batch
	for _, k := range d.Wanted {
		if _, ok := m.want[k]; ok {
			m.Errorf("%s is held and was demanded", k)
		}
		b.Remove = append(b.Remove, k)
	}
	m.Apply(b)
	for _, k := range m.Evict(d.Dropped...) {
		delete(m.want, k)
	}
	synctest.Wait()
}

// rest ends all that is outstanding.
func (m *model) rest() {
	m.held = false
	m.Release()
	synctest.Wait()
	for _, p := range m.envoys {
		for _, kind := range []cache.Kind{cache.WildcardCluster, cache.Listener} {
			if !p.asked(kind) { // awaits wait for it
				m.must(p.streams[cache.ADS].Subscribe(kind.TypeURL(), "a"))
			}
		}
	}
	for range 10 { // an acknowledgement makes way for the next response
		m.consume()
		for _, p := range m.envoys {
			for _, kind := range cache.Kinds() {
				m.releaseOne(p, serviceOf(kind), kind.TypeURL())
			}
		}
	}
	for _, p := range m.envoys {
		for service := range p.streams {
			judge := m.judge(p, cache.Service(service), 0)
			p.streams[service].SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) verdict {
				if v := judge(resp); v != xdstest.Withhold() {
					return v
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				clear(p.unacknowledged[service])
				clear(p.clusterHeldSince)
				return xdstest.Ack()
			})
		}
	}
	for range 3 {
		for _, p := range m.envoys {
			for _, kind := range cache.Kinds() {
				m.releaseOne(p, serviceOf(kind), kind.TypeURL())
			}
		}
		m.consume()
		time.Sleep(5 * time.Second)
		synctest.Wait()
	}
}

// verify compares every client with what it should hold.
func (m *model) verify() {
	for _, o := range m.awaits {
		if len(o.results) != 1 {
			m.Errorf("an await has %d results at rest", len(o.results))
		}
	}
	for _, p := range m.envoys {
		for _, kind := range cache.Kinds() {
			m.verifyKind(p, kind)
		}
		eds := p.streams[cache.ADS].State(resource.EndpointType)
		for service := range p.pushed {
			clusters := p.streams[service].State(resource.ClusterType)
			for name, at := range p.pushed[service] {
				if _, has := clusters.Resources[name]; has && eds.Subscribed[name] && p.assigned[name] < at {
					m.Errorf("%s: the assignment of %s did not follow its cluster (XDS-D7)", p.name, name)
				}
			}
		}
	}
	for _, st := range m.Status().Streams {
		for _, typ := range st.Types {
			if typ.Pending != 0 || !typ.Unacknowledged.IsZero() {
				m.Errorf("stream %d has %d %s pending at rest", st.ID, typ.Pending, typ.Kind)
			}
		}
	}
}

func (m *model) verifyKind(p *proxy, kind cache.Kind) {
	state := p.streams[serviceOf(kind)].State(kind.TypeURL())
	got := m.texts(p.streams[serviceOf(kind)], kind)
	wildcard := state.Subscribed["*"] && (kind == cache.WildcardCluster || kind == cache.Listener)
	want := make(map[string]string)
	for _, letter := range modelNames {
		name := string(letter)
		content, exists := m.want[key(kind, name)]
		switch {
		case !wildcard && !state.Subscribed[name]:
		case exists && content == "bad":
			if got[name] == "bad" {
				m.Errorf("%s holds what it rejected", p.name)
			}
			delete(got, name) // it keeps what it had, whatever that was
		case exists:
			want[name] = content
		case kind == cache.WildcardCluster && p.demanded[name]:
			delete(got, name) // its removal would take what is given on demand
		case kind == cache.Endpoints:
			want[name] = "(type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment)"
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.Errorf("%s holds of %s (-want +got):\n%s", p.name, kind, diff)
	}
}

// Whatever writers, Envoys and the consumer do, in whatever order: every response
// follows the rules, and at rest every client holds exactly what it subscribes to
// as it is now, with load assignments after their clusters and nothing sent any
// more (XDS-R1 to XDS-R14, XDS-R22, XDS-D5, XDS-D7, I5).
func FuzzModel(f *testing.F) {
	for seed := range uint64(80) {
		f.Add(seed)
	}
	f.Add(uint64(2432)) // gates that end together
	f.Fuzz(func(t *testing.T, seed uint64) {
		bubble(t, func(mesh *mesh) {
			m := &model{mesh: mesh, rand: rand.New(rand.NewPCG(seed, 0)), want: make(map[cache.Key]string)}
			for i := range 3 {
				p := &proxy{name: fmt.Sprint("envoy", i), assigned: make(map[string]int), clusterHeldSince: make(map[string]time.Time), demanded: make(map[string]bool)}
				p.pushed = [2]map[string]int{{}, {}}
				m.envoys = append(m.envoys, p)
				m.connect(p, cache.ADS, false)
				m.connect(p, cache.OnDemand, false)
			}
			for range 250 {
				m.step()
			}
			m.rest()
			m.verify()
			before := m.responses()
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if after := m.responses(); after != before {
				t.Errorf("responses went on at rest:\n%s\n%s", before, after)
			}
			if t.Failed() {
				t.Logf("seed %d", seed)
			}
		})
	})
}

func (m *model) responses() string {
	var s []string
	for _, p := range m.envoys {
		s = append(s, fmt.Sprint(len(p.streams[0].Order()), len(p.streams[1].Order())))
	}
	return strings.Join(s, ", ")
}
