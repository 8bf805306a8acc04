package projection

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// XDS-R28: the kinds of answers, the same on the first and on every later request
// (XDS-17, MESH-4); a refused name is not remembered; XDS-71: no internal name is ours.
func TestResolve(t *testing.T) {
	const svc = "default/payments"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "5432=tcp+ 8080*+ 9090=h2+"), pod("b", "shop/ledger", "10.0.0.2", "8080*+"))
	v := view(t, e, svc)
	for _, tt := range []struct {
		name, want, service string
		asked               int // how many names this one adds
	}{
		{"payments.aether.internal", "real", svc, 0},
		{"payments.aether.internal:9090", "real", svc, 0},
		{"ledger.shop.aether.internal", "real", "shop/ledger", 0},
		{v.VIP4.String() + ":5432", "real", svc, 0},
		{"[" + v.VIP6.String() + "]:5432", "real", svc, 0},
		// Other spellings of something served: the exception of I2.
		{"payments.aether.internal:8080", "real", svc, 1},
		{"payments.default.aether.internal", "real", svc, 1},
		{"payments.default.aether.internal:8080", "real", svc, 1},
		{"payments.default.aether.internal:9090", "real", svc, 1},
		{"PAYMENTS.aether.internal:9090", "real", svc, 1},
		{"payments.aether.internal.", "real", svc, 1},
		{"ledger.shop.aether.internal:8080", "real", "shop/ledger", 1},
		// Known service, unserved port; a tcp port is not served to HTTP.
		{"payments.aether.internal:7777", "tombstone", svc, 1},
		{"payments.aether.internal:5432", "tombstone", svc, 1},
		{v.VIP4.String() + ":8080", "tombstone", svc, 1},
		{"[" + v.VIP6.String() + "]:1", "tombstone", svc, 1},
		// Unknown services and addresses.
		{"ghost.aether.internal", "tombstone", "/", 1},
		{"ghost.aether.internal:9090", "tombstone", "/", 1},
		{"ledger.aether.internal", "tombstone", "/", 1}, // shop is not flat
		{"payments.shop.aether.internal", "tombstone", "/", 1},
		{"198.18.0.1:5432", "tombstone", "/", 1},
		{"[fd70:6f72:746f::2]:5432", "tombstone", "/", 1},
		// Nothing of ours.
		{"evil.com", "refused", "/", 0},
		{"xds_cluster", "refused", "/", 0},
		{"health_pod", "refused", "/", 0},
		{"", "refused", "/", 0},
		{"payments.aether.internal:0", "refused", "/", 0},
		{"payments.aether.internal:08080", "refused", "/", 0},
		{"payments.aether.internal:65536", "refused", "/", 0},
		{"payments.aether.internal:*", "refused", "/", 0},
		{"pod-0.payments.default.aether.internal", "refused", "/", 0}, // XDS-70
		{"10.0.0.1:15008", "refused", "/", 0},
		{"198.18.0.1:0", "refused", "/", 0},
		{"198.18.0.1", "refused", "/", 0},
		{"198.18.0.1:05432", "refused", "/", 0},
		{"[::ffff:198.18.0.1]:5432", "refused", "/", 0},
		{"[fd70:6f72:746f:0::2]:5432", "refused", "/", 0},
		{"[fd70:6f72:746f::2%lo]:5432", "refused", "/", 0},
		{"[fd70:6f72:746f::ffff:0:2]:5432", "tombstone", "/", 1}, // in the range, but never given
	} {
		for turn := range 2 {
			before := e.Asked()
			a := e.Resolve(tt.name)
			if a.Kind.String() != tt.want || a.Service.String() != tt.service {
				t.Errorf("%q, turn %d: %s of %s, want %s of %s", tt.name, turn, a.Kind, a.Service, tt.want, tt.service)
			}
			if got := e.Asked() - before; got != tt.asked*(1-turn) {
				t.Errorf("%q, turn %d: %d names remembered more", tt.name, turn, got)
			}
			if a.Kind != Real {
				continue
			}
			// XDS-R27 and XDS-D6: the name byte for byte, and an EDS name of its own.
			if a.Cluster.Name != tt.name || a.Cluster.EDSName != tt.name || len(a.Cluster.Endpoints) != 1 {
				t.Errorf("%q: cluster %+v", tt.name, a.Cluster)
			}
		}
	}
	checkReferences(t, e)
}

