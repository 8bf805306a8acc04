package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/server"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

const domain = "aether.internal"

// fixture is a publisher with everything behind it and raw delta clients in
// Envoy's place.
type fixture struct {
	*Publisher
	conn    *xdstest.Conn
	saved   *memoryCatalogue
	names   *recordedNames
	clock   *shiftedClock
	log     *logBuffer
	nextGen uint64
}

// logBuffer is a log that is read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// lines are those with a text in them.
func (l *logBuffer) lines(text string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

// shiftedClock is the wall clock with an offset that the test advances.
type shiftedClock struct{ offset atomic.Int64 }

func (c *shiftedClock) Now() time.Time { return time.Now().Add(time.Duration(c.offset.Load())) }

func (c *shiftedClock) AfterFunc(d time.Duration, fn func()) func() bool {
	return time.AfterFunc(d, fn).Stop
}

func (c *shiftedClock) advance(d time.Duration) { c.offset.Add(int64(d)) }

type memoryCatalogue struct {
	mu      sync.Mutex
	entries map[model.ServiceKey]projection.Entry
	fail    error
	// steps are the steps of saved entries, in order.
	steps []projection.Step
	block chan struct{}
}

func (c *memoryCatalogue) Save(entries []projection.Entry, gone []model.ServiceKey) error {
	c.mu.Lock()
	block := c.block
	c.mu.Unlock()
	if block != nil {
		<-block
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return c.fail
	}
	for _, e := range entries {
		c.entries[e.Service] = e
		c.steps = append(c.steps, e.Step)
	}
	for _, k := range gone {
		delete(c.entries, k)
	}
	return nil
}

// hang makes every later Save wait for ch.
func (c *memoryCatalogue) hang(ch chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.block = ch
}

type recordedNames struct {
	mu      sync.Mutex
	last    map[string]Address
	changed chan struct{}
}

func (n *recordedNames) SetNames(names map[string]Address) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = names
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *recordedNames) waitFor(t *testing.T, name string) Address {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		n.mu.Lock()
		a, ok := n.last[name]
		ch := n.changed
		n.mu.Unlock()
		if ok {
			return a
		}
		select {
		case <-ch:
		case <-ctx.Done():
			t.Fatalf("name %s was never told", name)
		}
	}
}

func start(t *testing.T) *fixture {
	t.Helper()
	vips := []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")}
	engine, err := projection.New(projection.Config{
		Domain: domain, FlatNamespaces: []string{"default"}, VIP4: vips[0], VIP6: vips[1], UnknownCap: 5, Retention: time.Minute,
	}, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{
		saved: &memoryCatalogue{entries: map[model.ServiceKey]projection.Entry{}},
		names: &recordedNames{changed: make(chan struct{})},
		clock: &shiftedClock{}, log: &logBuffer{},
	}
	c := cache.New(cache.Config{Clock: f.clock})
	f.Publisher, err = New(Config{
		Engine: engine, Cache: c, Catalogue: f.saved, Names: f.names, Log: slog.New(slog.NewTextHandler(f.log, nil)),
		Domain: domain, TrustDomain: domain, VIPRanges: vips, FlatNamespaces: []string{"default"},
		XDSSocket: "xds.sock", Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := server.New(server.Config{Cache: c})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "xds.sock")
	ctx, cancel := context.WithCancel(context.Background())
	l, err := unixsocket.Listen(ctx, unixsocket.Config{Path: path, UID: unixsocket.Keep, GID: unixsocket.Keep})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ctx, l) })
	wg.Go(func() { _ = f.Run(ctx) })
	if f.conn, err = xdstest.Dial("unix://" + path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.conn.Close()
		cancel()
		wg.Wait()
	})
	f.OnRegistry(registry.Event{Kind: registry.Complete})
	c.Release()
	return f
}

