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
func newEngine(tb testing.TB, cfg Config, pods ...model.Endpoint) *Engine {
	tb.Helper()
	e, err := New(cfg, nil, t0)
	if err != nil {
		tb.Fatal(err)
	}
	e.Synced()
	upsert(tb, e, pods...)
	e.TakeDirty()
	return e
}

// upsert gives the engine pods, each newer than what it knows of them.
func upsert(tb testing.TB, e *Engine, pods ...model.Endpoint) {
	tb.Helper()
	for _, p := range pods {
		if r := e.records[p.UID]; r != nil && p.Generation <= r.generation {
			p.Generation = r.generation + 1
		}
		if err := e.Upsert(p, e.now); err != nil {
			tb.Fatal(err)
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
	for field := range strings.FieldsSeq(ports) {
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
func view(tb testing.TB, e *Engine, service string) View {
	tb.Helper()
	v, ok := e.View(key(service))
	if !ok {
		tb.Fatalf("service %s is not known", service)
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
func check[T any](tb testing.TB, what string, got, want T) {
	tb.Helper()
	if reflect.DeepEqual(got, want) {
		return // cmp is slow
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		tb.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// advance takes the step that the service awaits.
func advance(tb testing.TB, e *Engine, service string) {
	tb.Helper()
	if v := view(tb, e, service); !e.Advance(key(service), v.Token) {
		tb.Fatalf("%s does not advance from %s", service, v.Step)
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
