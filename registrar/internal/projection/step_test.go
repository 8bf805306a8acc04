package projection

import (
	"slices"
	"testing"
)

// changeDefault returns an engine whose service is about to change its default port
// from 8080 to 9090: two pods of the new version outvote one of the old.
func changeDefault(t *testing.T) *Engine {
	t.Helper()
	e := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "8080*+ 9090+"), pod("b", "default/s", "10.0.0.2", "8080*+ 9090+"))
	upsert(t, e, pod("b", "default/s", "10.0.0.2", "8080+ 9090*+"), pod("c", "default/s", "10.0.0.3", "8080+ 9090*+"))
	return e
}

// Contract 2, the change of the default port in three steps, each after the previous one
// is acknowledged: what each step routes, has as clusters, and awaits.
func TestDefaultChange(t *testing.T) {
	const svc, f = "default/s", "s.aether.internal"
	e := changeDefault(t)
	split := []string{
		"s s.default -> s", "s:8080 s.default:8080 -> s:8080", "s:9090 s.default:9090 -> s:9090", "s:* s.default:* -> refuse",
	}
	for _, want := range []struct {
		step            Step
		committed       uint16
		hosts, clusters []string
		await           []Await
		retired         []string
	}{
		{
			step: Splitting, committed: 8080, hosts: split,
			clusters: []string{"s 8080 http: a b c", "s:8080 8080 http: a b c", "s:9090 9090 http: a b c"},
			await:    []Await{{Kind: AwaitRoutes}},
		},
		{
			step: Moving, committed: 9090, hosts: split,
			clusters: []string{"s 9090 http: a b c", "s:8080 8080 http: a b c", "s:9090 9090 http: a b c"},
			await: []Await{
				{Kind: AwaitCluster, Name: f},
				{Kind: AwaitEndpoints, Name: f},
				{Kind: AwaitCluster, Name: "s.default.aether.internal"},
				{Kind: AwaitEndpoints, Name: "s.default.aether.internal"},
			},
		},
		{
			step: Joining, committed: 9090,
			hosts:    []string{"s s:9090 s.default s.default:9090 -> s", "s:8080 s.default:8080 -> s:8080", "s:* s.default:* -> refuse"},
			clusters: []string{"s 9090 http: a b c", "s:8080 8080 http: a b c", "s:9090 9090 http: a b c"},
			await:    []Await{{Kind: AwaitRoutes}},
		},
		{
			step: Settled, committed: 9090,
			hosts:    []string{"s s:9090 s.default s.default:9090 -> s", "s:8080 s.default:8080 -> s:8080", "s:* s.default:* -> refuse"},
			clusters: []string{"s 9090 http: a b c", "s:8080 8080 http: a b c"},
			retired:  []string{f + ":9090", "s.default.aether.internal:9090"},
		},
	} {
		changes := e.TakeDirty()
		if len(changes) != 1 || !changes[0].Shape || !changes[0].Entry {
			t.Errorf("%s: changes %+v", want.step, changes)
		}
		v := view(t, e, svc)
		check(t, "step", v.Step.String(), want.step.String())
		check(t, "default", v.Default, 9090)
		check(t, "committed", v.Committed, want.committed)
		check(t, "hosts", hosts(v), want.hosts)
		check(t, "clusters", clusters(v), want.clusters)
		check(t, "await", v.Await, want.await)
		check(t, "retired", v.Retired, want.retired)
		checkReferences(t, e)
		if want.step != Settled {
			advance(t, e, svc)
		}
	}
	if e.Advance(key(svc), view(t, e, svc).Token) {
		t.Error("a settled service advances")
	}
	// I2: the name of the new default is not a cluster any more, whoever asks again.
	if a := e.Resolve(f + ":9090"); a.Kind != Refused || a.Service != key(svc) {
		t.Errorf("retired name: %+v", a)
	}
	// An Envoy that only lost its stream asks again for all it ever asked for (XDS-R2).
	e.Forget(f + ":9090")
	if a := e.Resolve(f + ":9090"); a.Kind != Refused {
		t.Errorf("retired name on a new stream: %+v", a)
	}
	// It is one again when the default changes back, and the other name goes.
	upsert(t, e, pod("b", svc, "10.0.0.2", "8080*+ 9090+"))
	rest(e)
	v := view(t, e, svc)
	check(t, "back", clusters(v), []string{"s 8080 http: a b c", "s:9090 9090 http: a b c"})
	check(t, "retired", v.Retired, []string{f + ":8080", "s.default.aether.internal:8080"})
}