func (f *fixture) envoy(t *testing.T, judge xdstest.Judge) (ads, odcds *xdstest.Client) {
	t.Helper()
	opts := xdstest.Options{Node: &corev3.Node{Id: "node1", UserAgentName: "envoy"}, Judge: judge}
	ads, err := f.conn.ADS(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	odcds, err = f.conn.Clusters(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	must(t, ads.Subscribe(resourcev3.ClusterType))
	must(t, ads.Subscribe(resourcev3.ListenerType))
	must(t, ads.Subscribe(resourcev3.RouteType, resource.RoutesName))
	return ads, odcds
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// upsert publishes a pod of payments; ports are "8080 9090=h2 5432=tcp", a minus
// before one that is not healthy.
func (f *fixture) upsert(uid, ip string, def uint16, ports string) {
	f.nextGen++
	ep := model.Endpoint{
		UID: uid, Generation: f.nextGen, Service: model.ServiceKey{Namespace: "default", Name: "payments"},
		Identity:  model.Identity{TrustDomain: domain, Namespace: "default", Account: "payments"},
		Addresses: []netip.Addr{netip.MustParseAddr(ip)}, Default: def, Weight: 1,
	}
	for text := range strings.FieldsSeq(ports) {
		health := model.Healthy
		if strings.HasPrefix(text, "-") {
			health, text = model.Unhealthy, text[1:]
		}
		number, protocol, _ := strings.Cut(text, "=")
		n, _ := port.ParseNumber(number)
		pr, _ := port.ParseProtocol(protocol)
		ep.Ports = append(ep.Ports, model.PortStatus{Port: port.Port{Number: n, Protocol: pr}, Health: health})
	}
	slices.SortFunc(ep.Ports, func(a, b model.PortStatus) int { return int(a.Number) - int(b.Number) })
	f.OnRegistry(registry.Event{Kind: registry.Upsert, UID: uid, Generation: f.nextGen, Endpoint: ep})
}

func (f *fixture) remove(uid string) {
	f.nextGen++
	f.OnRegistry(registry.Event{Kind: registry.Delete, UID: uid, Generation: f.nextGen})
}

func waitFor(t *testing.T, c *xdstest.Client, typeURL, what string, ok func(*xdstest.State) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := c.WaitFor(ctx, typeURL, ok); err != nil {
		t.Fatalf("waiting for %s: %v", what, err)
	}
}

// assignment returns a load assignment, nil if there is none.
func assignment(st *xdstest.State, name string) (*endpointv3.ClusterLoadAssignment, error) {
	r, ok := st.Resources[name]
	if !ok {
		return nil, nil
	}
	la := &endpointv3.ClusterLoadAssignment{}
	return la, r.Body.UnmarshalTo(la)
}

// hosts returns the addresses of a load assignment.
func hosts(st *xdstest.State, name string) []string {
	la, err := assignment(st, name)
	switch {
	case err != nil:
		return []string{err.Error()}
	case la == nil:
		return nil
	}
	out := []string{}
	for _, l := range la.GetEndpoints() {
		for _, ep := range l.GetLbEndpoints() {
			out = append(out, ep.GetEndpoint().GetAddress().GetSocketAddress().GetAddress())
		}
	}
	slices.Sort(out)
	return out
}

// routes returns domain -> cluster of the route table.
func routes(st *xdstest.State) map[string]string {
	r, ok := st.Resources[resource.RoutesName]
	if !ok {
		return nil
	}
	var rc routev3.RouteConfiguration
	if err := r.Body.UnmarshalTo(&rc); err != nil {
		return map[string]string{"error": err.Error()}
	}
	out := map[string]string{}
	for _, vh := range rc.GetVirtualHosts() {
		for _, d := range vh.GetDomains() {
			out[d] = vh.GetRoutes()[0].GetRoute().GetCluster()
		}
	}
	return out
}

func sniOf(t *testing.T, st *xdstest.State, name string) string {
	t.Helper()
	r, ok := st.Resources[name]
	if !ok {
		return ""
	}
	var c clusterv3.Cluster
	must(t, r.Body.UnmarshalTo(&c))
	var tls tlsv3.UpstreamTlsContext
	if c.GetTransportSocket() == nil {
		return "tombstone"
	}
	must(t, c.GetTransportSocket().GetTypedConfig().UnmarshalTo(&tls))
	return tls.GetSni()
}

func has(name string) func(*xdstest.State) bool {
	return func(st *xdstest.State) bool { _, ok := st.Resources[name]; return ok }
}

// The path of a cold request (contract 8, second walk): the table names the
// cluster, the cluster is asked for and given, its load assignment follows and
// holds exactly the pods that serve the port (XDS-06, XDS-17).
func TestColdRequest(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	f.upsert("a", "10.1.0.2", 8080, "8080 9090=h2")
	f.upsert("b", "10.1.0.3", 8080, "8080 -9090=h2")
	f.upsert("c", "10.1.0.4", 8080, "8080")
	waitFor(t, ads, resourcev3.RouteType, "the table", func(st *xdstest.State) bool {
		return routes(st)["payments.aether.internal:9090"] == "payments.aether.internal:9090"
	})
	want := map[string]string{
		"payments.aether.internal": "payments.aether.internal", "payments.aether.internal:8080": "payments.aether.internal",
		"payments.default.aether.internal": "payments.aether.internal", "payments.default.aether.internal:8080": "payments.aether.internal",
		"payments.aether.internal:9090": "payments.aether.internal:9090", "payments.default.aether.internal:9090": "payments.aether.internal:9090",
		"payments.aether.internal:*": "", "payments.default.aether.internal:*": "", "*": "",
	}
	if d := cmp.Diff(want, routes(ads.State(resourcev3.RouteType))); d != "" {
		t.Errorf("route table (-want +got):\n%s", d)
	}
	for name, wantHosts := range map[string][]string{
		"payments.aether.internal":      {"10.1.0.2", "10.1.0.3", "10.1.0.4"},
		"payments.aether.internal:9090": {"10.1.0.2"},
	} {
		must(t, odcds.Subscribe(resourcev3.ClusterType, name))
		waitFor(t, odcds, resourcev3.ClusterType, name, has(name))
		must(t, ads.Subscribe(resourcev3.EndpointType, name))
		waitFor(t, ads, resourcev3.EndpointType, name, func(st *xdstest.State) bool { return slices.Equal(hosts(st, name), wantHosts) })
	}
	// One endpoint becomes ready: its port's set changes, no cluster and no table does (I4).
	before := odcds.State(resourcev3.ClusterType).Versions()
	table := ads.State(resourcev3.RouteType).Versions()
	f.upsert("b", "10.1.0.3", 8080, "8080 9090=h2")
	waitFor(t, ads, resourcev3.EndpointType, "b in 9090", func(st *xdstest.State) bool {
		return slices.Equal(hosts(st, "payments.aether.internal:9090"), []string{"10.1.0.2", "10.1.0.3"})
	})
	if d := cmp.Diff(before, odcds.State(resourcev3.ClusterType).Versions()); d != "" {
		t.Errorf("clusters changed with an endpoint:\n%s", d)
	}
	if d := cmp.Diff(table, ads.State(resourcev3.RouteType).Versions()); d != "" {
		t.Errorf("route table changed with an endpoint:\n%s", d)
	}
}

// XDS-R4, XDS-R17, XDS-35: a load assignment that is asked for before its service
// exists, and without its cluster, is answered empty at once and follows the pods.
func TestEndpointsAlone(t *testing.T) {
	f := start(t)
	ads, _ := f.envoy(t, nil)
	name := "payments.aether.internal:9090"
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "an empty set", has(name))
	for i, want := range [][]string{{"10.1.0.2"}, {"10.1.0.2", "10.1.0.3"}} {
		f.upsert(string(rune('a'+i)), "10.1.0."+string(rune('2'+i)), 8080, "8080 9090=h2")
		waitFor(t, ads, resourcev3.EndpointType, "the pods", func(st *xdstest.State) bool { return slices.Equal(hosts(st, name), want) })
	}
}

// priorities returns the zones of a load assignment by priority.
func priorities(st *xdstest.State, name string) []string {
	la, err := assignment(st, name)
	switch {
	case err != nil:
		return []string{err.Error()}
	case la == nil:
		return nil
	}
	var out []string
	for _, l := range la.GetEndpoints() {
		out = append(out, fmt.Sprintf("%d %s", l.GetPriority(), l.GetLocality().GetZone()))
	}
	return out
}

// A node that learns late where it is, or elsewhere, prefers what is near from then on, in
// every load assignment that Envoy has: of a cluster, of its endpoints alone, and of a
// service whose change still waits for the disk. Nothing else changes.
func TestSelfIsLearnedLate(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	zone := func(service, uid, ip, zone string) {
		f.nextGen++
		f.OnRegistry(registry.Event{Kind: registry.Upsert, UID: uid, Generation: f.nextGen, Endpoint: model.Endpoint{
			UID: uid, Generation: f.nextGen, Service: model.ServiceKey{Namespace: "default", Name: service},
			Identity:  model.Identity{TrustDomain: domain, Namespace: "default", Account: service},
			Addresses: []netip.Addr{netip.MustParseAddr(ip)}, Default: 8080, Weight: 1,
			Locality: model.Locality{Region: "eu", Zone: zone},
			Ports:    []model.PortStatus{{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy}},
		}})
	}
	services := []string{"payments", "orders", "ledger"}
	for i, s := range services[:2] {
		zone(s, s+"-n", fmt.Sprintf("10.1.%d.2", i), "north")
		zone(s, s+"-s", fmt.Sprintf("10.1.%d.3", i), "south")
	}
	must(t, odcds.Subscribe(resourcev3.ClusterType, "payments.aether.internal"))
	for _, s := range services {
		must(t, ads.Subscribe(resourcev3.EndpointType, s+".aether.internal"))
	}
	want := func(what string, services []string, want ...string) {
		t.Helper()
		for _, s := range services {
			name := s + ".aether.internal"
			waitFor(t, ads, resourcev3.EndpointType, what+" of "+s, func(st *xdstest.State) bool { return slices.Equal(priorities(st, name), want) })
		}
	}
	want("no near or far", services[:2], "0 north", "0 south")
	waitFor(t, odcds, resourcev3.ClusterType, "the cluster", has("payments.aether.internal"))
	clusters := odcds.State(resourcev3.ClusterType).Versions()

	disk := make(chan struct{})
	answer := sync.OnceFunc(func() { close(disk) })
	t.Cleanup(answer) // before the publisher is waited for
	f.saved.hang(disk)
	zone("ledger", "ledger-n", "10.1.2.2", "north")
	zone("ledger", "ledger-s", "10.1.2.3", "south")
	f.SetSelf(model.Locality{Region: "eu", Zone: "south"})
	want("the near ones first", services[:2], "0 south", "1 north")
	answer()
	want("the near ones first", services, "0 south", "1 north")
	f.SetSelf(model.Locality{Region: "eu", Zone: "north"})
	want("the near ones first", services, "0 north", "1 south")
	zone("orders", "orders-t", "10.1.1.4", "south")
	want("what comes later, too", services[1:2], "0 north", "1 south")
	if d := cmp.Diff(clusters, odcds.State(resourcev3.ClusterType).Versions()); d != "" {
		t.Errorf("clusters changed with the node's place:\n%s", d)
	}
}

// An address that pods of two nodes claim is told of once, by a line that names both and
// says what of it, however often their records change; one that is free of it for a while
// is told of again. How many there are is known all the time.
func TestContestIsToldOnce(t *testing.T) {
	f := start(t)
	claim := func(uid, node, ip string) {
		f.nextGen++
		f.OnRegistry(registry.Event{Kind: registry.Upsert, UID: uid, Generation: f.nextGen, Endpoint: model.Endpoint{
			UID: uid, Generation: f.nextGen, Node: node, Service: model.ServiceKey{Namespace: "default", Name: uid},
			Identity:  model.Identity{TrustDomain: domain, Namespace: "default", Account: uid},
			Addresses: []netip.Addr{netip.MustParseAddr(ip)}, Default: 8080, Weight: 1, Since: time.Unix(int64(f.nextGen), 0),
			Ports: []model.PortStatus{{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy}},
		}})
	}
	const line = "pods of several nodes claim one address"
	told := func(what string, lines, contested int) {
		t.Helper()
		if got := f.log.lines(line); len(got) != lines || f.Contested() != contested {
			t.Errorf("%s: %d contested, want %d; told of %d times, want %d:\n%s", what, f.Contested(), contested, len(got), lines, got)
		}
	}
	claim("mine", "node1", "10.1.0.2")
	told("one claim", 0, 0)
	for range 3 {
		claim("theirs", "node2", "10.1.0.2")
		claim("other", "node3", "10.1.0.3")
		claim("mine", "node1", "10.1.0.2")
	}
	told("both claim it again and again", 1, 1)
	for _, want := range []string{"address=10.1.0.2", "owner=theirs", "owner_node=node2", "owner_service=default/theirs", "other=mine", "other_node=node1", "other_service=default/mine"} {
		if got := f.log.lines(line); len(got) > 0 && !strings.Contains(got[0], want) {
			t.Errorf("it does not say %s: %s", want, got[0])
		}
	}
	f.remove("theirs")
	told("one of them is gone", 1, 0)
	claim("again", "node2", "10.1.0.2")
	told("another one claims it", 2, 1)
}

// XDS-36, XDS-D5: the last endpoint goes by an empty load assignment, and the
// service keeps its routes while it is known.
func TestLastEndpointGoes(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	f.upsert("a", "10.1.0.2", 8080, "8080")
	name := "payments.aether.internal"
	must(t, odcds.Subscribe(resourcev3.ClusterType, name))
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "the endpoint", func(st *xdstest.State) bool { return len(hosts(st, name)) == 1 })
	waitFor(t, ads, resourcev3.RouteType, "the route", func(st *xdstest.State) bool { return routes(st)[name] == name })
	f.remove("a")
	waitFor(t, ads, resourcev3.EndpointType, "an empty set", func(st *xdstest.State) bool {
		h := hosts(st, name)
		return h != nil && len(h) == 0
	})
	if st := ads.State(resourcev3.EndpointType); st.Removed[name] != 0 {
		t.Error("the load assignment was removed; Envoy would keep the old endpoint")
	}
	if routes(ads.State(resourcev3.RouteType))[name] != name {
		t.Error("the route went with the last endpoint")
	}
}

// XDS-28, I9, MESH-4: an unknown name is answered by a tombstone, beyond the cap
// by its removal, and then the table itself refuses; a tombstone becomes the
// service when that appears (XDS-R4).
func TestUnknownNames(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	must(t, odcds.Subscribe(resourcev3.ClusterType, "payments.aether.internal:9090"))
	waitFor(t, odcds, resourcev3.ClusterType, "the tombstone", has("payments.aether.internal:9090"))
	if got := sniOf(t, odcds.State(resourcev3.ClusterType), "payments.aether.internal:9090"); got != "tombstone" {
		t.Errorf("unknown name is answered with SNI %q", got)
	}
	f.upsert("a", "10.1.0.2", 8080, "8080 9090=h2")
	waitFor(t, odcds, resourcev3.ClusterType, "the real cluster", func(st *xdstest.State) bool {
		return sniOf(t, st, "payments.aether.internal:9090") == "9090"
	})
	ghosts := []string{"g1.aether.internal", "g2.aether.internal", "g3.aether.internal", "g4.aether.internal", "g5.aether.internal", "g6.aether.internal"}
	must(t, odcds.Subscribe(resourcev3.ClusterType, ghosts...))
	waitFor(t, odcds, resourcev3.ClusterType, "an answer to each", func(st *xdstest.State) bool {
		for _, g := range ghosts {
			if st.Received[g]+st.Removed[g] == 0 {
				return false
			}
		}
		return true
	})
	if st := odcds.State(resourcev3.ClusterType); len(st.Names()) != 6 {
		t.Errorf("holds %v, want the service's cluster and 5 tombstones", st.Names())
	}
	waitFor(t, ads, resourcev3.RouteType, "a table that refuses", func(st *xdstest.State) bool {
		var rc routev3.RouteConfiguration
		r, ok := st.Resources[resource.RoutesName]
		if !ok {
			return false
		}
		must(t, r.Body.UnmarshalTo(&rc))
		for _, vh := range rc.GetVirtualHosts() {
			if vh.GetDomains()[0] == "*" {
				return vh.GetRoutes()[0].GetRoute() == nil
			}
		}
		return false
	})
}

// Contract 2, I2: the default port changes in three steps, each after the previous
// one is acknowledged, and at the end no cluster of the default's explicit name is
// left. The steps reach the disk before Envoy.
func TestDefaultPortChange(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	const bare = "payments.aether.internal"
	f.upsert("a", "10.1.0.2", 8080, "8080 9090")
	f.upsert("b", "10.1.0.3", 8080, "8080 9090")
	must(t, odcds.Subscribe(resourcev3.ClusterType, bare))
	must(t, ads.Subscribe(resourcev3.EndpointType, bare))
	waitFor(t, ads, resourcev3.EndpointType, "endpoints", func(st *xdstest.State) bool { return len(hosts(st, bare)) == 2 })
	waitFor(t, ads, resourcev3.RouteType, "the table", func(st *xdstest.State) bool { return routes(st)[bare+":8080"] == bare })

	// Envoy withholds its acknowledgement of the table: nothing further may happen.
	judge := func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.RouteType {
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	}
	ads.SetJudge(judge)
	f.upsert("a", "10.1.0.2", 9090, "8080 9090")
	f.upsert("b", "10.1.0.3", 9090, "8080 9090")
	waitFor(t, ads, resourcev3.RouteType, "step 1", func(st *xdstest.State) bool {
		r := routes(st)
		return r[bare] == bare && r[bare+":8080"] == bare+":8080" && r[bare+":9090"] == bare+":9090"
	})
	must(t, odcds.Subscribe(resourcev3.ClusterType, bare+":8080", bare+":9090"))
	waitFor(t, odcds, resourcev3.ClusterType, "both explicit clusters", func(st *xdstest.State) bool {
		return sniOf(t, st, bare+":8080") == "8080" && sniOf(t, st, bare+":9090") == "9090"
	})
	if got := sniOf(t, odcds.State(resourcev3.ClusterType), bare); got != "8080" {
		t.Fatalf("cluster F moved to %s before the table was acknowledged", got)
	}
	ads.SetJudge(func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { return xdstest.Ack() })
	must(t, ads.Release(resourcev3.RouteType))
	waitFor(t, odcds, resourcev3.ClusterType, "step 2", func(st *xdstest.State) bool { return sniOf(t, st, bare) == "9090" })
	waitFor(t, ads, resourcev3.RouteType, "step 3", func(st *xdstest.State) bool {
		r := routes(st)
		return r[bare] == bare && r[bare+":9090"] == bare && r[bare+":8080"] == bare+":8080"
	})
	waitFor(t, odcds, resourcev3.ClusterType, "I2 at rest", func(st *xdstest.State) bool {
		return st.Removed[bare+":9090"] > 0 && !has(bare+":9090")(st)
	})
	if ads.State(resourcev3.EndpointType).Received[bare] < 2 {
		t.Error("the load assignment did not follow its changed cluster (XDS-D7)")
	}
	f.saved.mu.Lock()
	defer f.saved.mu.Unlock()
	wantSteps := []projection.Step{projection.Settled, projection.Splitting, projection.Moving, projection.Joining, projection.Settled}
	if d := cmp.Diff(wantSteps, slices.Compact(f.saved.steps)); d != "" {
		t.Errorf("saved steps (-want +got):\n%s", d)
	}
}

// A service is forgotten, and comes back before Envoy was told to remove its warm clusters,
// which nobody warms any more. Its steps await the removals, although nothing, or endpoints
// alone, are given under those names: until then Envoy has clusters of the old meaning.
func TestStepAwaitsRemoval(t *testing.T) {
	f := start(t)
	name := "payments.aether.internal"
	ads, odcds := f.envoy(t, nil)
	for i := range 5 { // as many as are remembered: further names are removed
		ghost := fmt.Sprintf("ghost%d.aether.internal:1", i)
		must(t, odcds.Subscribe(resourcev3.ClusterType, ghost))
		waitFor(t, odcds, resourcev3.ClusterType, ghost, has(ghost))
	}
	f.AddPod(clientPod("c1", "payments"))
	f.upsert("a", "10.1.0.2", 8080, "8080 7000")
	waitFor(t, ads, resourcev3.ClusterType, name, has(name))
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, name, has(name))
	ads.SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.ClusterType {
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	})
	other := clientPod("c2")
	other.Ports, other.Default = []port.Port{{Number: 8080, Protocol: port.HTTP}}, 8080
	f.AddPod(other)
	waitFor(t, ads, resourcev3.ClusterType, "an unanswered response", func(st *xdstest.State) bool { return st.Withheld == 1 })

	f.RemovePod(model.AttachmentKey{ContainerID: "c1", IfName: "eth0"})
	f.remove("a")
	f.mu.Lock()
	f.engine.Expire(time.Now().Add(time.Hour))
	f.flush()
	f.mu.Unlock()
	must(t, f.AwaitProjected(t.Context(), nil))
	f.awaitsRemoval(t, projection.Await{Kind: projection.AwaitClusters, Name: name}, name+":7000")
	f.upsert("b", "10.1.0.3", 9090, "9090")
	must(t, f.AwaitProjected(t.Context(), []string{"b"}))

	f.awaitsRemoval(t, projection.Await{Kind: projection.AwaitCluster, Name: name}, name)
	ads.SetJudge(func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { return xdstest.Ack() })
	must(t, ads.Release(resourcev3.ClusterType))
	waitFor(t, ads, resourcev3.RouteType, "the last step", func(st *xdstest.State) bool { return routes(st)[name+":9090"] == name })
	if sni := sniOf(t, ads.State(resourcev3.ClusterType), name); sni == "8080" {
		t.Error("port 9090 is routed to a cluster of port 8080")
	}
}

