package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// endpoint returns a valid record.
func endpoint(uid string, generation uint64) model.Endpoint {
	return model.Endpoint{
		UID: uid, Generation: generation,
		Service:   model.ServiceKey{Namespace: "shop", Name: "payments"},
		Identity:  model.Identity{TrustDomain: "aether.internal", Namespace: "shop", Account: "payments"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")},
		Default:   8080,
		Ports: []model.PortStatus{
			{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy},
			{Port: port.Port{Number: 9090, Protocol: port.H2}},
		},
		Weight:   1,
		Metadata: map[string]string{"version": "v1"},
	}
}

// diff compares what is behind values, addresses by value.
func diff(want, got any) string {
	return cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
}

// Of several writers the highest generation wins in every order; a late update of
// a withdrawn record does not bring it back, a stale withdrawal does not take a
// newer one away (XDS-47, contract 5: stale DEL).
func TestTableGenerations(t *testing.T) {
	type step struct {
		generation uint64
		delete     bool
		want       error
	}
	for _, tt := range []struct {
		name  string
		steps []step
		want  uint64 // generation of the record at the end; 0: none
	}{
		{"first", []step{{generation: 1}}, 1},
		{"generation 0", []step{{generation: 0}, {generation: 0, want: ErrStale}}, 0},
		{"newer", []step{{generation: 1}, {generation: 5}}, 5},
		{"same again", []step{{generation: 5}, {generation: 5, want: ErrStale}}, 5},
		{"older", []step{{generation: 5}, {generation: 4, want: ErrStale}}, 5},
		{"withdrawn", []step{{generation: 5}, {generation: 6, delete: true}}, 0},
		{"withdrawn at the same generation", []step{{generation: 5}, {generation: 5, delete: true}}, 0},
		{"late update after withdrawal", []step{{generation: 5}, {generation: 7, delete: true}, {generation: 6, want: ErrStale}, {generation: 7, want: ErrStale}}, 0},
		{"added again after withdrawal", []step{{generation: 5}, {generation: 7, delete: true}, {generation: 8}}, 8},
		{"stale withdrawal", []step{{generation: 5}, {generation: 4, delete: true, want: ErrStale}}, 5},
		{"stale withdrawal covers nothing newer", []step{{generation: 5}, {generation: 4, delete: true, want: ErrStale}, {generation: 6}}, 6},
		{"withdrawal first", []step{{generation: 5, delete: true}, {generation: 4, want: ErrStale}, {generation: 5, want: ErrStale}, {generation: 6}}, 6},
		{"withdrawn twice", []step{{generation: 5}, {generation: 6, delete: true}, {generation: 6, delete: true}, {generation: 3, delete: true}, {generation: 5, want: ErrStale}}, 0},
		{"withdrawn twice, later", []step{{generation: 6, delete: true}, {generation: 9, delete: true}, {generation: 8, want: ErrStale}, {generation: 10}}, 10},
		{"withdrawn, back, withdrawn", []step{{generation: 1}, {generation: 2, delete: true}, {generation: 3}, {generation: 4, delete: true}, {generation: 4, want: ErrStale}}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table := NewTable()
			for i, s := range tt.steps {
				err := table.Upsert
				var got error
				if s.delete {
					got = table.Delete("a", s.generation)
				} else {
					got = err(endpoint("a", s.generation))
				}
				if !errors.Is(got, s.want) {
					t.Errorf("step %d: %v, want %v", i, got, s.want)
				}
			}
			var got uint64
			for _, ep := range table.Snapshot() {
				got = ep.Generation
			}
			if got != tt.want {
				t.Errorf("the record has generation %d, want %d", got, tt.want)
			}
		})
	}
}

// Generations of withdrawn records are remembered for a bounded number of them,
// the latest (I9, XDS-47).
func TestWithdrawnIsBounded(t *testing.T) {
	table := NewTable()
	const n = 3*maxWithdrawn + 7
	for i := range n {
		if err := table.Delete(fmt.Sprint(i), 5); err != nil {
			t.Fatal(err)
		}
	}
	if got := len(table.withdrawn.generation); got != maxWithdrawn {
		t.Errorf("%d are remembered, want %d", got, maxWithdrawn)
	}
	if got := len(table.withdrawn.order); got > 2*maxWithdrawn+1 {
		t.Errorf("the order has %d entries", got)
	}
	for i := n - maxWithdrawn; i < n; i++ {
		if err := table.Upsert(endpoint(fmt.Sprint(i), 5)); !errors.Is(err, ErrStale) {
			t.Fatalf("%d of %d is forgotten: %v", i, n, err)
		}
	}
	if err := table.Upsert(endpoint("0", 5)); err != nil {
		t.Errorf("the first one is still remembered: %v", err)
	}
}

