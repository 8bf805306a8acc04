package simulation

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// initialFetch is how long a cluster waits for its first load assignment.
const initialFetch = 15 * time.Second

// simCluster is a cluster as an Envoy has it.
type simCluster struct {
	wireCluster
	source    cache.Service
	version   string
	endpoints set
	warms     time.Time // since when
}

// listener is what a listener refers to.
type listener struct{ apps, secrets []string }

// routeTable is the last route table: domain -> cluster, "" refuses.
type routeTable struct {
	version string
	domains map[string]string
	capped  bool // the catch-all answers itself
}

// holdings are what an Envoy has, and what it asked for: it forgets no name and asks
// for none twice.
type holdings struct {
	active, warming map[string]*simCluster
	listeners       map[string]listener
	secrets         map[string]bool
	// holders are clusters with the certificate that Envoy has for them, empty once it lost
	// that.
	holders map[string]string
	// taken are secrets that listeners go on with, though Envoy was told that they are gone.
	taken map[string]bool
	// lacking says since when a listener has been without a secret that it names, and
	// nothing has kept the registrar from giving it.
	lacking map[string]time.Time
	routes  routeTable
	asked   map[string]bool
	// ended are load assignments that went with their cluster: Envoy gave them up, even if
	// a cluster asks for them again at once.
	ended map[string]bool
}

func newHoldings() holdings {
	return holdings{
		active: map[string]*simCluster{}, warming: map[string]*simCluster{}, listeners: map[string]listener{},
		secrets: map[string]bool{}, holders: map[string]string{}, taken: map[string]bool{}, lacking: map[string]time.Time{}, asked: map[string]bool{}, ended: map[string]bool{},
	}
}

// envoy is one Envoy process: its streams are real, what it does with a response is a
// model of what Envoy 1.40 does. Judges run in the goroutines of its streams while the
// world waits for all to come to rest.
type envoy struct {
	w       *world
	name    string
	streams [2]*xdstest.Client
	cut     [2]context.CancelFunc

	mu sync.Mutex
	holdings
	session   int // grows with every connection, so that late responses are told apart
	connected bool
	moody     bool
	// rejected: it lacks something that is not sent again before it changes or the
	// Envoy connects again. orderly: it rejected nothing since it started.
	rejected, orderly bool
	changed           bool // since the world looked
	// outlived: its route table is of before the registrar's file was lost.
	outlived bool
	// silent are the types whose last response it has not answered; what goes in order
	// with them waits for two seconds. late are listeners that came or stayed so.
	silent map[cache.Kind]bool
	late   map[string]bool
	// spoke is when it ended its last silence about listeners, or about clusters, which
	// hold up listeners: what had waited for those too long by then goes at once.
	spoke time.Time
	// answered is the same of on-demand clusters, which hold up load assignments.
	answered time.Time
	// behind: it came back with what it had, and may have missed steps that waited for
	// nobody while it was away. Until it has everything a request of its may be led by
	// two times at once; the server's guard refuses it then.
	behind time.Time
}

// connect opens both streams: with what it holds, or as a new process.
func (e *envoy) connect(fresh bool) {
	w := e.w
	var had [2]map[string]*xdstest.State
	for service, c := range e.streams {
		if c == nil || fresh {
			continue
		}
		had[service] = map[string]*xdstest.State{}
		for _, kind := range cache.Kinds() {
			if serviceOf(kind) == cache.Service(service) {
				had[service][kind.TypeURL()] = c.State(kind.TypeURL())
			}
		}
	}
	e.mu.Lock()
	e.session++
	e.connected, e.rejected, e.changed = true, false, true
	e.silent, e.behind = map[cache.Kind]bool{}, time.Now()
	if fresh {
		e.behind = time.Time{}
		e.holdings, e.orderly, e.late = newHoldings(), true, map[string]bool{}
	}
	session := e.session
	if had[cache.ADS] != nil {
		for name := range e.ended {
			delete(had[cache.ADS][resourcev3.EndpointType].Resources, name)
		}
	}
	e.mu.Unlock()
	for _, service := range cache.Services() {
		e.streams[service], e.cut[service] = e.open(service, session)
		for _, kind := range cache.Kinds() {
			if s := had[service][kind.TypeURL()]; serviceOf(kind) == service && s != nil && len(s.Subscribed) > 0 {
				w.try(e.streams[service].Resume(kind.TypeURL(), s))
			}
		}
	}
	if fresh || had[cache.ADS] == nil {
		w.try(e.streams[cache.ADS].Subscribe(resourcev3.ClusterType))
		w.try(e.streams[cache.ADS].Subscribe(resourcev3.ListenerType))
	}
	e.ask(slices.Sorted(maps.Keys(e.asked))...)
}

