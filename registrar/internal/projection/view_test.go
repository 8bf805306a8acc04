package projection

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

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
func checkReferences(tb testing.TB, e *Engine) {
	tb.Helper()
	seen := map[string]bool{}
	once := func(what, name string) {
		if seen[what+name] {
			tb.Fatalf("%s %q is there twice", what, name)
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
				tb.Fatalf("Cluster(%q) = %+v, %v; the View has %+v", c.Name, got, ok, c)
			}
			if got.EDSName != got.Name {
				tb.Fatalf("cluster %q has EDS name %q", got.Name, got.EDSName)
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
				tb.Fatalf("virtual host %q leads to cluster %q, which is not in the View", h.Name, h.Cluster)
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

// route returns where the route table of all Views leads an authority of the mesh's form:
// a cluster, "refuse", or "on demand" for a name that the table does not have.
func route(e *Engine, authority string) string {
	envoy := newSimEnvoy()
	for k := range e.Services() {
		v, _ := e.Shape(k)
		for _, h := range v.VirtualHosts {
			for _, d := range h.Domains {
				envoy.routes[d] = h.Cluster
			}
		}
	}
	cluster, ok := envoy.route(authority)
	switch {
	case !ok:
		return "refuse"
	case envoy.routes[authority] == "":
		return "on demand"
	}
	return cluster
}

// The table of contract 2, as far as the route table decides it: payments serves 8080
// (default), 9090 and 5432=tcp. Nothing that a service does not serve reaches Envoy's
// catch-all, so it asks nobody (XDS-17, MESH-3, MESH-4, MESH-5).
func TestAddressing(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/payments", "10.0.0.1", "5432=tcp+ 8080*+ 9090=h2+"), pod("b", "shop/ledger", "10.0.0.2", "8080*+"))
	for _, tt := range []struct{ authority, want string }{
		{"payments", "payments"},
		{"payments:8080", "payments"},
		{"payments.default", "payments"},
		{"payments.default:8080", "payments"},
		{"payments:9090", "payments:9090"},
		{"payments.default:9090", "payments:9090"},
		{"payments:5432", "refuse"},
		{"payments.default:5432", "refuse"},
		{"payments:7777", "refuse"},
		{"payments.default:7777", "refuse"},
		{"ledger.shop", "ledger.shop"},
		{"ledger.shop:8080", "ledger.shop"},
		{"ledger.shop:9090", "refuse"},
		{"ledger", "on demand"},
		{"ghost", "on demand"},
		{"ghost:9090", "on demand"},
		{"payments.shop", "on demand"},
	} {
		host, number, hasPort := strings.Cut(tt.authority, ":")
		host += "." + domain
		if hasPort {
			host += ":" + number
		}
		if got := strings.ReplaceAll(route(e, host), "."+domain, ""); got != tt.want {
			t.Errorf("%s leads to %q, want %q", tt.authority, got, tt.want)
		}
	}
}

// I3: a single-port service is the same whether or not others are multi-port, and its
// pods carry nothing of other services.
func TestSinglePortIsUntouched(t *testing.T) {
	single := pod("a", "default/single", "10.0.0.1", "8080*+")
	alone := newEngine(t, testConfig(), single)
	among := newEngine(t, testConfig(), single, pod("b", "default/multi", "10.0.0.2", "5432=tcp+ 8080*+ 9090=h2+"), pod("c", "shop/single", "10.0.0.3", "9090*+ 9100+"))
	upsert(t, among, pod("b", "default/multi", "10.0.0.2", "5432=tcp+ 8080+ 9090=h2*+"))
	check(t, "view", view(t, among, "default/single"), view(t, alone, "default/single"))
}

// I4 and MESH-16: pods that come and go change no bytes of any cluster, except the first
// one with a new account, whose identity then stays; nor do their health and weight.
func TestPodsChangeNoCluster(t *testing.T) {
	const svc = "default/s"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "5432=tcp+ 8080*+ 9090+"))
	want, _ := e.Shape(key(svc))
	same := func(what string) {
		t.Helper()
		for _, c := range e.TakeDirty() {
			if c.Shape || c.Clusters {
				t.Errorf("%s: %+v", what, c)
			}
		}
		got, _ := e.Shape(key(svc))
		check(t, what, got.Clusters, want.Clusters)
		check(t, what, got.VirtualHosts, want.VirtualHosts)
	}
	upsert(t, e, pod("b", svc, "10.0.0.2", "5432=tcp+ 8080*+ 9090+"))
	same("one pod more")
	weighted := pod("b", svc, "10.0.0.2", "5432=tcp- 8080*~ 9090+")
	weighted.Weight = 100
	upsert(t, e, weighted)
	same("health and weight")
	remove(e, "b")
	same("one pod less")
	other := pod("c", svc, "10.0.0.3", "5432=tcp+ 8080*+ 9090+")
	other.Identity.Account = "other"
	upsert(t, e, other)
	if c := e.TakeDirty(); len(c) != 1 || !c[0].Clusters || c[0].Shape || !c[0].Entry {
		t.Errorf("a new account: %+v", c)
	}
	want, _ = e.Shape(key(svc))
	check(t, "identities", want.Clusters[0].Identities, []string{"spiffe://aether.internal/ns/default/sa/other", "spiffe://aether.internal/ns/default/sa/s"})
	remove(e, "c", "a")
	same("the last pods")
}

// MESH-15: 256 looks at the same state are equal, whatever order maps have.
func TestViewsAreStable(t *testing.T) {
	e := newEngine(t, testConfig())
	for i := range 20 {
		p := pod(strconv.Itoa(i), "default/s", fmt.Sprintf("10.0.0.%d", 20-i), []string{"8080*+ 9090+", "5432=tcp+ 8080*~", "7000*+ 9090=h2+"}[i%3])
		p.Identity.Account = fmt.Sprint("account", i%5)
		upsert(t, e, p)
	}
	for _, name := range []string{"s.aether.internal:8080", "S.aether.internal:9090", "s.default.aether.internal"} {
		e.Resolve(name)
	}
	want := view(t, e, "default/s")
	for range 256 {
		check(t, "view", view(t, e, "default/s"), want)
	}
}