// log records events as short texts.
type log struct {
	mu   sync.Mutex
	list []string
}

func (l *log) sink(ev Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := ev.Kind.String()
	if ev.Kind != Complete {
		text = fmt.Sprintf("%s %s %d", ev.Kind, ev.UID, ev.Generation)
	}
	l.list = append(l.list, text)
}

// take returns what was recorded since the last call.
func (l *log) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.list
	l.list = nil
	return list
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A watch gives all records in the order of their UIDs, then Complete once, then
// every change in order (contract 4.7).
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		for _, uid := range []string{"c", "a", "b"} {
			must(t, table.Upsert(endpoint(uid, 1)))
		}
		var got log
		go func() { _ = table.Watch(t.Context(), got.sink) }()
		synctest.Wait()
		if d := diff([]string{"upsert a 1", "upsert b 1", "upsert c 1", "complete"}, got.take()); d != "" {
			t.Errorf("replay (-want +got):\n%s", d)
		}
		must(t, table.Upsert(endpoint("b", 2)))
		synctest.Wait()
		must(t, table.Delete("a", 7))
		must(t, table.Upsert(endpoint("d", 1)))
		must(t, table.Delete("nobody", 1))
		if err := table.Upsert(endpoint("b", 2)); !errors.Is(err, ErrStale) {
			t.Errorf("stale: %v", err)
		}
		synctest.Wait()
		must(t, table.Delete("d", 2))
		must(t, table.Upsert(endpoint("a", 8)))
		synctest.Wait()
		if d := diff([]string{"upsert b 2", "delete a 7", "upsert d 1", "delete d 2", "upsert a 8"}, got.take()); d != "" {
			t.Errorf("changes (-want +got):\n%s", d)
		}
	})
}

// An empty table says Complete at once: it is the marker, not a record, that says
// that a reader has everything (XDS-R21).
func TestWatchEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		var got log
		go func() { _ = table.Watch(t.Context(), got.sink) }()
		synctest.Wait()
		must(t, table.Upsert(endpoint("a", 1)))
		synctest.Wait()
		if d := diff([]string{"complete", "upsert a 1"}, got.take()); d != "" {
			t.Errorf("-want +got:\n%s", d)
		}
	})
}

// A watch ends with its context, also when the sink has much before it, and leaves
// nothing behind in the table.
func TestWatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		for i := range 100 {
			must(t, table.Upsert(endpoint(fmt.Sprint(i), 1)))
		}
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		err := table.Watch(ctx, func(Event) {
			if calls++; calls == 10 {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) || calls != 10 {
			t.Errorf("ended with %v after %d events", err, calls)
		}
		ended := make(chan error)
		ctx, cancel = context.WithCancel(t.Context())
		go func() { ended <- table.Watch(ctx, func(Event) {}) }()
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("an idle watch ended with %v", err)
		}
		if n := len(table.watchers); n != 0 {
			t.Errorf("%d watchers are left", n)
		}
	})
}