// awaitsRemoval fails unless what a step awaits includes the outstanding removal of a cluster.
func (f *fixture) awaitsRemoval(t *testing.T, a projection.Await, cluster string) {
	t.Helper()
	f.mu.Lock()
	keys := f.awaitKeys([]projection.Await{a})
	f.mu.Unlock()
	removal := cache.Key{Kind: cache.WildcardCluster, Name: cluster}
	if !slices.ContainsFunc(f.cache.Outstanding(keys, false), func(o cache.Outstanding) bool { return o.Key == removal }) {
		t.Errorf("nobody waits for the removal of %s; the keys are %v", cluster, keys)
	}
}

// I2: a warm cluster of a service that was forgotten, and whose port is the default port when
// it is known again, is removed: nobody asked for that spelling.
func TestWarmClusterIsNoSpelling(t *testing.T) {
	f := start(t)
	const spelling = "payments.aether.internal:8080"
	ads, _ := f.envoy(t, nil)
	f.AddPod(clientPod("c1", "payments"))
	f.upsert("a", "10.1.0.2", 9090, "8080 9090")
	waitFor(t, ads, resourcev3.ClusterType, spelling, has(spelling))
	f.remove("a")
	f.mu.Lock()
	f.engine.Expire(time.Now().Add(time.Hour))
	f.flush()
	f.watched++ // to be told of every change
	f.mu.Unlock()
	must(t, f.awaitChange(t.Context(), func() string {
		for key := range f.engine.Services() {
			return key.String() + " is still known"
		}
		return ""
	}))
	waitFor(t, ads, resourcev3.ClusterType, "a tombstone", func(st *xdstest.State) bool { return sniOf(t, st, spelling) == "tombstone" })
	f.upsert("b", "10.1.0.3", 8080, "8080")
	waitFor(t, ads, resourcev3.ClusterType, "the default port", func(st *xdstest.State) bool { return sniOf(t, st, "payments.aether.internal") == "8080" })
	waitFor(t, ads, resourcev3.ClusterType, "no cluster of its own name", func(st *xdstest.State) bool { return !has(spelling)(st) })
	if f.Asked() != 0 {
		t.Errorf("%d names are remembered, and nobody asked for any", f.Asked())
	}
}

