package projection

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// tinyRanges have six addresses.
func tinyRanges() Config {
	cfg := testConfig()
	cfg.VIP4, cfg.VIP6 = netip.MustParsePrefix("198.18.0.8/29"), netip.MustParsePrefix("fd00::40/122")
	return cfg
}

// Dataplane decision 8: one address per service and family, the same host part, never
// the first or last of the range, nobody else's; a hash of the key, so the same without
// anything saved and in any order.
func TestVIPs(t *testing.T) {
	const n = 2000
	a, b := newEngine(t, testConfig()), newEngine(t, testConfig())
	name := func(i int) string { return fmt.Sprintf("ns/s%d", i) }
	addr := func(i int) string { return fmt.Sprintf("10.0.%d.%d", i/250, i%250) }
	for i := range n {
		upsert(t, a, pod(name(i), name(i), addr(i), "8080*+"))
		j := n - 1 - i
		upsert(t, b, pod(name(j), name(j), addr(j), "8080*+"))
	}
	seen := map[netip.Addr]bool{}
	for i := range n {
		va, vb := view(t, a, name(i)), view(t, b, name(i))
		if va.VIP4 != vb.VIP4 || va.VIP6 != vb.VIP6 {
			t.Fatalf("%s: %s in one order, %s in the other", name(i), va.VIP4, vb.VIP4)
		}
		if !a.cfg.VIP4.Contains(va.VIP4) || !a.cfg.VIP6.Contains(va.VIP6) || seen[va.VIP4] || seen[va.VIP6] {
			t.Fatalf("%s: %s %s", name(i), va.VIP4, va.VIP6)
		}
		seen[va.VIP4], seen[va.VIP6] = true, true
		o4, _ := a.vips.offset(va.VIP4)
		o6, _ := a.vips.offset(va.VIP6)
		if o4 != o6 || o4 < 1 || o4 > 1<<17-2 {
			t.Fatalf("%s: host parts %d and %d", name(i), o4, o6)
		}
	}
	// A change of the hash would give every service another address after an upgrade.
	if got := view(t, a, "ns/s7").VIP4.String(); got != "198.18.185.46" {
		t.Errorf("the address of ns/s7 is %s now", got)
	}
}

// A small range is used up to its last address; the next service has none and says so,
// and gets one when there is. Addresses of the forgotten are kept for them, and given to
// others only if no fresh one is left and nobody alive can have resolved them.
func TestVIPReuse(t *testing.T) {
	e := newEngine(t, tinyRanges())
	have := map[netip.Addr]string{}
	for i := range 6 {
		s := fmt.Sprintf("ns/s%d", i)
		upsert(t, e, pod(s, s, fmt.Sprintf("10.0.0.%d", i+1), "5432=tcp+ 8080*+"))
		v := view(t, e, s)
		if other := have[v.VIP4]; other != "" || !v.VIP4.IsValid() {
			t.Fatalf("%s has the address of %q: %s", s, other, v.VIP4)
		}
		have[v.VIP4] = s
	}
	for _, a := range []string{"198.18.0.8", "198.18.0.15"} {
		if have[netip.MustParseAddr(a)] != "" {
			t.Errorf("%s was given", a)
		}
	}
	forget := func(at time.Time, uid string) {
		t.Helper()
		e.Delete(uid, 1, at)
		e.Expire(at.Add(DefaultRetention))
		rest(e)
	}
	was := view(t, e, "ns/s2").VIP4
	t1 := t0.Add(time.Hour)
	forget(t1, "ns/s2")
	released := t1.Add(DefaultRetention)

	upsert(t, e, pod("new", "ns/new", "10.0.1.1", "5432=tcp+ 8080*+"))
	v := view(t, e, "ns/new")
	check(t, "conflicts", v.Conflicts, []string{"no virtual address is left in 198.18.0.8/29; use a larger range"})
	check(t, "HTTP works without", hosts(v)[0], "new.ns new.ns:8080 -> new.ns")
	if len(v.Clusters) != 1 {
		t.Errorf("clusters of a service without address: %v", clusters(v))
	}
	if _, _, ok := e.LookUp("new.ns.aether.internal"); ok {
		t.Error("DNS answers without an address")
	}
	e.Reusable(released) // a pod lives that started when it was released: it may know it
	if v := view(t, e, "ns/new"); v.VIP4.IsValid() {
		t.Errorf("%s was given while a pod that resolved it lives", v.VIP4)
	}
	e.TakeDirty()
	e.Reusable(released.Add(time.Nanosecond))
	changes := e.TakeDirty()
	if len(changes) != 2 || !changes[0].Shape || changes[1].Service != key("ns/s2") || !changes[1].Entry {
		t.Errorf("changes: %+v", changes)
	}
	check(t, "address", view(t, e, "ns/new").VIP4, was)
	if _, ok := e.Entry(key("ns/s2")); ok {
		t.Error("the forgotten service still has an entry")
	}

	// Its own comes back to a service while it is free; a fresh one is preferred.
	was = view(t, e, "ns/s3").VIP4
	forget(t1.Add(time.Hour), "ns/s3")
	forget(t1.Add(2*time.Hour), "ns/s4")
	e.Reusable(t1.Add(24 * time.Hour))
	upsert(t, e, pod("x", "ns/s3", "10.0.1.2", "8080*+"))
	check(t, "own address", view(t, e, "ns/s3").VIP4, was)
	delete(e.vips.slots, e.vips.byKey[key("ns/s5")]) // as if it had never been given
	fresh, _ := e.vips.addrs(key("ns/s5"))
	upsert(t, e, pod("y", "ns/y", "10.0.1.3", "8080*+"))
	check(t, "fresh address", view(t, e, "ns/y").VIP4, fresh)
}