// A sink that blocks for ever holds up neither publishers nor another watcher, and
// gets the latest state of everything once it goes on: no deletion is lost, nothing
// outdated is delivered (MESH-30, XDS-R12).
func TestWatchSlowSink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		must(t, table.Upsert(endpoint("a", 1)))
		must(t, table.Upsert(endpoint("b", 1)))
		must(t, table.Upsert(endpoint("e", 1)))
		var slow, fast log
		gate := make(chan struct{})
		go func() {
			_ = table.Watch(t.Context(), func(ev Event) {
				if ev.Kind == Complete {
					<-gate
				}
				slow.sink(ev)
			})
		}()
		go func() { _ = table.Watch(t.Context(), fast.sink) }()
		synctest.Wait()
		fast.take()
		for g := range uint64(1000) {
			must(t, table.Upsert(endpoint("a", g+2)))
		}
		must(t, table.Delete("b", 3))
		must(t, table.Upsert(endpoint("c", 1)))
		must(t, table.Upsert(endpoint("d", 1)))
		must(t, table.Delete("c", 2)) // the slow sink never heard of c
		must(t, table.Delete("e", 4))
		must(t, table.Upsert(endpoint("e", 5))) // deleted and back: the newer record is enough
		synctest.Wait()
		events := fast.take()
		if len(events) == 0 || events[len(events)-1] != "upsert e 5" {
			t.Errorf("the fast watcher waits for the slow one: %v", events)
		}
		close(gate)
		synctest.Wait()
		want := []string{"upsert a 1", "upsert b 1", "upsert e 1", "complete", "upsert a 1001", "delete b 3", "upsert d 1", "upsert e 5"}
		if d := diff(want, slow.take()); d != "" {
			t.Errorf("-want +got:\n%s", d)
		}
	})
}

// What waits for a blocked sink is bounded by the records, whatever comes and goes
// meanwhile (XDS-R12, I9).
func TestWatchQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		for i := range 100 {
			must(t, table.Upsert(endpoint(fmt.Sprint(i), 1)))
		}
		gate := make(chan struct{})
		go func() {
			_ = table.Watch(t.Context(), func(ev Event) {
				if ev.Kind == Complete {
					<-gate
				}
			})
		}()
		synctest.Wait()
		for i := range 20_000 {
			must(t, table.Upsert(endpoint(fmt.Sprintf("short-%d", i), 1)))
			must(t, table.Delete(fmt.Sprintf("short-%d", i), 2))
		}
		for i := range 100 {
			must(t, table.Delete(fmt.Sprint(i), 2))
		}
		table.mu.Lock()
		for w := range table.watchers {
			if n := w.queue.Len(); n != 100 || len(w.waiting) != n || len(w.known) != 100 {
				t.Errorf("%d changes wait, %d of them to be found, %d are known; want 100 of each", n, len(w.waiting), len(w.known))
			}
		}
		table.mu.Unlock()
		close(gate)
		synctest.Wait()
		table.mu.Lock()
		defer table.mu.Unlock()
		for w := range table.watchers {
			if w.queue.Len() != 0 || len(w.waiting) != 0 || len(w.known) != 0 {
				t.Errorf("left over: %d, %d, %d", w.queue.Len(), len(w.waiting), len(w.known))
			}
		}
	})
}

// A record belongs to whoever holds it: neither the publisher nor a watcher can
// change what others see (MESH-23, XDS-46).
func TestTableCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := NewTable()
		spoil := func(ep model.Endpoint) {
			ep.Addresses[0] = netip.MustParseAddr("192.0.2.1")
			ep.Ports[0].Health = model.Draining
			ep.Metadata["version"] = "spoilt"
		}
		mine := endpoint("a", 1)
		must(t, table.Upsert(mine))
		spoil(mine)
		for range 2 {
			go func() {
				_ = table.Watch(t.Context(), func(ev Event) {
					if ev.Kind == Upsert {
						spoil(ev.Endpoint)
					}
				})
			}()
		}
		synctest.Wait()
		spoil(table.Snapshot()[0])
		if d := diff([]model.Endpoint{endpoint("a", 1)}, table.Snapshot()); d != "" {
			t.Errorf("-want +got:\n%s", d)
		}
	})
}

// view is what one watcher has been told, with the rules of a watch held on the way.
type view struct {
	t        *testing.T
	records  map[string]model.Endpoint
	last     map[string]uint64 // highest generation told, of a record or a withdrawal
	complete int
}

func (v *view) sink(ev Event) {
	switch ev.Kind {
	case Upsert:
		if last, ok := v.last[ev.UID]; ok && ev.Generation <= last || ev.Endpoint.UID != ev.UID || ev.Endpoint.Generation != ev.Generation {
			v.t.Errorf("upsert of %s generation %d after %d", ev.UID, ev.Generation, last)
		}
		v.records[ev.UID] = ev.Endpoint
		v.last[ev.UID] = ev.Generation
	case Delete:
		if _, ok := v.records[ev.UID]; !ok || ev.Generation < v.last[ev.UID] {
			v.t.Errorf("delete of %s generation %d after %d, known %v", ev.UID, ev.Generation, v.last[ev.UID], ok)
		}
		delete(v.records, ev.UID)
		v.last[ev.UID] = ev.Generation
	case Complete:
		v.complete++
	}
}