// While a step waits for the disk, the projection is ahead of the cluster that Envoy has. Who
// asks for the load assignment then gets none of the cluster's next port, but both together.
func TestEndpointsComeWithTheirCluster(t *testing.T) {
	f := start(t)
	const name = "payments.aether.internal"
	payments := model.ServiceKey{Namespace: "default", Name: "payments"}
	ads, odcds := f.envoy(t, nil)
	f.upsert("a", "10.1.0.2", 8080, "8080")
	must(t, odcds.Subscribe(resourcev3.ClusterType, name))
	waitFor(t, odcds, resourcev3.ClusterType, name, has(name))
	waitFor(t, ads, resourcev3.RouteType, "the route", func(st *xdstest.State) bool { return routes(st)[name+":8080"] == name })
	ads.SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.RouteType {
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	})
	f.remove("a")
	f.upsert("b", "10.1.0.3", 9090, "9090")
	waitFor(t, ads, resourcev3.RouteType, "the first step", func(st *xdstest.State) bool { return st.Withheld > 0 })

	f.mu.Lock()
	first, _ := f.engine.Shape(payments)
	f.engine.Advance(payments, first.Token)
	f.flush()
	second, _ := f.engine.Shape(payments)
	b := newBatch()
	f.giveEndpoints(b, name)
	f.mu.Unlock()
	if first.Step != projection.Splitting || second.Step != projection.Moving {
		t.Fatalf("steps are %s and %s", first.Step, second.Step)
	}
	if got := b.Set[cache.Endpoints]; len(got) > 0 {
		t.Errorf("endpoints of port 9090 are given for a cluster of port 8080: %v", got)
	}
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "the new endpoint", func(st *xdstest.State) bool { return slices.Equal(hosts(st, name), []string{"10.1.0.3"}) })
	if sni := sniOf(t, odcds.State(resourcev3.ClusterType), name); sni != "9090" {
		t.Errorf("endpoints of port 9090 came for a cluster of port %s", sni)
	}
}