// The rules hold without an Envoy too: the publisher advances at once and the result is
// that of a service which was born so, except for the name to take away.
func TestDefaultChangeEndsAsBornSo(t *testing.T) {
	e := changeDefault(t)
	rest(e)
	born := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "8080*+ 9090+"),
		pod("b", "default/s", "10.0.0.2", "8080+ 9090*+"), pod("c", "default/s", "10.0.0.3", "8080+ 9090*+"))
	got, want := view(t, e, "default/s"), view(t, born, "default/s")
	got.Retired, got.Token, want.Token = nil, 0, 0
	check(t, "view", got, want)
}

// A token of a step that was overtaken does nothing: no acknowledgement of an older
// form can move a newer one.
func TestStaleToken(t *testing.T) {
	const svc = "default/s"
	e := changeDefault(t)
	first := view(t, e, svc)
	if e.Advance(key("default/other"), first.Token) || e.Advance(key(svc), first.Token+1) {
		t.Error("a token of nobody's step advances")
	}
	// The old version is gone and the new default is tcp: the routes of Splitting differ.
	upsert(t, e, pod("a", svc, "10.0.0.1", "9090=tcp*+"), pod("b", svc, "10.0.0.2", "9090=tcp*+"), pod("c", svc, "10.0.0.3", "9090=tcp*+"))
	if e.Advance(key(svc), first.Token) {
		t.Error("an overtaken token advances")
	}
	v := view(t, e, svc)
	check(t, "hosts", hosts(v), []string{"s s.default -> refuse", "s:* s.default:* -> refuse"})
	advance(t, e, svc)
	v = view(t, e, svc)
	if v.Step != Settled || v.Committed != 0 || v.Default != 9090 {
		t.Errorf("step %s, committed %d, default %d", v.Step, v.Committed, v.Default)
	}
}

// A default that changes again on the way, from every step and to every kind of port,
// ends where it should, and no step in between routes an explicit port to cluster F
// before that has a committed meaning.
func TestDefaultChangesAgain(t *testing.T) {
	const svc = "default/s"
	ports := map[string]string{
		"8080": "5432=tcp+ 7000+ 8080*+ 9090+", "9090": "5432=tcp+ 7000+ 8080+ 9090*+",
		"7000": "5432=tcp+ 7000*+ 8080+ 9090+", "tcp": "5432=tcp*+ 7000+ 8080+ 9090+",
	}
	committed := map[string]uint16{"8080": 8080, "9090": 9090, "7000": 7000, "tcp": 0}
	for from := range ports {
		for to := range ports {
			for again := range ports {
				for steps := range 4 {
					e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", ports[from]))
					upsert(t, e, pod("a", svc, "10.0.0.1", ports[to]))
					for range steps {
						if v := view(t, e, svc); v.Step != Settled {
							advance(t, e, svc)
						}
					}
					upsert(t, e, pod("a", svc, "10.0.0.1", ports[again]))
					for range 10 {
						v := view(t, e, svc)
						if v.Step == Settled {
							break
						}
						checkReferences(t, e)
						advance(t, e, svc)
					}
					v := view(t, e, svc)
					if v.Step != Settled || v.Committed != committed[again] {
						t.Fatalf("%s, %s, after %d steps %s: %s with %d", from, to, steps, again, v.Step, v.Committed)
					}
					for _, c := range v.Clusters {
						if c.Name == "s.aether.internal:"+again || slices.Contains(v.Retired, c.Name) {
							t.Fatalf("%s, %s, after %d steps %s: cluster %s at rest", from, to, steps, again, c.Name)
						}
					}
				}
			}
		}
	}
}