// An alias means what its spelling says: the default port's has the default port's SNI.
// It is part of the Views from then on, follows the service, and needs to be asked for
// once more only when no Envoy has it (dataplane 5.4, MESH-3).
func TestAliases(t *testing.T) {
	const svc, alias8080, long = "default/s", "s.aether.internal:8080", "s.default.aether.internal"
	e := changeDefault(t)
	e2 := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "8080*+"))
	if _, ok := e2.Cluster(alias8080); ok {
		t.Error("an alias that nobody asked for is a cluster")
	}
	e2.Resolve(alias8080)
	e2.Resolve(long)
	check(t, "clusters", clusters(view(t, e2, svc)), []string{"s 8080 http: a", "s:8080 8080 http: a", "s.default 8080 http: a"})
	upsert(t, e2, pod("b", svc, "10.0.0.2", "8080*+"))
	check(t, "clusters", clusters(view(t, e2, svc)), []string{"s 8080 http: a b", "s:8080 8080 http: a b", "s.default 8080 http: a b"})
	e2.Forget(alias8080)
	check(t, "clusters", clusters(view(t, e2, svc)), []string{"s 8080 http: a b", "s.default 8080 http: a b"})

	// In a change of the default port: the portless alias moves with F, the alias of the
	// old default becomes a cluster's own name, and the one of the new default goes.
	e.Resolve(long)
	rest(e)
	check(t, "clusters", clusters(view(t, e, svc)), []string{"s 9090 http: a b c", "s:8080 8080 http: a b c", "s.default 9090 http: a b c"})
}

// A name that was nobody's is named by the Change of the service whose it becomes,
// whatever its spelling, and once only; and it falls asleep again with the service.
func TestAwakened(t *testing.T) {
	e := newEngine(t, testConfig())
	names := []string{"s.aether.internal", "s.aether.internal:8080", "S.aether.internal:9090", "s.aether.internal:9090", "s.default.aether.internal:8080"}
	for _, n := range names {
		if a := e.Resolve(n); a.Kind != Tombstone {
			t.Fatalf("%s: %s", n, a.Kind)
		}
	}
	e.Resolve("other.aether.internal")
	unserved := "s.aether.internal:7777"
	e.Resolve(unserved)
	upsert(t, e, pod("a", "default/s", "10.0.0.1", "5432=tcp+ 8080*+ 9090+"))
	tcp := view(t, e, "default/s").VIP4.String() + ":5432"
	changes := e.TakeDirty()
	if len(changes) != 1 {
		t.Fatalf("changes: %+v", changes)
	}
	check(t, "awakened", changes[0].Awakened, slices.Sorted(slices.Values(append(names, unserved))))
	// Canonical names are nobody's business any more; aliases are remembered.
	check(t, "asked", e.Asked(), 5)
	for _, n := range names {
		if _, ok := e.Cluster(n); !ok {
			t.Errorf("%s is no cluster", n)
		}
	}
	upsert(t, e, pod("b", "default/s", "10.0.0.2", "5432=tcp+ 8080*+ 9090+"))
	if c := e.TakeDirty(); len(c) != 1 || len(c[0].Awakened) != 0 {
		t.Errorf("awakened twice: %+v", c)
	}
	remove(e, "a", "b")
	e.Expire(t0.Add(DefaultRetention))
	rest(e)
	e.TakeDirty()
	for _, n := range append(names, tcp) {
		if a := e.Resolve(n); a.Kind != Tombstone {
			t.Errorf("%s after the service: %s", n, a.Kind)
		}
	}
	upsert(t, e, pod("a", "default/s", "10.0.0.1", "5432=tcp+ 8080*+ 9090+"))
	changes = e.TakeDirty()
	check(t, "awakened again", changes[0].Awakened, slices.Sorted(slices.Values(append(names, unserved, tcp))))
}

// I9: names that lead nowhere are remembered up to the cap, and no further ones grow
// anything; what is served is answered all the same; a fresh Envoy starts from none.
func TestUnknownCap(t *testing.T) {
	cfg := testConfig()
	cfg.UnknownCap = 10
	e := newEngine(t, cfg, pod("a", "default/s", "10.0.0.1", "8080*+ 9090+"))
	for i := range 1000 {
		want := Tombstone
		if i >= 10 {
			want = Refused
		}
		if a := e.Resolve(fmt.Sprintf("ghost%d.aether.internal", i)); a.Kind != want {
			t.Fatalf("name %d: %s", i, a.Kind)
		}
		if e.AtCap() != (i >= 9) {
			t.Fatalf("after name %d: AtCap is %v", i, e.AtCap())
		}
	}
	if e.Asked() != 10 || len(e.asked.byBase) != 10 {
		t.Errorf("%d names, %d bases", e.Asked(), len(e.asked.byBase))
	}
	// Spellings in capitals are without end too.
	if a := e.Resolve("S.aether.internal"); a.Kind != Refused {
		t.Errorf("alias at the cap: %s", a.Kind)
	}
	for _, n := range []string{"s.aether.internal", "s.aether.internal:9090"} {
		if a := e.Resolve(n); a.Kind != Real {
			t.Errorf("%s at the cap: %s", n, a.Kind)
		}
	}
	if a := e.Resolve("ghost3.aether.internal"); a.Kind != Tombstone {
		t.Errorf("a remembered name at the cap: %s", a.Kind)
	}
	// A name that becomes real makes room.
	upsert(t, e, pod("g", "default/ghost3", "10.0.0.3", "8080*+"))
	e.TakeDirty()
	if e.AtCap() {
		t.Error("still at the cap")
	}
	for i := range 10 {
		e.Forget(fmt.Sprintf("ghost%d.aether.internal", i))
	}
	if e.Asked() != 0 || len(e.asked.byBase) != 0 {
		t.Error("names are left that nobody has")
	}
}