// Contract 1: declared upstreams are given to every Envoy before the first request.
func TestUpstreamsAreWarm(t *testing.T) {
	f := start(t)
	ads, _ := f.envoy(t, nil)
	f.AddPod(clientPod("c1", "payments"))
	waitFor(t, ads, resourcev3.ListenerType, "listeners", func(st *xdstest.State) bool { return len(st.Names()) == 2 })
	f.upsert("a", "10.1.0.2", 8080, "8080 9090=h2 5432=tcp")
	waitFor(t, ads, resourcev3.ClusterType, "upstream clusters", func(st *xdstest.State) bool {
		return sniOf(t, st, "payments.aether.internal") == "8080" && sniOf(t, st, "payments.aether.internal:9090") == "9090"
	})
	// Given by the wildcard, it stays given when the pod that declared it goes.
	f.RemovePod(model.AttachmentKey{ContainerID: "c1", IfName: "eth0"})
	waitFor(t, ads, resourcev3.ListenerType, "no listener", func(st *xdstest.State) bool { return len(st.Names()) == 0 && st.Acked > 1 })
	if !has("payments.aether.internal")(ads.State(resourcev3.ClusterType)) {
		t.Error("the warm cluster went")
	}
}

func clientPod(id string, upstreams ...string) model.Pod {
	return model.Pod{
		Key: model.AttachmentKey{ContainerID: id, IfName: "eth0"}, Netns: "/run/portolan/netns/" + id + "-eth0",
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.9")}, Service: model.ServiceKey{Namespace: "default", Name: "client"},
		Identity: model.Identity{TrustDomain: domain, Namespace: "default", Account: "client"}, Upstreams: upstreams,
	}
}