// A default port that is no HTTP port any more: the bare name is refused before its
// cluster goes (contract 2: a tcp default is a 503 for portless HTTP), and comes back
// with the cluster first.
func TestDefaultBecomesTCPAndBack(t *testing.T) {
	const svc = "default/s"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "5432=tcp+ 8080*+"))
	upsert(t, e, pod("a", svc, "10.0.0.1", "5432=tcp*+ 8080+"))
	v := view(t, e, svc)
	check(t, "splitting", hosts(v), []string{"s s.default -> refuse", "s:8080 s.default:8080 -> s:8080", "s:* s.default:* -> refuse"})
	check(t, "the cluster stays until the routes are without it", clusters(v)[0], "s 8080 http: a")
	advance(t, e, svc)
	v = view(t, e, svc)
	check(t, "settled", clusters(v)[0], "s:8080 8080 http: a")
	check(t, "step", v.Step, Settled)
	if a := e.Resolve("s.aether.internal"); a.Kind != Tombstone {
		t.Errorf("portless: %s", a.Kind)
	}
	upsert(t, e, pod("a", svc, "10.0.0.1", "5432=tcp+ 8080*+"))
	v = view(t, e, svc)
	check(t, "step", v.Step, Moving)
	check(t, "hosts", hosts(v), []string{"s s.default -> s", "s:8080 s.default:8080 -> s:8080", "s:* s.default:* -> refuse"})
	rest(e)
	check(t, "back", clusters(view(t, e, svc))[0], "s 8080 http: a")
	check(t, "retired", view(t, e, svc).Retired, []string{"s.aether.internal:8080", "s.default.aether.internal:8080"})
}

// The old default port is not advertised any more when its last pod has gone: it is
// refused, and cluster F keeps its meaning, empty, until the routes are split.
func TestDefaultPortVanishes(t *testing.T) {
	const svc = "default/s"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "8080=h2*+"))
	upsert(t, e, pod("a", svc, "10.0.0.1", "9090*+"))
	v := view(t, e, svc)
	check(t, "hosts", hosts(v), []string{"s s.default -> s", "s:9090 s.default:9090 -> s:9090", "s:* s.default:* -> refuse"})
	check(t, "clusters", clusters(v), []string{"s 8080 h2:", "s:9090 9090 http: a"})
	rest(e)
	v = view(t, e, svc)
	check(t, "at rest", hosts(v), []string{"s s:9090 s.default s.default:9090 -> s", "s:* s.default:* -> refuse"})
	check(t, "at rest", clusters(v), []string{"s 9090 http: a"})
	if a := e.Resolve("s.aether.internal:8080"); a.Kind != Tombstone {
		t.Errorf("the old port: %s", a.Kind)
	}
}

// While cluster F is not acknowledged nobody knows which port it has with Envoy: a new
// HTTP default gives it that and awaits anew, a tcp default waits until it is.
func TestDefaultChangesWhileMoving(t *testing.T) {
	const svc = "default/s"
	at := func(ports string) []View {
		e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "5432=tcp+ 7000+ 8080*+ 9090+"))
		upsert(t, e, pod("a", svc, "10.0.0.1", "5432=tcp+ 7000+ 8080+ 9090*+"))
		advance(t, e, svc)
		views := []View{view(t, e, svc)}
		upsert(t, e, pod("a", svc, "10.0.0.1", ports))
		views = append(views, view(t, e, svc))
		advance(t, e, svc)
		return append(views, view(t, e, svc))
	}
	v := at("5432=tcp+ 7000*+ 8080+ 9090+")
	if v[1].Step != Moving || v[1].Committed != 7000 || v[1].Token == v[0].Token || v[2].Step != Joining {
		t.Errorf("another HTTP port: %s with %d, then %s", v[1].Step, v[1].Committed, v[2].Step)
	}
	v = at("5432=tcp*+ 7000+ 8080+ 9090+")
	if v[1].Step != Moving || v[1].Committed != 9090 || v[1].Token != v[0].Token || v[2].Step != Splitting || v[2].VirtualHosts[0].Cluster != "" {
		t.Errorf("a tcp port: %s with %d, then %s", v[1].Step, v[1].Committed, v[2].Step)
	}
}

// The names that status shows.
func TestStrings(t *testing.T) {
	var got []string
	for s := Settled; s <= lastStep+1; s++ {
		got = append(got, s.String())
	}
	check(t, "steps", got, []string{"settled", "splitting", "moving", "joining", "releasing", "claiming", "renaming", "leaving", "unknown"})
	check(t, "answers", []string{Refused.String(), Tombstone.String(), Real.String()}, []string{"refused", "tombstone", "real"})
}