func (e *envoy) open(service cache.Service, session int) (*xdstest.Client, context.CancelFunc) {
	return dial(e.w.reg.cache, service, e.name, e.judge(service, session, rand.New(rand.NewPCG(e.w.r.Uint64(), uint64(service)))))
}

// dial opens a stream of an Envoy, without a network.
func dial(c *cache.Cache, service cache.Service, peer string, judge xdstest.Judge) (*xdstest.Client, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	typeURL := resourcev3.AnyType
	if service == cache.OnDemand {
		typeURL = resourcev3.ClusterType
	}
	stream := xdstest.Pipe(ctx, func(str xdstest.ServerStream) error {
		st := c.Open(cache.StreamParams{Service: service, Peer: peer})
		defer st.Close()
		return delta.NewServer(str.Context(), st, st).DeltaStreamHandler(str, typeURL)
	})
	return xdstest.New(stream, xdstest.Options{Node: &corev3.Node{Id: "node", UserAgentName: "envoy"}, Judge: judge}), cancel
}

// disconnect ends the streams; the process goes on with what it has.
func (e *envoy) disconnect() {
	if !e.connected {
		return
	}
	// What a stream has taken by its end is applied: the next one resumes with it.
	for service, cut := range e.cut {
		cut()
		<-e.streams[service].Done()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.connected = false
	e.session++
}

// ask subscribes to clusters on demand.
func (e *envoy) ask(names ...string) {
	for _, name := range names {
		e.asked[name] = true
	}
	if !e.connected {
		return
	}
	have := look(e.streams[cache.OnDemand], resourcev3.ClusterType).subscribed
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return have[n] })
	if len(names) > 0 {
		e.w.try(e.streams[cache.OnDemand].Subscribe(resourcev3.ClusterType, names...))
	}
}

// answer acknowledges what was withheld of a kind.
func (e *envoy) answer(kind cache.Kind) {
	e.mu.Lock()
	if e.silent[kind] && (kind == cache.Listener || kind == cache.WildcardCluster) {
		e.spoke = time.Now()
	}
	if e.silent[kind] && kind == cache.OnDemandCluster {
		e.answered = time.Now()
	}
	delete(e.silent, kind)
	e.mu.Unlock()
	e.w.try(e.streams[serviceOf(kind)].Release(kind.TypeURL()))
}