// Under random interleavings of publishers that race for the same records and of
// watchers that come, go, and are fast or slow, every view equals the table after
// quiescence, and the table holds for every UID what its highest generation said
// (MESH-29, MESH-30, XDS-46, XDS-47).
func TestInterleavings(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) { interleave(t, seed) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func interleave(t *testing.T, seed uint64) {
	t.Helper()
	const uids, publishers, watchers, steps = 12, 4, 6, 150
	table := NewTable()
	var generations [uids]atomic.Uint64
	// truth has, for each UID, its highest generation and whether that was a withdrawal.
	type word struct {
		generation uint64
		withdrawn  bool
	}
	var mu sync.Mutex
	var truth [uids]word
	var writing sync.WaitGroup
	for p := range uint64(publishers) {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(seed, p))
			for range steps {
				i := random.IntN(uids)
				w := word{generations[i].Add(1), random.IntN(3) == 0}
				mu.Lock()
				if truth[i].generation < w.generation {
					truth[i] = w
				}
				mu.Unlock()
				// The call may come long after its generation was taken.
				time.Sleep(time.Duration(random.IntN(4)) * time.Millisecond)
				var err error
				if w.withdrawn {
					err = table.Delete(fmt.Sprint(i), w.generation)
				} else {
					err = table.Upsert(endpoint(fmt.Sprint(i), w.generation))
				}
				if err != nil && !errors.Is(err, ErrStale) {
					t.Error(err)
				}
			}
		})
	}
	var views []*view
	for n := range uint64(watchers) {
		v := &view{t: t, records: map[string]model.Endpoint{}, last: map[string]uint64{}}
		views = append(views, v)
		go func() {
			random := rand.New(rand.NewPCG(seed, 100+n))
			time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
			_ = table.Watch(t.Context(), func(ev Event) {
				time.Sleep(time.Duration(n) * time.Millisecond) // the first is fast, the last slow
				v.sink(ev)
			})
		}()
		go func() { // a watcher that does not stay
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n*20)*time.Millisecond)
			defer cancel()
			_ = table.Watch(ctx, func(Event) { time.Sleep(time.Millisecond) })
		}()
	}
	writing.Wait()
	time.Sleep(time.Minute)
	synctest.Wait()

	want := map[string]model.Endpoint{}
	for i, w := range truth {
		if w.generation > 0 && !w.withdrawn {
			want[fmt.Sprint(i)] = endpoint(fmt.Sprint(i), w.generation)
		}
	}
	stored := map[string]model.Endpoint{}
	for _, ep := range table.Snapshot() {
		stored[ep.UID] = ep
	}
	if d := diff(want, stored); d != "" {
		t.Errorf("the table (-want +got):\n%s", d)
	}
	for n, v := range views {
		if d := diff(want, v.records); d != "" || v.complete != 1 {
			t.Errorf("watcher %d: %d times complete (-want +got):\n%s", n, v.complete, d)
		}
	}
}

func BenchmarkUpsert(b *testing.B) {
	for _, watchers := range []int{0, 1, 10} {
		b.Run(fmt.Sprintf("watchers=%d", watchers), func(b *testing.B) {
			table := NewTable()
			ctx, cancel := context.WithCancel(b.Context())
			var running sync.WaitGroup
			for range watchers {
				running.Go(func() { _ = table.Watch(ctx, func(Event) {}) })
			}
			ep := endpoint("a", 0)
			b.ReportAllocs()
			for b.Loop() {
				ep.Generation++
				if err := table.Upsert(ep); err != nil {
					b.Fatal(err)
				}
			}
			cancel()
			running.Wait()
		})
	}
}

// BenchmarkReplay is what a new watcher costs with many records.
func BenchmarkReplay(b *testing.B) {
	table := NewTable()
	const n = 10_000
	for i := range n {
		if err := table.Upsert(endpoint(fmt.Sprint(i), 1)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		ctx, cancel := context.WithCancel(b.Context())
		_ = table.Watch(ctx, func(ev Event) {
			if ev.Kind == Complete {
				cancel()
			}
		})
		cancel()
	}
}