// The address table of a forgotten service does not answer any more, and its names and
// addresses lead nowhere.
func TestForgotten(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "5432=tcp+ 8080*+"))
	v := view(t, e, "default/s")
	remove(e, "a")
	if next := e.Expire(t0); !next.Equal(t0.Add(DefaultRetention)) {
		t.Errorf("next is %s", next)
	}
	changes := e.TakeDirty()
	if len(changes) != 1 || changes[0].Shape || changes[0].Clusters || !changes[0].Entry || !changes[0].Endpoints {
		t.Errorf("the last endpoint changes more than endpoints: %+v", changes)
	}
	kept := view(t, e, "default/s")
	check(t, "routes stay", hosts(kept), hosts(v))
	check(t, "clusters are empty", len(kept.Clusters[0].Endpoints), 0)

	e.Expire(t0.Add(DefaultRetention))
	leaving := view(t, e, "default/s")
	check(t, "step", leaving.Step, Leaving)
	check(t, "await", leaving.Await, []Await{
		{Kind: AwaitRoutes},
		{Kind: AwaitClusters, Name: "s.aether.internal"},
		{Kind: AwaitClusters, Name: "s.default.aether.internal"},
	})
	if len(leaving.VirtualHosts) != 0 || len(leaving.Clusters) != 0 || len(leaving.Spellings) != 0 {
		t.Errorf("leaving: %+v", leaving)
	}
	if a := e.Resolve("s.aether.internal"); a.Kind != Tombstone || a.Service != key("default/s") {
		t.Errorf("leaving: %+v; its later Changes must concern the name", a)
	}
	if c := e.TakeDirty(); len(c) != 1 || !c[0].Shape || c[0].Gone {
		t.Errorf("changes: %+v", c)
	}
	advance(t, e, "default/s")
	if c := e.TakeDirty(); len(c) != 1 || !c[0].Gone || !c[0].Shape || !c[0].Entry {
		t.Errorf("changes: %+v", c)
	}
	for _, name := range []string{"s.aether.internal", v.VIP4.String() + ":5432"} {
		if a := e.Resolve(name); a.Kind != Tombstone || a.Service != (model.ServiceKey{}) {
			t.Errorf("%s: %+v", name, a)
		}
	}
	if len(e.services) != 0 || len(e.flats) != 0 || len(e.idle) != 0 {
		t.Errorf("%d services, %d flat names, %d idle", len(e.services), len(e.flats), len(e.idle))
	}
}

// A service that comes back while it leaves is what it was, so a new default port goes
// through the steps and does not meet its own old routes.
func TestBackWhileLeaving(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "8080*+"))
	remove(e, "a")
	e.Expire(t0.Add(DefaultRetention))
	token := view(t, e, "default/s").Token
	upsert(t, e, pod("b", "default/s", "10.0.0.2", "8080+ 9090*+"))
	if e.Advance(key("default/s"), token) {
		t.Error("it is forgotten although it is back")
	}
	v := view(t, e, "default/s")
	check(t, "step", v.Step, Splitting)
	check(t, "committed", v.Committed, 8080)
}