// follow subscribes to what the holdings refer to, as Envoy does by itself, and gives
// up what they refer to no more. It reports whether there was anything.
func (e *envoy) follow() bool {
	if !e.connected {
		return false
	}
	e.mu.Lock()
	want := map[string]map[string]bool{resourcev3.EndpointType: {}, resourcev3.SecretType: {}, resourcev3.RouteType: {}}
	for _, held := range []map[string]*simCluster{e.active, e.warming} {
		for name, c := range held {
			if c.eds {
				want[resourcev3.EndpointType][name] = true
			}
		}
	}
	for _, s := range e.users() {
		want[resourcev3.SecretType][s] = true
	}
	for name := range e.listeners {
		if strings.HasPrefix(name, "out-http|") {
			want[resourcev3.RouteType][resource.RoutesName] = true
		}
	}
	ended := e.ended
	e.ended = map[string]bool{}
	e.mu.Unlock()
	moved := false
	for _, typeURL := range []string{resourcev3.EndpointType, resourcev3.SecretType, resourcev3.RouteType} {
		have := look(e.streams[cache.ADS], typeURL).subscribed
		var again map[string]bool
		if typeURL == resourcev3.EndpointType {
			again = ended
		}
		var begin, end []string
		for _, name := range slices.Sorted(maps.Keys(want[typeURL])) {
			if !have[name] || again[name] {
				begin = append(begin, name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(have)) {
			if again[name] || !want[typeURL][name] && typeURL != resourcev3.RouteType {
				end = append(end, name)
			}
		}
		if len(end) > 0 {
			if typeURL == resourcev3.SecretType {
				e.forgetSecrets(end)
			}
			e.w.try(e.streams[cache.ADS].Unsubscribe(typeURL, end...))
		}
		if len(begin) > 0 {
			e.w.try(e.streams[cache.ADS].Subscribe(typeURL, begin...))
		}
		moved = moved || len(begin)+len(end) > 0
	}
	return moved
}

// judge applies, rejects, or applies and says nothing for a while.
func (e *envoy) judge(service cache.Service, session int, r *rand.Rand) xdstest.Judge {
	return func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		e.mu.Lock()
		defer e.mu.Unlock()
		if session != e.session {
			return xdstest.Withhold()
		}
		kind, n := kindOf(service, resp.GetTypeUrl()), r.IntN(200)
		if e.moody && n < 4 && len(resp.GetResources()) > 0 {
			e.w.log("%s rejects %s", e.name, brief(kind, resp))
			e.rejected, e.orderly = true, false
			return xdstest.Nack("Error adding/updating " + resp.GetResources()[0].GetName() + ": not this one")
		}
		e.w.log("%s gets %s", e.name, brief(kind, resp))
		e.apply(service, resp)
		if e.moody && n < 40 {
			e.w.log("%s does not answer yet", e.name)
			e.silent[kind] = true
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	}
}

// brief says what is in a response; no nonce, so that equal runs say the same.
func brief(kind cache.Kind, resp *discoveryv3.DeltaDiscoveryResponse) string {
	var parts []string
	for _, r := range resp.GetResources() {
		parts = append(parts, r.GetName()+"="+r.GetVersion())
	}
	slices.Sort(parts)
	removed := slices.Sorted(slices.Values(resp.GetRemovedResources()))
	return fmt.Sprintf("%s %v -%v", kind, parts, removed)
}

func (e *envoy) apply(service cache.Service, resp *discoveryv3.DeltaDiscoveryResponse) {
	e.changed = true
	for _, name := range resp.GetRemovedResources() {
		switch resp.GetTypeUrl() {
		case resourcev3.ClusterType:
			// Envoy has one cluster of a name: either stream takes it away.
			e.drop(name)
			for l := range e.listeners {
				switch {
				case !slices.Contains(e.listeners[l].apps, name):
				case e.silent[cache.Listener], time.Since(e.spoke) <= catchUp:
					e.late[l] = true
				case e.orderly:
					e.w.fail("%s loses cluster %s before listener %s, which names it (XDS-R14)", e.name, name, l)
				}
			}
		case resourcev3.ListenerType:
			delete(e.listeners, name)
		case resourcev3.SecretType:
			had := e.secrets[name] && !e.taken[name] // else it is told that what it asks for is not there
			for user, s := range e.users() {
				if had && s == name && e.orderly && !e.isLate() {
					e.w.fail("%s loses secret %s before %s, which names it (XDS-R14)", e.name, name, user)
				}
			}
			e.lose(name)
		case resourcev3.EndpointType, resourcev3.RouteType:
			e.w.fail("%s is told that %s %s is removed", e.name, resp.GetTypeUrl(), name)
		}
	}
	for _, r := range resp.GetResources() {
		if err := e.take(service, resp.GetTypeUrl(), r); err != nil {
			e.w.fail("%s: %s: %v", e.name, r.GetName(), err)
		}
	}
}

func (e *envoy) take(service cache.Service, typeURL string, r *discoveryv3.Resource) error {
	name := r.GetName()
	switch typeURL {
	case resourcev3.ClusterType:
		c, err := e.w.decoded.cluster(xdstest.Resource{Version: r.GetVersion(), Body: r.GetResource()})
		if err != nil {
			return err
		}
		if !c.eds {
			e.drop(name)
		}
		delete(e.warming, name)
		if c.eds {
			e.warming[name] = &simCluster{wireCluster: c, source: service, version: r.GetVersion(), warms: time.Now()}
		} else {
			e.active[name] = &simCluster{wireCluster: c, source: service, version: r.GetVersion()}
			if c.holds != "" {
				e.holders[name] = c.holds
			}
		}
	case resourcev3.EndpointType:
		got, err := e.w.decoded.assignment(xdstest.Resource{Version: r.GetVersion(), Body: r.GetResource()})
		if err != nil {
			return err
		}
		e.assign(name, got)
	case resourcev3.ListenerType:
		l, err := e.w.listenerOf(r)
		if err != nil {
			return err
		}
		e.listeners[name] = l
		e.late[name] = e.silent[cache.WildcardCluster]
	case resourcev3.SecretType:
		e.secrets[name] = true
		delete(e.taken, name)
	case resourcev3.RouteType:
		table, err := e.w.routesOf(r)
		if err != nil {
			return err
		}
		e.routes, e.outlived = table, false
	}
	return nil
}

// users are the secrets that listeners and clusters name.
func (e *envoy) users() iter.Seq2[string, string] {
	return func(yield func(user, secret string) bool) {
		for name, l := range e.listeners {
			for _, s := range l.secrets {
				if !yield("listener "+name, s) {
					return
				}
			}
		}
		for name, s := range e.holders {
			if s != "" && !yield("cluster "+name, s) {
				return
			}
		}
	}
}

// lose is the removal of a secret. What a listener serves with it keeps; a certificate that
// it only holds is forgotten, and not asked for again.
func (e *envoy) lose(name string) {
	if !outboundSecret(name) {
		e.taken[name] = e.secrets[name]
		return
	}
	delete(e.secrets, name)
	for user, s := range e.holders {
		if s == name {
			e.holders[user] = ""
		}
	}
}

// forgetSecrets is the end of the last listener or cluster that named them: one that comes later has
// to wait for what it asks for.
func (e *envoy) forgetSecrets(names []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, name := range names {
		delete(e.secrets, name)
		delete(e.taken, name)
	}
}

// drop is the end of a cluster of this name, and of the interest in its load assignment.
func (e *envoy) drop(name string) {
	for _, held := range []map[string]*simCluster{e.active, e.warming} {
		if c := held[name]; c != nil && c.eds {
			e.ended[name] = true
		}
		delete(held, name)
	}
	delete(e.holders, name)
}

// assign takes a load assignment: it is the old cluster's and ends the warming of the
// new one.
func (e *envoy) assign(name string, got set) {
	c := e.active[name]
	if fresh := e.warming[name]; fresh != nil {
		delete(e.warming, name)
		e.active[name], c = fresh, fresh
	}
	if c == nil || !c.eds {
		return
	}
	c.endpoints = got
	e.w.arrived(e, name, c)
}

// fetchTimeout ends the warming of clusters whose load assignment does not come: they
// take the one that the old cluster had.
func (e *envoy) fetchTimeout() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name, fresh := range e.warming {
		if time.Since(fresh.warms) < initialFetch {
			continue
		}
		if old := e.active[name]; old != nil {
			fresh.endpoints = old.endpoints
		}
		e.active[name] = fresh
		delete(e.warming, name)
		e.changed = true
	}
}

// route returns the cluster that an authority of the mesh leads to.
func (e *envoy) route(name string) (cluster string, ok bool) {
	if c, found := e.routes.domains[name]; found {
		return c, c != ""
	}
	if host, _, hasPort := strings.Cut(name, ":"); hasPort {
		if c, found := e.routes.domains[host+":*"]; found {
			return c, c != ""
		}
	}
	return name, e.routes.domains != nil && !e.routes.capped
}

func readRoutes(r *discoveryv3.Resource) (routeTable, error) {
	msg := &routev3.RouteConfiguration{}
	if err := r.GetResource().UnmarshalTo(msg); err != nil {
		return routeTable{}, err
	}
	out := routeTable{version: r.GetVersion(), domains: map[string]string{}}
	for _, h := range msg.GetVirtualHosts() {
		action := h.GetRoutes()[0].GetRoute()
		if slices.Equal(h.GetDomains(), []string{"*"}) {
			out.capped = action.GetClusterHeader() == ""
			continue
		}
		for _, d := range h.GetDomains() {
			if _, twice := out.domains[d]; twice {
				return out, fmt.Errorf("domain %s is there twice", d)
			}
			out.domains[d] = action.GetCluster()
		}
	}
	return out, nil
}

func readListener(body *anypb.Any) (listener, error) {
	msg := &listenerv3.Listener{}
	if err := body.UnmarshalTo(msg); err != nil {
		return listener{}, err
	}
	apps, secrets := map[string]bool{}, map[string]bool{}
	err := protorange.Range(msg.ProtoReflect(), func(v protopath.Values) error {
		text, ok := v.Index(-1).Value.Interface().(string)
		switch {
		case !ok:
		case strings.HasPrefix(text, "app|"):
			apps[text] = true
		case strings.HasPrefix(text, "in|spiffe://"), text == resource.BundleSecret(domain):
			secrets[text] = true
		}
		return nil
	})
	return listener{apps: slices.Sorted(maps.Keys(apps)), secrets: slices.Sorted(maps.Keys(secrets))}, err
}

// outboundSecret reports whether a secret is the certificate of outbound connections.
func outboundSecret(secret string) bool {
	return strings.HasPrefix(secret, resource.BundleSecret(domain)+"/ns/")
}

// kindOf is the kind that a stream carries under a type.
func kindOf(service cache.Service, typeURL string) cache.Kind {
	return cache.Kinds()[slices.IndexFunc(cache.Kinds(), func(k cache.Kind) bool {
		return serviceOf(k) == service && k.TypeURL() == typeURL
	})]
}

// catchUp is longer than anything waits for the answer to something else.
const catchUp = 4 * time.Second

// isBehind reports whether it may still lack what it missed.
func (e *envoy) isBehind() bool {
	if e.behind.IsZero() {
		return false
	}
	// What still warms nobody knows: it says to have the cluster, and an assignment of it.
	if len(e.silent) > 0 || !e.connected || e.rejected || len(e.warming) > 0 {
		e.behind = time.Now()
	}
	if time.Since(e.behind) < catchUp {
		return true
	}
	e.behind = time.Time{}
	return false
}

// isStuck reports whether it lacks what it gets only when it connects again.
func (e *envoy) isStuck() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.connected && e.rejected
}

