package projection

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const domain = "aether.internal"

// t0 is when every test begins.
var t0 = time.Unix(1_800_000_000, 0)

// testConfig is the defaults of contract 7.
func testConfig() Config {
	return Config{
		Domain:         domain,
		FlatNamespaces: []string{"default"},
		VIP4:           netip.MustParsePrefix("198.18.0.0/15"),
		VIP6:           netip.MustParsePrefix("fd70:6f72:746f::/64"),
		UnknownCap:     DefaultUnknownCap,
		Retention:      DefaultRetention,
	}
}

// newEngine returns an engine that is synced, after the given pods came.
func newEngine(t testing.TB, cfg Config, pods ...model.Endpoint) *Engine {
	t.Helper()
	e, err := New(cfg, nil, t0)
	if err != nil {
		t.Fatal(err)
	}
	e.Synced()
	upsert(t, e, pods...)
	e.TakeDirty()
	return e
}

// upsert gives the engine pods, each newer than what it knows of them.
func upsert(t testing.TB, e *Engine, pods ...model.Endpoint) {
	t.Helper()
	for _, p := range pods {
		if r := e.records[p.UID]; r != nil && p.Generation <= r.generation {
			p.Generation = r.generation + 1
		}
		if err := e.Upsert(p, e.now); err != nil {
			t.Fatal(err)
		}
	}
}

// remove deletes pods at their present generation.
func remove(e *Engine, uids ...string) {
	for _, uid := range uids {
		e.Delete(uid, e.records[uid].generation, e.now)
	}
}

// pod returns a record. service is "namespace/name". ports are separated by blanks:
// a number, "=protocol", "*" on the default, and the health "+" healthy, "-" unhealthy,
// "~" draining.
func pod(uid, service, addr, ports string) model.Endpoint {
	ep := model.Endpoint{
		UID: uid, Generation: 1, Service: key(service), Weight: 1,
		Addresses: []netip.Addr{netip.MustParseAddr(addr)},
	}
	ep.Identity = model.Identity{TrustDomain: domain, Namespace: ep.Service.Namespace, Account: ep.Service.Name}
	for _, field := range strings.Fields(ports) {
		var p model.PortStatus
		switch field[len(field)-1] {
		case '+':
			p.Health = model.Healthy
		case '~':
			p.Health = model.Draining
		}
		field = strings.TrimRight(field, "+-~")
		spec, isDefault := strings.CutSuffix(field, "*")
		number, protocol, _ := strings.Cut(spec, "=")
		n, err := port.ParseNumber(number)
		if err != nil {
			panic(err)
		}
		p.Number = n
		p.Protocol, _ = port.ParseProtocol(protocol)
		if isDefault {
			ep.Default = n
		}
		ep.Ports = append(ep.Ports, p)
	}
	return ep
}

func key(service string) model.ServiceKey {
	ns, name, _ := strings.Cut(service, "/")
	return model.ServiceKey{Namespace: ns, Name: name}
}

// view returns a View that must exist.
func view(t testing.TB, e *Engine, service string) View {
	t.Helper()
	v, ok := e.View(key(service))
	if !ok {
		t.Fatalf("service %s is not known", service)
	}
	return v
}

// hosts writes virtual hosts as "domain domain -> cluster", one a line.
func hosts(v View) []string {
	var out []string
	for _, h := range v.VirtualHosts {
		line := strings.ReplaceAll(strings.Join(h.Domains, " "), "."+domain, "") + " -> "
		if h.Cluster == "" {
			line += "refuse"
		} else {
			line += strings.ReplaceAll(h.Cluster, "."+domain, "")
		}
		out = append(out, line)
	}
	return out
}

// clusters writes clusters as "name sni protocol: uid uid~", one a line.
func clusters(v View) []string {
	var out []string
	for _, c := range v.Clusters {
		line := fmt.Sprintf("%s %s %s:", strings.ReplaceAll(c.Name, "."+domain, ""), c.SNI, c.Protocol)
		for _, ep := range c.Endpoints {
			line += " " + ep.UID
			if ep.Health == model.Draining {
				line += "~"
			}
		}
		out = append(out, line)
	}
	return out
}

