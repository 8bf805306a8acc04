package projection

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// event is an upsert, or a delete if ports is "gone".
type event struct {
	endpoint model.Endpoint
	gone     bool
}

// randomPod returns a pod of a small world: few services, addresses, accounts and
// profiles, so that everything collides.
func randomPod(r *rand.Rand, uid string) model.Endpoint {
	services := []string{"default/x", "shop/x", "default/y", "ops/z"}
	profiles := []string{
		"8080*+", "8080*+ 9090+", "8080+ 9090*+", "8080*- 9090=h2+", "5432=tcp*+ 8080+", "5432=tcp+ 8080*~", "9090*-", "",
		"8080=h2*+", "8080=tcp*+ 9090+", "7000=quic+ 8080*+", "7000=quic*+",
	}
	p := pod(uid, services[r.IntN(len(services))], fmt.Sprintf("10.0.0.%d", 1+r.IntN(6)), profiles[r.IntN(len(profiles))])
	p.Since = t0.Add(time.Duration(r.IntN(3)) * time.Second)
	p.Identity.Account = fmt.Sprintf("account%d", r.IntN(3))
	p.Weight = 1 + uint32(r.IntN(3))
	return p
}

// interleave returns the histories of several records mixed in a random way, each in its
// own order.
func interleave(r *rand.Rand, histories [][]event) []event {
	left := slices.Clone(histories)
	var out []event
	for len(left) > 0 {
		i := r.IntN(len(left))
		out = append(out, left[i][0])
		left[i] = left[i][1:]
		if len(left[i]) == 0 {
			left = slices.Delete(left, i, i+1)
		}
	}
	return out
}

func apply(tb testing.TB, e *Engine, events []event) {
	tb.Helper()
	for _, ev := range events {
		if ev.gone {
			e.Delete(ev.endpoint.UID, ev.endpoint.Generation, t0)
		} else if err := e.Upsert(ev.endpoint, t0); err != nil {
			tb.Fatal(err)
		}
	}
}

// randomHistories returns what happened to some records.
func randomHistories(r *rand.Rand, deletes bool) [][]event {
	var out [][]event
	for i := range 1 + r.IntN(8) {
		var h []event
		for g := range 1 + r.IntN(3) {
			p := randomPod(r, fmt.Sprint("pod", i))
			p.Generation = uint64(g + 1)
			h = append(h, event{endpoint: p})
		}
		if deletes && r.IntN(4) == 0 {
			h = append(h, event{endpoint: h[len(h)-1].endpoint, gone: true})
		}
		out = append(out, h)
	}
	return out
}

func entries(e *Engine) []Entry {
	var out []Entry
	for k := range e.Services() {
		entry, _ := e.Entry(k)
		out = append(out, entry)
	}
	return out
}

// I5: the same input in any order gives equal Views, entries and Changes; here the input
// is one set of changes with stale records, moves, shared addresses and deletes.
func TestOrderDoesNotMatter(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 5))
		histories := randomHistories(r, true)
		var want *Engine
		var wantChanges []Change
		for range 6 {
			e := newEngine(t, twoFlat())
			apply(t, e, interleave(r, histories))
			changes := e.TakeDirty()
			for i := range changes {
				changes[i].Ports = nil // they also have ports that were there for a moment
			}
			if want == nil {
				want, wantChanges = e, changes
				continue
			}
			check(t, "views", allViews(e), allViews(want))
			check(t, "entries", entries(e), entries(want))
			check(t, "changes", changes, wantChanges)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
}

// I5 and I2 over time: whatever was read in between, services that have the same pods
// end, at rest, with the same names, routes and clusters, but for the pinned accounts of
// the past. And I4: each Change says what it must and no more.
func TestHistoryDoesNotMatterAtRest(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 6))
		histories := randomHistories(r, false)
		var want []View
		for range 4 {
			e := newEngine(t, twoFlat())
			for _, ev := range interleave(r, histories) {
				apply(t, e, []event{ev})
				if r.IntN(2) == 0 {
					e.TakeDirty()
				}
				if r.IntN(4) == 0 {
					rest(e)
				}
			}
			e.Expire(t0.Add(DefaultRetention))
			rest(e)
			got := allViews(e)
			for i := range got {
				got[i].Retired = nil
				for j := range got[i].Clusters {
					got[i].Clusters[j].Identities = nil
				}
			}
			if want == nil {
				want = got
			}
			check(t, "views", got, want)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
}

// Change is exact: what a publisher keeps by following Changes equals what the Engine
// says, after every single event; and a Change without a flag means equal bytes there
// (I4, MESH-15, MESH-16, MESH-49).
func TestChangesAreComplete(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		e, disk := newEngine(t, twoFlat()), store{}
		kept := map[model.ServiceKey]View{}
		events := interleave(r, randomHistories(r, true))
		for i := 0; i < len(events) || i < 40; i++ {
			if i < len(events) {
				apply(t, e, events[i:i+1])
			} else {
				for k := range e.Services() {
					if v, _ := e.Shape(k); v.Step != Settled {
						e.Advance(k, v.Token)
						break
					}
				}
				if i == 35 {
					e.Expire(t0.Add(DefaultRetention))
				}
			}
			changes := e.TakeDirty()
			follow(t, e, kept, changes)
			disk.save(e, changes)
			for k := range e.Services() {
				now, _ := e.View(k)
				check(t, "followed view", kept[k], now)
				entry, _ := e.Entry(k)
				check(t, "saved entry", disk[k.String()], entry)
			}
			if t.Failed() {
				t.Fatalf("seed %d, event %d: %+v", seed, i, changes)
			}
		}
	}
}

// follow applies changes to kept as a publisher would: only what a flag says is taken.
func follow(t *testing.T, e *Engine, kept map[model.ServiceKey]View, changes []Change) {
	t.Helper()
	for _, c := range changes {
		now, known := e.View(c.Service)
		if c.Gone != !known && c.Shape {
			t.Errorf("%s: gone %v, known %v", c.Service, c.Gone, known)
		}
		if !known {
			delete(kept, c.Service)
			continue
		}
		old := kept[c.Service]
		if !c.Shape && !c.Clusters {
			for i := range old.Clusters {
				a, b := old.Clusters[i], now.Clusters[i]
				if c.Endpoints && slices.Contains(c.Ports, a.ID.Port) {
					a.Endpoints = b.Endpoints
				}
				old.Clusters[i] = a
			}
			// Counts are for status, which asks each time.
			old.Ports, old.Conflicts = now.Ports, now.Conflicts
			kept[c.Service] = old
			continue
		}
		if !c.Shape {
			stripped, before := now, old
			stripped.Clusters, before.Clusters = nil, nil
			stripped.Ports, before.Ports, stripped.Conflicts, before.Conflicts = nil, nil, nil, nil
			if !cmp.Equal(stripped.VirtualHosts, before.VirtualHosts) || stripped.Step != before.Step || stripped.VIP4 != before.VIP4 {
				t.Errorf("%s: another shape without the flag", c.Service)
			}
		}
		kept[c.Service] = now
	}
}
