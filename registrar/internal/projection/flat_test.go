package projection

import (
	"testing"
	"time"
)

// twoFlat has two flat namespaces; the first listed wins.
func twoFlat() Config {
	cfg := testConfig()
	cfg.FlatNamespaces = []string{"default", "shop"}
	return cfg
}

// Contract 2: the first listed flat namespace gets the one-label name, in any order of
// arrival; the other service has its long name only, and says so.
func TestFlatNameConflict(t *testing.T) {
	a, b := pod("a", "default/x", "10.0.0.1", "8080*+"), pod("b", "shop/x", "10.0.0.2", "9090*+")
	e1 := newEngine(t, twoFlat(), a, b)
	e2 := newEngine(t, twoFlat(), b, a)
	for _, e := range []*Engine{e1, e2} {
		check(t, "winner", hosts(view(t, e, "default/x")), []string{"x x:8080 x.default x.default:8080 -> x", "x:* x.default:* -> refuse"})
		v := view(t, e, "shop/x")
		check(t, "loser", hosts(v), []string{"x.shop x.shop:9090 -> x.shop", "x.shop:* -> refuse"})
		check(t, "loser's names", v.Spellings, []string{"x.shop.aether.internal"})
		check(t, "conflicts", v.Conflicts, []string{"name x.aether.internal belongs to service default/x, whose namespace is listed before"})
		checkReferences(t, e)
		v4, _, _ := e.LookUp("x.aether.internal")
		check(t, "DNS", v4, view(t, e, "default/x").VIP4)
	}
}

// flatSteps is one expected stage of a name that goes over.
type flatSteps struct {
	advance          string
	loser, winner    []string
	loserStep, wStep Step
}