// outlive notes whether what the registrar's file had is lost, or was never written.
func (e *envoy) outlive(lost bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.outlived = e.outlived || lost
	if !lost {
		return
	}
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	for name := range e.asked {
		e.w.excused[name] = true // what must not come back, and Envoy gives none up (I2)
	}
}

// meshClusters returns the versions of the clusters of services that it has, and its
// route table.
func (e *envoy) meshClusters() (map[string]string, routeTable) {
	e.mu.Lock()
	defer e.mu.Unlock()
	versions := map[string]string{}
	for name, c := range e.active {
		if c.eds {
			versions[name] = c.version
		}
	}
	return versions, e.routes
}

// isLate reports whether it may have listeners that the registrar has taken back: they
// wait for clusters as well, and nothing waits for longer than catchUp.
func (e *envoy) isLate() bool {
	return e.silent[cache.Listener] || e.silent[cache.WildcardCluster] || time.Since(e.spoke) <= catchUp
}

// mayLackRoutes reports whether its route table may be older than what DNS was told.
func (e *envoy) mayLackRoutes() bool {
	silent := e.silent[cache.WildcardCluster] || e.silent[cache.Listener] || e.silent[cache.Route] // routes wait for both
	return !e.connected || e.rejected || silent || !e.behind.IsZero()
}

// serviceOf is the stream that carries a kind.
func serviceOf(k cache.Kind) cache.Service {
	if k == cache.OnDemandCluster {
		return cache.OnDemand
	}
	return cache.ADS
}