// DNS (contract 2): both spellings of a known service in any case, with or without a
// trailing dot, also while it has no endpoint; nothing else. AAAA has the same host part.
func TestLookUp(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/payments", "10.0.0.1", "8080*+"), pod("b", "shop/ledger", "10.0.0.2", "5432=tcp*+"))
	for _, tt := range []struct{ name, service string }{
		{"payments.aether.internal", "default/payments"},
		{"Payments.Aether.internal.", "default/payments"},
		{"payments.default.aether.internal", "default/payments"},
		{"ledger.shop.aether.internal", "shop/ledger"},
		{"ledger.aether.internal", ""},
		{"ghost.aether.internal", ""},
		{"payments.aether.internal:8080", ""},
		{"a.payments.default.aether.internal", ""},
		{"aether.internal", ""},
		{"evil.com", ""},
		{"", ""},
	} {
		v4, v6, ok := e.LookUp(tt.name)
		if ok != (tt.service != "") {
			t.Errorf("%q: %v", tt.name, ok)
			continue
		}
		if ok {
			v := view(t, e, tt.service)
			if v4 != v.VIP4 || v6 != v.VIP6 {
				t.Errorf("%q: %s %s", tt.name, v4, v6)
			}
		}
	}
	remove(e, "a")
	if _, _, ok := e.LookUp("payments.aether.internal"); !ok {
		t.Error("a retained service does not resolve")
	}
	e.Expire(t0.Add(DefaultRetention))
	if _, _, ok := e.LookUp("payments.aether.internal"); ok {
		t.Error("a service that leaves resolves")
	}
}

// config.aether.io/upstreams: the HTTP clusters of what the name means, the ones of the
// pod's own namespace if the short name is nobody's, and none of a tcp port.
func TestUpstreamClusters(t *testing.T) {
	e := newEngine(t, testConfig(),
		pod("a", "default/payments", "10.0.0.1", "5432=tcp+ 8080*+ 9090+"),
		pod("b", "shop/payments", "10.0.0.2", "8080*+"),
		pod("c", "shop/ledger", "10.0.0.3", "8080*+"),
		pod("d", "shop/db", "10.0.0.4", "5432=tcp*+"))
	for _, tt := range []struct {
		ref, from string
		want      []string
	}{
		{"payments", "shop", []string{"payments.aether.internal", "payments.aether.internal:9090"}},
		{"payments.shop", "default", []string{"payments.shop.aether.internal"}},
		{"ledger", "shop", []string{"ledger.shop.aether.internal"}},
		{"ledger", "default", nil},
		{"db", "shop", nil},
		{"ghost", "shop", nil},
		{"a.b.c", "shop", nil},
		{"", "shop", nil},
		{"payments:9090", "shop", nil},
	} {
		check(t, tt.ref+" from "+tt.from, e.UpstreamClusters(tt.ref, tt.from), tt.want)
	}
	// A change of the default port does not name clusters that are there for a moment.
	upsert(t, e, pod("a", "default/payments", "10.0.0.1", "5432=tcp+ 8080+ 9090*+"))
	check(t, "splitting", e.UpstreamClusters("payments", "shop"), []string{"payments.aether.internal", "payments.aether.internal:9090"})
	rest(e)
	check(t, "changed", e.UpstreamClusters("payments", "shop"), []string{"payments.aether.internal", "payments.aether.internal:8080"})
}

// Resolve never fails on what an application can send, remembers no more than the cap,
// answers twice the same, and never gives a cluster for another port than the name says.
func FuzzResolve(f *testing.F) {
	for _, s := range []string{
		"s.aether.internal", "s.aether.internal:9090", "S.DEFAULT.aether.internal.:8080", "198.19.3.4:5432",
		"[fd70:6f72:746f::1]:5432", "evil.com", "s.aether.internal:*", ":", "", "\xff.aether.internal", "a.b.c.aether.internal:1",
	} {
		f.Add(s)
	}
	cfg := testConfig()
	cfg.UnknownCap = 16
	e := newEngine(f, cfg, pod("a", "default/s", "10.0.0.1", "5432=tcp+ 8080*+ 9090+"), pod("b", "shop/t", "10.0.0.2", "8080*+"))
	f.Fuzz(func(t *testing.T, name string) {
		a := e.Resolve(name)
		if b := e.Resolve(name); b.Kind != a.Kind || b.Service != a.Service {
			t.Errorf("%q: %v, then %v", name, a, b)
		}
		if e.Asked() > cfg.UnknownCap {
			t.Errorf("%d names are remembered", e.Asked())
		}
		if a.Kind != Real {
			return
		}
		if a.Cluster.Name != name || a.Cluster.EDSName != name {
			t.Errorf("%q: cluster %q", name, a.Cluster.Name)
		}
		i := strings.LastIndexByte(name, ':')
		if i < 0 && a.Cluster.SNI != "8080" {
			t.Errorf("%q: SNI %q", name, a.Cluster.SNI)
		}
		sni, _, _ := strings.Cut(a.Cluster.SNI, ".")
		if i >= 0 && name[i+1:] != sni {
			t.Errorf("%q: SNI %q", name, a.Cluster.SNI)
		}
	})
}