// XDS-R14: a pod's listeners come after its app clusters, and leave before them.
func TestPodOrder(t *testing.T) {
	f := start(t)
	ads, _ := f.envoy(t, nil)
	pod := clientPod("c1")
	pod.Ports, pod.Default = []port.Port{{Number: 8080, Protocol: port.HTTP}}, 8080
	must(t, f.AwaitReady(t.Context()))
	f.AddPod(pod)
	must(t, f.AwaitListeners(t.Context(), pod.Key))
	f.RemovePod(pod.Key)
	waitFor(t, ads, resourcev3.ClusterType, "no app cluster", func(st *xdstest.State) bool { return st.Removed["app|c1-eth0|8080"] == 1 })
	var order []string
	for _, resp := range ads.Order() {
		kind := map[string]string{resourcev3.ClusterType: "cluster", resourcev3.ListenerType: "listener"}[resp.GetTypeUrl()]
		switch {
		case kind != "" && len(resp.GetResources()) > 0:
			order = append(order, "+"+kind)
		case kind != "" && len(resp.GetRemovedResources()) > 0:
			order = append(order, "-"+kind)
		}
	}
	if d := cmp.Diff([]string{"+cluster", "+listener", "-listener", "-cluster"}, order); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
}

// Contract 4.2: a pod is proven when Envoy has every secret that its connections need,
// a pure client's own certificate among them.
func TestSecretsAreProven(t *testing.T) {
	serving := clientPod("c1")
	serving.Ports, serving.Default = []port.Port{{Number: 8080, Protocol: port.HTTP}}, 8080
	for _, pod := range []model.Pod{clientPod("c2"), serving} {
		f := start(t)
		ads, _ := f.envoy(t, nil)
		f.SetSVID(pod.Identity, []byte("chain"), []byte("key"))
		f.SetBundle(domain, []byte("roots"))
		f.AddPod(pod)
		must(t, f.AwaitReady(t.Context()))
		needed := []string{resource.BundleSecret(domain), resource.OutboundSecret(pod.Identity)}
		if len(pod.Ports) > 0 {
			needed = append(needed, resource.InboundSecret(pod.Identity))
		}
		for _, name := range needed {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := f.AwaitSecrets(ctx, pod.Key); err == nil || !strings.Contains(err.Error(), "secret/"+name+":") {
				t.Errorf("%v: error %v, want one that names %s", pod.Ports, err, name)
			}
			must(t, ads.Subscribe(resourcev3.SecretType, name))
		}
		must(t, f.AwaitSecrets(t.Context(), pod.Key))
	}
}