// check compares and says what with.
func check[T any](t testing.TB, what string, got, want T) {
	t.Helper()
	if reflect.DeepEqual(got, want) {
		return // cmp is slow
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// advance takes the step that the service awaits.
func advance(t testing.TB, e *Engine, service string) {
	t.Helper()
	if v := view(t, e, service); !e.Advance(key(service), v.Token) {
		t.Fatalf("%s does not advance from %s", service, v.Step)
	}
}

// rest advances every service until nothing is awaited, as without an Envoy.
func rest(e *Engine) {
	for range 100 {
		moved := false
		for k := range e.Services() {
			v, _ := e.Shape(k)
			if v.Step != Settled {
				moved = e.Advance(k, v.Token) || moved
				break
			}
		}
		if !moved {
			return
		}
	}
	panic("the engine does not come to rest")
}

// Every shape of a service: single-port, multi-port, tcp, mixed, h2, of an unknown
// protocol, in a flat namespace and in another (contract 2, dataplane decision 6, MESH-3).
func TestViewShapes(t *testing.T) {
	for _, tt := range []struct {
		name, service, ports string
		hosts, clusters      []string
		tcp                  []uint16
	}{
		{
			name: "single port", service: "default/payments", ports: "8080*+",
			hosts:    []string{"payments payments:8080 payments.default payments.default:8080 -> payments", "payments:* payments.default:* -> refuse"},
			clusters: []string{"payments 8080 http: a"},
		},
		{
			name: "namespaced", service: "shop/payments", ports: "8080*+ 9090+",
			hosts: []string{
				"payments.shop payments.shop:8080 -> payments.shop",
				"payments.shop:9090 -> payments.shop:9090",
				"payments.shop:* -> refuse",
			},
			clusters: []string{"payments.shop 8080 http: a", "payments.shop:9090 9090 http: a"},
		},
		{
			name: "mixed", service: "default/payments", ports: "5432=tcp+ 8080*+ 9090=grpc+ 9100-",
			hosts: []string{
				"payments payments:8080 payments.default payments.default:8080 -> payments",
				"payments:9090 payments.default:9090 -> payments:9090",
				"payments:9100 payments.default:9100 -> payments:9100",
				"payments:* payments.default:* -> refuse",
			},
			clusters: []string{
				"payments 8080 http: a", "payments:9090 9090 h2: a", "payments:9100 9100 http:",
				"198.19.19.167:5432 5432.payments.default tcp: a",
				"[fd70:6f72:746f::1:13a7]:5432 5432.payments.default tcp: a",
			},
			tcp: []uint16{5432},
		},
		{
			name: "tcp default", service: "default/payments", ports: "5432=tcp*+ 9090+",
			hosts: []string{
				"payments payments.default -> refuse",
				"payments:9090 payments.default:9090 -> payments:9090",
				"payments:* payments.default:* -> refuse",
			},
			clusters: []string{
				"payments:9090 9090 http: a",
				"198.19.19.167:5432 5432.payments.default tcp: a",
				"[fd70:6f72:746f::1:13a7]:5432 5432.payments.default tcp: a",
			},
			tcp: []uint16{5432},
		},
		{
			name: "unknown protocol is unroutable, never HTTP", service: "default/payments", ports: "7000=quic+ 8080*+",
			hosts:    []string{"payments payments:8080 payments.default payments.default:8080 -> payments", "payments:* payments.default:* -> refuse"},
			clusters: []string{"payments 8080 http: a"},
		},
		{
			name: "unknown protocol on the default port", service: "default/payments", ports: "7000=quic*+",
			hosts: []string{"payments payments.default -> refuse", "payments:* payments.default:* -> refuse"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngine(t, testConfig(), pod("a", tt.service, "10.0.0.1", tt.ports))
			v := view(t, e, tt.service)
			check(t, "virtual hosts", hosts(v), tt.hosts)
			check(t, "clusters", clusters(v), tt.clusters)
			check(t, "tcp ports", v.TCPPorts, tt.tcp)
			if v.Step != Settled || len(v.Await) != 0 || len(v.Retired) != 0 {
				t.Errorf("a new service awaits something: %s %v %v", v.Step, v.Await, v.Retired)
			}
			checkReferences(t, e)
		})
	}
}

// checkReferences holds I6 and XDS-D6 for all services: every cluster that a virtual
// host names is in the same View, by Cluster and by Resolve; no domain, virtual host,
// cluster or EDS name is there twice (MESH-17, MESH-18, MESH-48).
func checkReferences(t testing.TB, e *Engine) {
	t.Helper()
	seen := map[string]bool{}
	once := func(what, name string) {
		if seen[what+name] {
			t.Fatalf("%s %q is there twice", what, name)
		}
		seen[what+name] = true
	}
	for k := range e.Services() {
		v, _ := e.View(k)
		for _, c := range v.Clusters {
			once("cluster", c.Name)
			once("EDS name", c.EDSName)
			got, ok := e.Cluster(c.Name)
			if !ok || !cmp.Equal(got, c, cmpopts.EquateComparable(netip.Addr{})) {
				t.Fatalf("Cluster(%q) = %+v, %v; the View has %+v", c.Name, got, ok, c)
			}
			if got.EDSName != got.Name {
				t.Fatalf("cluster %q has EDS name %q", got.Name, got.EDSName)
			}
		}
		for _, h := range v.VirtualHosts {
			once("virtual host", h.Name)
			for _, d := range h.Domains {
				once("domain", d)
			}
			if h.Cluster == "" {
				continue
			}
			if !slices.ContainsFunc(v.Clusters, func(c Cluster) bool { return c.Name == h.Cluster }) {
				t.Fatalf("virtual host %q leads to cluster %q, which is not in the View", h.Name, h.Cluster)
			}
		}
	}
}

// What a cluster carries: SNI explicit and equal to the bare port, the identities of
// the service, the pod's primary address with weight, locality and metadata (I7).
func TestClusterContent(t *testing.T) {
	a := pod("a", "default/payments", "10.0.0.2", "8080*+ 9090~")
	a.Weight, a.Locality, a.Metadata = 7, model.Locality{Region: "r", Zone: "z"}, map[string]string{"version": "v1"}
	a.Addresses = append(a.Addresses, netip.MustParseAddr("fd00::2"))
	b := pod("b", "default/payments", "10.0.0.1", "8080*+ 9090+")
	b.Identity.Account = "payments-v2"
	e := newEngine(t, testConfig(), a, b)
	got, ok := e.Cluster("payments.aether.internal:9090")
	if !ok {
		t.Fatal("no cluster")
	}
	check(t, "cluster", got, Cluster{
		ID:       ClusterID{Service: key("default/payments"), Port: 9090},
		Name:     "payments.aether.internal:9090",
		EDSName:  "payments.aether.internal:9090",
		SNI:      "9090",
		Protocol: port.HTTP,
		Identities: []string{
			"spiffe://aether.internal/ns/default/sa/payments",
			"spiffe://aether.internal/ns/default/sa/payments-v2",
		},
		Endpoints: []ClusterEndpoint{
			{Addr: b.Addresses[0], Weight: 1, Health: model.Healthy, UID: "b"},
			{Addr: a.Addresses[0], Weight: 7, Health: model.Draining, UID: "a", Locality: a.Locality, Metadata: a.Metadata},
		},
	})
}

// XDS-06, XDS-17, XDS-18, XDS-27: a port's set is exactly the pods that list it and are
// healthy or draining there; XDS-36: the last one leaves an empty set, not a stale one.
func TestPortSets(t *testing.T) {
	e := newEngine(t, testConfig(),
		pod("a", "default/payments", "10.0.0.1", "8080*+"),
		pod("b", "default/payments", "10.0.0.2", "8080*+ 9090+"),
		pod("c", "default/payments", "10.0.0.3", "8080*~ 9090-"),
		pod("d", "default/payments", "10.0.0.4", "8080*- 9090~"))
	check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a b c~", "payments:9090 9090 http: b d~"})

	upsert(t, e, pod("b", "default/payments", "10.0.0.2", "8080*+ 9090-"))
	remove(e, "d")
	check(t, "after", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a b c~", "payments:9090 9090 http:"})
}

// XDS-19 and XDS-20: a port that comes with a new version is refused before the first
// pod that lists it, then has exactly the pods that do; a port that goes is symmetric,
// and the other ports never change.
func TestPortRollout(t *testing.T) {
	const svc, v1, v2 = "default/payments", "8080*+", "8080*+ 9090+"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", v1), pod("b", svc, "10.0.0.2", v1))
	if a := e.Resolve("payments.aether.internal:9090"); a.Kind != Tombstone {
		t.Errorf("before: %s", a.Kind)
	}
	upsert(t, e, pod("a", svc, "10.0.0.1", v2))
	changes := e.TakeDirty()
	if len(changes) != 1 || !changes[0].Shape || !slices.Equal(changes[0].Ports, []uint16{9090}) ||
		!slices.Equal(changes[0].Awakened, []string{"payments.aether.internal:9090"}) {
		t.Errorf("changes: %+v", changes)
	}
	check(t, "one of two", clusters(view(t, e, svc)), []string{"payments 8080 http: a b", "payments:9090 9090 http: a"})
	upsert(t, e, pod("b", svc, "10.0.0.2", v2))
	if changes := e.TakeDirty(); len(changes) != 1 || changes[0].Shape || changes[0].Clusters || !changes[0].Endpoints {
		t.Errorf("the second pod changes more than endpoints: %+v", changes)
	}
	check(t, "both", clusters(view(t, e, svc)), []string{"payments 8080 http: a b", "payments:9090 9090 http: a b"})
	upsert(t, e, pod("a", svc, "10.0.0.1", v1))
	check(t, "one left", clusters(view(t, e, svc)), []string{"payments 8080 http: a b", "payments:9090 9090 http: b"})
	upsert(t, e, pod("b", svc, "10.0.0.2", v1))
	check(t, "none left", clusters(view(t, e, svc)), []string{"payments 8080 http: a b"})
	if a := e.Resolve("payments.aether.internal:9090"); a.Kind != Tombstone || a.Service != key(svc) {
		t.Errorf("after: %+v", a)
	}
}

// XDS-12 and XDS-03: when a new pod has the address of a dead one whose record is still
// there, the new pod owns it, in whatever order the events come; when the newer goes
// first, the older has it back.
func TestSharedAddress(t *testing.T) {
	dead := pod("z-dead", "default/payments", "10.0.0.1", "8080*+")
	dead.Since = t0
	live := pod("a-live", "shop/ledger", "10.0.0.1", "8080*+")
	live.Since = t0.Add(time.Second)
	for _, order := range [][]model.Endpoint{{dead, live}, {live, dead}} {
		e := newEngine(t, testConfig(), order...)
		got, _ := e.Cluster("ledger.shop.aether.internal")
		if len(got.Endpoints) != 1 || got.Endpoints[0].UID != "a-live" ||
			!slices.Equal(got.Identities, []string{"spiffe://aether.internal/ns/shop/sa/ledger"}) {
			t.Errorf("the new pod's cluster: %+v", got)
		}
		if got, ok := e.Cluster("payments.aether.internal"); ok && len(got.Endpoints) != 0 {
			t.Errorf("the dead pod is still in its cluster: %+v", got)
		}
		remove(e, "a-live")
		got, _ = e.Cluster("payments.aether.internal")
		if len(got.Endpoints) != 1 || got.Endpoints[0].UID != "z-dead" {
			t.Errorf("the older record is not back: %+v", got)
		}
	}
	// The same within a service, and with a client that serves nothing as the new owner.
	live.Service, live.Identity.Namespace = key("default/payments"), "default"
	client := pod("client", "default/cron", "10.0.0.1", "")
	client.Since = t0.Add(time.Minute)
	for _, order := range [][]model.Endpoint{{dead, live, client}, {client, live, dead}, {live, client, dead}} {
		e := newEngine(t, testConfig(), order...)
		upsert(t, e, pod("other", "default/payments", "10.0.0.9", "8080*+"))
		check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: other"})
		remove(e, "client")
		check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a-live other"})
		if len(e.records) != 3 {
			t.Errorf("%d records", len(e.records))
		}
	}
	// Without times the UID decides, in any order.
	x, y := pod("x", "default/payments", "10.0.0.1", "8080*+"), pod("y", "default/payments", "10.0.0.1", "8080*+")
	for _, order := range [][]model.Endpoint{{x, y}, {y, x}} {
		check(t, "by UID", clusters(view(t, newEngine(t, testConfig(), order...), "default/payments")), []string{"payments 8080 http: y"})
	}
}

// Generations (contract 4.7, XDS-47): an older record or delete is ignored, a deleted
// record stays deleted for late updates, a re-created object is a higher generation.
func TestGenerations(t *testing.T) {
	const svc = "default/payments"
	at := func(generation uint64, ports string) model.Endpoint {
		p := pod("a", svc, "10.0.0.1", ports)
		p.Generation = generation
		return p
	}
	e := newEngine(t, testConfig(), pod("b", svc, "10.0.0.2", "8080*+"))
	do := func(p model.Endpoint) {
		t.Helper()
		if err := e.Upsert(p, t0); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, want ...string) {
		t.Helper()
		check(t, what, clusters(view(t, e, svc)), want)
	}
	do(at(5, "8080*+"))
	do(at(4, "8080*-"))
	do(at(5, "8080*-"))
	want("older and equal are ignored", "payments 8080 http: a b")
	e.Delete("a", 4, t0)
	want("older delete is ignored", "payments 8080 http: a b")
	e.Delete("a", 6, t0)
	do(at(6, "8080*+"))
	do(at(5, "8080*+"))
	want("deleted stays deleted", "payments 8080 http: b")
	e.Delete("c", 3, t0)
	p := at(3, "8080*+")
	p.UID = "c"
	do(p)
	want("a delete before its update", "payments 8080 http: b")
	do(at(7, "8080*+"))
	want("created again", "payments 8080 http: a b")

	e.Expire(t0.Add(time.Hour))
	if n := len(e.graves.generation); n != 0 {
		t.Errorf("%d deleted records are remembered for ever", n)
	}
}

// A record that cannot be projected is refused with the reason, and what was known of
// the pod stays. No workload can be pinned into another namespace's service (MESH-27).
func TestUpsertRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		spoil      func(*model.Endpoint)
	}{
		{"no UID", "it has no UID", func(p *model.Endpoint) { p.UID = "" }},
		{"service", `service "shop/A_b" is not two DNS labels`, func(p *model.Endpoint) { p.Service = key("shop/A_b") }},
		{"trust domain", `identity "spiffe:///ns/default/sa/payments" is incomplete`, func(p *model.Endpoint) { p.Identity.TrustDomain = "" }},
		{"account", `identity "spiffe://aether.internal/ns/default/sa/" is incomplete`, func(p *model.Endpoint) { p.Identity.Account = "" }},
		{"foreign identity", `identity "spiffe://aether.internal/ns/shop/sa/payments" is not of the service's namespace "default"`, func(p *model.Endpoint) { p.Identity.Namespace = "shop" }},
		{"no address", "it has no usable address", func(p *model.Endpoint) { p.Addresses = nil }},
		{"zone", "it has no usable address", func(p *model.Endpoint) { p.Addresses[0] = netip.MustParseAddr("fe80::1%eth0") }},
		{"weight 0", "weight 0 is not in 1-65535", func(p *model.Endpoint) { p.Weight = 0 }},
		{"weight", "weight 65536 is not in 1-65535", func(p *model.Endpoint) { p.Weight = 65536 }},
		{"port 0", "ports are not ascending from 1 at 0", func(p *model.Endpoint) { p.Ports[0].Number = 0 }},
		{"order", "ports are not ascending from 1 at 8080", func(p *model.Endpoint) { p.Ports = append(p.Ports, p.Ports[0]) }},
		{"default", "default port 9999 is not among its ports", func(p *model.Endpoint) { p.Default = 9999 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			good := pod("a", "default/payments", "10.0.0.1", "8080*+")
			e := newEngine(t, testConfig(), good)
			bad := pod("a", "default/payments", "10.0.0.1", "8080*+")
			bad.Generation = 2
			tt.spoil(&bad)
			err := e.Upsert(bad, t0)
			want := fmt.Sprintf("endpoint %q of %s: %s", bad.UID, bad.Service, tt.want)
			if err == nil || err.Error() != want {
				t.Errorf("got  %v\nwant %s", err, want)
			}
			check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a"})
			if c := e.TakeDirty(); len(c) != 0 {
				t.Errorf("changes: %+v", c)
			}
		})
	}
}

// A client that serves nothing is no service: no name, no address, no routes. When the
// last server becomes one, the service has no endpoint left.
func TestPureClient(t *testing.T) {
	e := newEngine(t, testConfig(), pod("cron", "default/cron", "10.0.0.1", ""))
	if _, ok := e.View(key("default/cron")); ok {
		t.Error("a client is a service")
	}
	if _, _, ok := e.LookUp("cron.aether.internal"); ok {
		t.Error("a client resolves")
	}
	upsert(t, e, pod("cron", "default/cron", "10.0.0.1", "8080*+"))
	check(t, "as a server", clusters(view(t, e, "default/cron")), []string{"cron 8080 http: cron"})
	upsert(t, e, pod("cron", "default/cron", "10.0.0.1", ""))
	check(t, "as a client again", clusters(view(t, e, "default/cron")), []string{"cron 8080 http:"})
	remove(e, "cron")
	e.Expire(t0.Add(time.Hour))
	rest(e)
	e.Expire(t0.Add(3 * time.Hour))
	if len(e.services) != 0 || len(e.records) != 0 || len(e.addrs.owner) != 0 || len(e.idle) != 0 {
		t.Errorf("something is left: %d services, %d records", len(e.services), len(e.records))
	}
}

// A pod that moves to another service, or to another address, is in one place only.
func TestPodMoves(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/payments", "10.0.0.1", "8080*+"), pod("b", "shop/ledger", "10.0.0.2", "8080*+"))
	upsert(t, e, pod("a", "shop/ledger", "10.0.0.1", "8080*+"))
	check(t, "left", clusters(view(t, e, "default/payments")), []string{"payments 8080 http:"})
	check(t, "joined", clusters(view(t, e, "shop/ledger")), []string{"ledger.shop 8080 http: a b"})
	upsert(t, e, pod("a", "shop/ledger", "10.0.0.3", "8080*+"))
	c, _ := e.Cluster("ledger.shop.aether.internal")
	if len(c.Endpoints) != 2 || c.Endpoints[1].Addr != netip.MustParseAddr("10.0.0.3") {
		t.Errorf("moved: %+v", c.Endpoints)
	}
	if len(e.addrs.owner) != 2 {
		t.Errorf("%d addresses", len(e.addrs.owner))
	}
}

// MESH-50: one record is one pod in every view at once; a change of it reaches all its
// ports in one settling.
func TestPromotionIsAtomic(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/payments", "10.0.0.1", "5432=tcp- 8080*- 9090-"))
	upsert(t, e, pod("a", "default/payments", "10.0.0.1", "5432=tcp+ 8080*+ 9090+"))
	changes := e.TakeDirty()
	if len(changes) != 1 || !slices.Equal(changes[0].Ports, []uint16{5432, 8080, 9090}) || changes[0].Shape || changes[0].Clusters {
		t.Errorf("changes: %+v", changes)
	}
	for _, c := range view(t, e, "default/payments").Clusters {
		if len(c.Endpoints) != 1 {
			t.Errorf("cluster %s has %d endpoints", c.Name, len(c.Endpoints))
		}
	}
}

// Config.Validate names the setting and the remedy.
func TestConfigValidate(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		spoil      func(*Config)
	}{
		{"good", "", func(*Config) {}},
		{"no flat namespaces", "", func(c *Config) { c.FlatNamespaces = nil }},
		{"domain", "mesh domain is empty; use a name such as aether.internal", func(c *Config) { c.Domain = "" }},
		{"flat", `flat namespace "A" is no DNS label`, func(c *Config) { c.FlatNamespaces = []string{"A"} }},
		{"flat twice", `flat namespace "a" is listed twice; list each once, the first wins`, func(c *Config) { c.FlatNamespaces = []string{"a", "b", "a"} }},
		{"v4", "virtual IPv4 range invalid Prefix is no IPv4 prefix; use one such as 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.Prefix{} }},
		{"v4 is v6", "virtual IPv4 range fd00::/64 is no IPv4 prefix; use one such as 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.MustParsePrefix("fd00::/64") }},
		{"v4 small", "virtual IPv4 range 198.18.0.0/31: the prefix length must be 8 to 30", func(c *Config) { c.VIP4 = netip.MustParsePrefix("198.18.0.0/31") }},
		{"v4 large", "virtual IPv4 range 0.0.0.0/7: the prefix length must be 8 to 30", func(c *Config) { c.VIP4 = netip.MustParsePrefix("0.0.0.0/7") }},
		{"v6", "virtual IPv6 range 10.0.0.0/8 is no IPv6 prefix; use one such as fd70:6f72:746f::/64", func(c *Config) { c.VIP6 = netip.MustParsePrefix("10.0.0.0/8") }},
		{"v6 small", "virtual IPv6 range fd00::/112 is smaller than the IPv4 range 198.18.0.0/15", func(c *Config) { c.VIP6 = netip.MustParsePrefix("fd00::/112") }},
		{"v4 bits", "virtual range 198.18.0.1/15 has bits set behind its prefix; use 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.MustParsePrefix("198.18.0.1/15") }},
		{"cap", "cap of 0 unknown names; it must be at least 1", func(c *Config) { c.UnknownCap = 0 }},
		{"retention", "retention of 0s; it must be longer than 0", func(c *Config) { c.Retention = 0 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig()
			tt.spoil(&cfg)
			err := cfg.Validate()
			if got := fmt.Sprint(err); got != tt.want && (tt.want != "" || err != nil) {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if _, newErr := New(cfg, nil, t0); (newErr == nil) != (err == nil) {
				t.Errorf("New: %v", newErr)
			}
		})
	}
}