func checkFlat(t *testing.T, e *Engine, loser, winner string, stages []flatSteps) {
	t.Helper()
	for i, s := range stages {
		if s.advance != "" {
			advance(t, e, s.advance)
		}
		if v, ok := e.View(key(loser)); ok {
			check(t, "loser's step", v.Step.String(), s.loserStep.String())
			check(t, "loser", hosts(v), s.loser)
		} else if s.loser != nil {
			t.Errorf("stage %d: the loser is gone", i)
		}
		v := view(t, e, winner)
		check(t, "winner's step", v.Step.String(), s.wStep.String())
		check(t, "winner", hosts(v), s.winner)
		checkReferences(t, e)
		if len(e.TakeDirty()) == 0 {
			t.Errorf("stage %d: no change is told", i)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// A service that appears in an earlier flat namespace takes the name over: it is refused
// while clusters of that name change their meaning, so no explicit port and no long name
// ever leads to the other service (I1). DNS answers with the heir's address at once.
func TestFlatNameTakenOver(t *testing.T) {
	e := newEngine(t, twoFlat(), pod("b", "shop/x", "10.0.0.2", "9090*+"))
	check(t, "alone", hosts(view(t, e, "shop/x")), []string{"x x:9090 x.shop x.shop:9090 -> x", "x:* x.shop:* -> refuse"})
	upsert(t, e, pod("a", "default/x", "10.0.0.1", "8080*+ 9090+"))
	long := []string{"x.default x.default:8080 -> x.default", "x.default:9090 -> x.default:9090", "x.default:* -> refuse"}
	refusing := append(append([]string(nil), long...), "x x:* -> refuse")
	loserAlone := []string{"x.shop x.shop:9090 -> x.shop", "x.shop:* -> refuse"}
	both := []string{"x x:8080 x.default x.default:8080 -> x", "x:9090 x.default:9090 -> x:9090", "x:* x.default:* -> refuse"}

	v4, _, ok := e.LookUp("x.aether.internal")
	if !ok || v4 != view(t, e, "default/x").VIP4 {
		t.Errorf("DNS: %s %v", v4, ok)
	}
	check(t, "names", view(t, e, "default/x").Spellings, []string{"x.default.aether.internal", "x.aether.internal"})
	if a := e.Resolve("x.aether.internal:9090"); a.Kind != Real || a.Service != key("shop/x") {
		t.Errorf("while routes may still lead to it: %+v", a)
	}
	checkFlat(t, e, "shop/x", "default/x", []flatSteps{
		{loserStep: Releasing, loser: append(append([]string(nil), loserAlone...), "x x:* -> refuse"), winner: long},
		{advance: "shop/x", loser: loserAlone, wStep: Claiming, winner: refusing},
		{advance: "default/x", loser: loserAlone, wStep: Renaming, winner: both},
		{advance: "default/x", loser: loserAlone, winner: both},
	})
	v := view(t, e, "default/x")
	check(t, "clusters", clusters(v), []string{"x 8080 http: a", "x:9090 9090 http: a"})
	check(t, "retired", v.Retired, []string{"x.aether.internal:8080", "x.default.aether.internal", "x.default.aether.internal:8080", "x.default.aether.internal:9090"})
}

// While the name is nobody's, Envoy's request for it gets a tombstone, and the winner
// waits for all of them: also for ports that it does not have itself, as it may get them.
func TestFlatNameClaiming(t *testing.T) {
	e := newEngine(t, twoFlat(), pod("b", "shop/x", "10.0.0.2", "7000+ 9090*+"))
	upsert(t, e, pod("a", "default/x", "10.0.0.1", "8080*+ 9090+"))
	v := view(t, e, "shop/x")
	check(t, "loser awaits", v.Await, []Await{{Kind: AwaitRoutes}})
	check(t, "loser's clusters", clusters(v), []string{"x.shop 9090 http: b", "x.shop:7000 7000 http: b", "x 9090 http: b", "x:7000 7000 http: b"})
	e.Resolve("x.aether.internal:9090")
	advance(t, e, "shop/x")
	for _, name := range []string{"x.aether.internal", "x.aether.internal:9090"} {
		if a := e.Resolve(name); a.Kind != Tombstone || a.Service != key("/") {
			t.Errorf("%s while it is refused: %+v", name, a)
		}
	}
	e.TakeDirty()
	check(t, "winner awaits", view(t, e, "default/x").Await, []Await{{Kind: AwaitRoutes}, {Kind: AwaitClusters, Name: "x.aether.internal"}})
	advance(t, e, "default/x")
	v = view(t, e, "default/x")
	check(t, "clusters", clusters(v), []string{"x 8080 http: a", "x:9090 9090 http: a", "x.default 8080 http: a", "x.default:9090 9090 http: a"})
	check(t, "awakened", e.TakeDirty()[0].Awakened, []string{"x.aether.internal", "x.aether.internal:9090"})
}

// When the winner is forgotten, the other takes the name over, by the same steps; its
// address stays its own, and the winner's is kept for the winner.
func TestFlatNameInherited(t *testing.T) {
	e := newEngine(t, twoFlat(), pod("a", "default/x", "10.0.0.1", "8080*+"), pod("b", "shop/x", "10.0.0.2", "9090*+"))
	vipA, vipB := view(t, e, "default/x").VIP4, view(t, e, "shop/x").VIP4
	remove(e, "a")
	e.Expire(t0.Add(DefaultRetention - time.Second))
	check(t, "kept while retained", view(t, e, "default/x").Name, "x.aether.internal")
	e.Expire(t0.Add(DefaultRetention))
	e.TakeDirty()
	check(t, "names", view(t, e, "shop/x").Spellings, []string{"x.shop.aether.internal", "x.aether.internal"})
	loser := []string{"x.shop x.shop:9090 -> x.shop", "x.shop:* -> refuse"}
	final := []string{"x x:9090 x.shop x.shop:9090 -> x", "x:* x.shop:* -> refuse"}
	checkFlat(t, e, "default/x", "shop/x", []flatSteps{
		{advance: "default/x", wStep: Claiming, winner: append(append([]string(nil), loser...), "x x:* -> refuse")},
		{advance: "shop/x", wStep: Renaming, winner: final},
		{advance: "shop/x", winner: final},
	})
	check(t, "address", view(t, e, "shop/x").VIP4, vipB)
	upsert(t, e, pod("a2", "default/x", "10.0.0.1", "8080*+"))
	rest(e)
	check(t, "back", view(t, e, "default/x").VIP4, vipA)
	check(t, "back", view(t, e, "default/x").Name, "x.aether.internal")
	check(t, "back", view(t, e, "shop/x").Name, "x.shop.aether.internal")
	checkReferences(t, e)
}

// A claim is given up in every step when a better one comes, and the name ends with the
// first listed one.
func TestFlatClaimOvertaken(t *testing.T) {
	cfg := testConfig()
	cfg.FlatNamespaces = []string{"a", "b", "c"}
	for steps := range 6 {
		e := newEngine(t, cfg, pod("c", "c/x", "10.0.0.3", "7000*+"))
		upsert(t, e, pod("b", "b/x", "10.0.0.2", "8080*+"))
		for range steps {
			for _, s := range []string{"c/x", "b/x"} {
				if view(t, e, s).Step != Settled {
					advance(t, e, s)
					break
				}
			}
		}
		upsert(t, e, pod("a", "a/x", "10.0.0.1", "9090*+"))
		for range 20 {
			checkReferences(t, e)
			moved := false
			for _, s := range []string{"c/x", "b/x", "a/x"} {
				if !moved && view(t, e, s).Step != Settled {
					advance(t, e, s)
					moved = true
				}
			}
		}
		check(t, "a", hosts(view(t, e, "a/x")), []string{"x x:9090 x.a x.a:9090 -> x", "x:* x.a:* -> refuse"})
		check(t, "b", hosts(view(t, e, "b/x")), []string{"x.b x.b:8080 -> x.b", "x.b:* -> refuse"})
		check(t, "c", hosts(view(t, e, "c/x")), []string{"x.c x.c:7000 -> x.c", "x.c:* -> refuse"})
	}
}

// A newcomer that should have the name does not take it at once while Envoy may have
// clusters of a former owner, although the name has no owner at that moment.
func TestHotFlatNameIsClaimed(t *testing.T) {
	cfg := testConfig()
	cfg.FlatNamespaces = []string{"a", "b", "c"}
	e := newEngine(t, cfg, pod("c", "c/x", "10.0.0.3", "7000*+ 8080+"))
	upsert(t, e, pod("c", "c/x", "10.0.0.3", "7000+ 8080*+"))
	rest(e)
	check(t, "retired", view(t, e, "c/x").Retired, []string{"x.aether.internal:8080", "x.c.aether.internal:8080"})
	upsert(t, e, pod("b", "b/x", "10.0.0.2", "8080*+ 9090+"))
	upsert(t, e, pod("b", "b/x", "10.0.0.2", "8080+ 9090*+")) // b/x is busy when c/x is ready
	view(t, e, "b/x")
	upsert(t, e, pod("b", "b/x", "10.0.0.2", "8080*+ 9090+"))
	advance(t, e, "c/x")
	check(t, "what is left to c/x", view(t, e, "c/x").Retired, []string{"x.c.aether.internal:8080"})
	if b := view(t, e, "b/x"); b.Step != Splitting {
		t.Fatalf("b/x is %s", b.Step)
	}
	upsert(t, e, pod("a", "a/x", "10.0.0.1", "9090*+"))
	v := view(t, e, "a/x")
	if v.Step != Claiming || v.Name != "x.a.aether.internal" {
		t.Errorf("the newcomer is %s as %s", v.Step, v.Name)
	}
	rest(e)
	check(t, "name", view(t, e, "a/x").Name, "x.aether.internal")
}

// A namespace that is flat no more gives its names up, a new flat one gets them.
func TestFlatNamespacesChange(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/x", "10.0.0.1", "8080*+"), pod("b", "shop/y", "10.0.0.2", "8080*+"))
	var saved []Entry
	for k := range e.Services() {
		entry, _ := e.Entry(k)
		saved = append(saved, entry)
	}
	cfg := testConfig()
	cfg.FlatNamespaces = []string{"shop"}
	e, err := New(cfg, saved, t0)
	if err != nil {
		t.Fatal(err)
	}
	upsert(t, e, pod("a", "default/x", "10.0.0.1", "8080*+"), pod("b", "shop/y", "10.0.0.2", "8080*+"))
	e.Synced()
	check(t, "step", view(t, e, "default/x").Step, Releasing)
	check(t, "step", view(t, e, "shop/y").Step, Claiming)
	rest(e)
	check(t, "x", hosts(view(t, e, "default/x")), []string{"x.default x.default:8080 -> x.default", "x.default:* -> refuse"})
	check(t, "y", hosts(view(t, e, "shop/y")), []string{"y y:8080 y.shop y.shop:8080 -> y", "y:* y.shop:* -> refuse"})
	check(t, "names", view(t, e, "default/x").Spellings, []string{"x.default.aether.internal"})
}

// A port that went while the service had the flat name, and comes back when it has its
// long name again, is served: what was retired with the long name is a cluster now.
func TestPortBackAfterFlatName(t *testing.T) {
	alone, both := pod("b", "shop/x", "10.0.0.2", "8080*+"), pod("b", "shop/x", "10.0.0.2", "8080*+ 9090+")
	e := newEngine(t, twoFlat(), pod("a", "default/x", "10.0.0.1", "8080*+"), both)
	rest(e)
	remove(e, "a")
	e.Expire(t0.Add(DefaultRetention))
	rest(e)
	if c, ok := e.Cluster("x." + domain + ":9090"); !ok || len(c.Endpoints) != 1 {
		t.Fatalf("the flat name is not shop/x: %+v", c)
	}
	upsert(t, e, alone, pod("a2", "default/x", "10.0.0.1", "8080*+"))
	rest(e)
	upsert(t, e, both)
	rest(e)
	if c, ok := e.Cluster("x.shop." + domain + ":9090"); !ok || len(c.Endpoints) != 1 {
		t.Errorf("port 9090 is refused: %+v", c)
	}
	checkReferences(t, e)
}