// A certificate that came after a demand for it was taken is not answered away.
func TestDemandIsAnsweredLate(t *testing.T) {
	f := start(t)
	ads, _ := f.envoy(t, nil)
	pod := clientPod("c1")
	name := resource.OutboundSecret(pod.Identity)
	must(t, ads.Subscribe(resourcev3.SecretType, name))
	waitFor(t, ads, resourcev3.SecretType, "the answer that there is none", func(st *xdstest.State) bool { return st.Removed[name] == 1 })
	f.SetSVID(pod.Identity, []byte("chain"), []byte("key"))
	f.onDemand(cache.Demand{Wanted: []cache.Key{{Kind: cache.Secret, Name: name}}})
	f.SetBundle(domain, []byte("roots"))
	must(t, ads.Subscribe(resourcev3.SecretType, resource.BundleSecret(domain)))
	waitFor(t, ads, resourcev3.SecretType, "what comes after it", func(st *xdstest.State) bool {
		if _, has := st.Resources[resource.BundleSecret(domain)]; !has {
			return false
		}
		if _, has := st.Resources[name]; !has || st.Removed[name] != 1 {
			t.Errorf("the certificate is there: %v, removed %d times", has, st.Removed[name])
		}
		return true
	})
}

// A rejected listener fails the proof with Envoy's own words.
func TestRejectedListener(t *testing.T) {
	f := start(t)
	f.envoy(t, func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.ListenerType && len(resp.GetResources()) > 0 {
			return xdstest.Nack("Error adding/updating listener(s) out-http|c1-eth0: failed to open netns file /x: No such file or directory\n")
		}
		return xdstest.Ack()
	})
	must(t, f.AwaitReady(t.Context()))
	f.AddPod(clientPod("c1"))
	err := f.AwaitListeners(t.Context(), model.AttachmentKey{ContainerID: "c1", IfName: "eth0"})
	if err == nil || !strings.Contains(err.Error(), "failed to open netns file") {
		t.Errorf("error %v, want Envoy's reason", err)
	}
}

// Dataplane decision 8: DNS learns a name after the pods' TCP port sets did, and
// both after the catalogue is saved.
func TestNamesComeLast(t *testing.T) {
	f := start(t)
	disk := make(chan struct{})
	f.saved.hang(disk)
	synced := make(chan []netip.AddrPort, 10)
	f.SyncPods(func() { synced <- f.TCPPorts() })
	f.upsert("a", "10.1.0.2", 8080, "8080 5432=tcp")
	f.names.mu.Lock()
	if _, ok := f.names.last["payments.aether.internal"]; ok {
		t.Error("the name was told before it was saved")
	}
	f.names.mu.Unlock()
	close(disk)
	a := f.names.waitFor(t, "payments.aether.internal")
	var got []netip.AddrPort
	for len(synced) > 0 {
		got = <-synced
	}
	want := []netip.AddrPort{netip.AddrPortFrom(a.V4, 5432), netip.AddrPortFrom(a.V6, 5432)}
	if !slices.Equal(got, want) {
		t.Errorf("pods had %v when the name was told, want %v", got, want)
	}
	if !slices.Equal(f.TCPPorts(), want) {
		t.Errorf("TCPPorts %v, want %v", f.TCPPorts(), want)
	}
}

// A full disk stops no routing (contract 5): the change reaches Envoy all the same.
func TestUnsavedCatalogue(t *testing.T) {
	f := start(t)
	f.saved.fail = errors.New("no space left on device")
	ads, _ := f.envoy(t, nil)
	f.upsert("a", "10.1.0.2", 8080, "8080")
	waitFor(t, ads, resourcev3.RouteType, "the route", func(st *xdstest.State) bool {
		return routes(st)["payments.aether.internal"] == "payments.aether.internal"
	})
}

// AwaitWithdrawn returns when Envoy has acknowledged sets without the endpoint,
// and not before.
func TestAwaitWithdrawn(t *testing.T) {
	f := start(t)
	withhold := make(chan struct{})
	ads, odcds := f.envoy(t, nil)
	name := "payments.aether.internal"
	f.upsert("a", "10.1.0.2", 8080, "8080")
	must(t, odcds.Subscribe(resourcev3.ClusterType, name))
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "the endpoint", func(st *xdstest.State) bool { return len(hosts(st, name)) == 1 })
	ads.SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		for _, r := range resp.GetResources() {
			var la endpointv3.ClusterLoadAssignment
			if r.GetResource().UnmarshalTo(&la) == nil && len(la.GetEndpoints()) == 0 {
				return xdstest.Withhold()
			}
		}
		return xdstest.Ack()
	})
	done := make(chan error, 1)
	go func() {
		err := f.AwaitWithdrawn(t.Context(), model.ServiceKey{Namespace: "default", Name: "payments"}, "a")
		select {
		case <-withhold:
		default:
			err = errors.Join(err, errors.New("returned before the acknowledgement"))
		}
		done <- err
	}()
	f.remove("a")
	waitFor(t, ads, resourcev3.EndpointType, "the empty set", func(st *xdstest.State) bool { return st.Withheld > 0 && len(hosts(st, name)) == 0 })
	close(withhold)
	ads.SetJudge(func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { return xdstest.Ack() })
	must(t, ads.Release(resourcev3.EndpointType))
	must(t, <-done)
}

// I5: the same input in any order gives the same bytes.
func TestAnyOrderSameBytes(t *testing.T) {
	table := func(order []int) []byte {
		f := start(t)
		ads, _ := f.envoy(t, nil)
		for _, i := range order {
			switch i {
			case 0:
				f.upsert("a", "10.1.0.2", 8080, "8080 9090=h2")
			case 1:
				f.upsert("b", "10.1.0.3", 8080, "8080 5432=tcp")
			case 2:
				f.upsert("c", "10.1.0.4", 8080, "8080 7070")
			}
		}
		waitFor(t, ads, resourcev3.RouteType, "all ports", func(st *xdstest.State) bool {
			r := routes(st)
			_, nine := r["payments.aether.internal:9090"]
			_, seven := r["payments.aether.internal:7070"]
			return nine && seven
		})
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(ads.State(resourcev3.RouteType).Resources[resource.RoutesName].Body)
		must(t, err)
		return raw
	}
	want := table([]int{0, 1, 2})
	for _, order := range [][]int{{2, 1, 0}, {1, 0, 2}} {
		if string(table(order)) != string(want) {
			t.Errorf("order %v gives other bytes", order)
		}
	}
}

// I2: a name is told to DNS when Envoy has its routes, so that the first request
// of who resolved it finds them.
func TestNamesComeAfterRoutes(t *testing.T) {
	f := start(t)
	ads, _ := f.envoy(t, nil)
	waitFor(t, ads, resourcev3.RouteType, "the first table", has(resource.RoutesName))
	ads.SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.RouteType {
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	})
	f.upsert("a", "10.1.0.2", 8080, "8080")
	waitFor(t, ads, resourcev3.RouteType, "the table", func(st *xdstest.State) bool { return st.Withheld > 0 })
	f.names.mu.Lock()
	_, early := f.names.last["payments.aether.internal"]
	f.names.mu.Unlock()
	if early {
		t.Error("the name was told before Envoy acknowledged its routes")
	}
	must(t, ads.Release(resourcev3.RouteType))
	f.names.waitFor(t, "payments.aether.internal")
}
