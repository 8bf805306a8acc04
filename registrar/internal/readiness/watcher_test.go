package readiness_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
)

var errBroken = errors.New("table is broken")

// fakeTables are the listen tables of fake namespaces, by path.
type fakeTables struct {
	mu     sync.Mutex
	addrs  map[string][]netip.AddrPort
	broken map[string]bool
	torn   bool          // Read misses everything
	gate   chan struct{} // when set, Open waits until it is closed
	cost   time.Duration // of one read
	reads  map[string][]time.Time
	dumps  int
	opens  map[string]int
	open   map[string]int // open now
}

func newFakeTables() *fakeTables {
	return &fakeTables{
		addrs: map[string][]netip.AddrPort{}, broken: map[string]bool{},
		reads: map[string][]time.Time{}, opens: map[string]int{}, open: map[string]int{},
	}
}

func (f *fakeTables) set(path string, addrs ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addrs[path] = parse(addrs)
}

func parse(addrs []string) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.MustParseAddrPort(a))
	}
	return out
}

func (f *fakeTables) with(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeTables) readCount(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.reads[path])
}

func (f *fakeTables) Open(path string) (readiness.Table, error) {
	f.mu.Lock()
	gate := f.gate
	f.mu.Unlock()
	if gate != nil {
		<-gate
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken[path] {
		return nil, fmt.Errorf("open %s: %w", path, errBroken)
	}
	f.opens[path]++
	f.open[path]++
	return &fakeTable{tables: f, path: path}, nil
}

type fakeTable struct {
	tables *fakeTables
	path   string
	closed bool
}

// Lookup finds what the kernel finds: a listener on 127.0.0.1, else one everywhere.
func (t *fakeTable) Lookup(ports []uint16) (listen.Snapshot, error) {
	addrs, err := t.look()
	var out []netip.AddrPort
	for _, p := range ports {
		best := netip.AddrPort{}
		for _, a := range addrs {
			if a.Port() == p && (a.Addr().IsUnspecified() && !best.IsValid() || a.Addr().String() == "127.0.0.1") {
				best = a
			}
		}
		if best.IsValid() {
			out = append(out, best)
		}
	}
	return listen.NewSnapshot(out...), err
}

func (t *fakeTable) Read() (listen.Snapshot, error) {
	addrs, err := t.look()
	t.tables.with(func() {
		t.tables.dumps++
		if t.tables.torn {
			addrs = nil
		}
	})
	return listen.NewSnapshot(addrs...), err
}

func (t *fakeTable) look() ([]netip.AddrPort, error) {
	f := t.tables
	if f.cost > 0 {
		time.Sleep(f.cost)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads[t.path] = append(f.reads[t.path], time.Now())
	switch {
	case t.closed:
		return nil, errors.New("read after close")
	case f.broken[t.path]:
		return nil, errBroken
	}
	return f.addrs[t.path], nil
}

func (t *fakeTable) Close() error {
	t.tables.mu.Lock()
	defer t.tables.mu.Unlock()
	if t.closed {
		return errors.New("closed twice")
	}
	t.closed = true
	t.tables.open[t.path]--
	return nil
}

// notice is a state with the time at which it was told.
type notice struct {
	at    time.Duration // since the test's begin
	state readiness.State
}

// recorder records what one pod's callback is told.
type recorder struct {
	begin   time.Time
	mu      sync.Mutex
	notices []notice
}

func newRecorder() *recorder { return &recorder{begin: time.Now()} }

func (r *recorder) tell(s readiness.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notices = append(r.notices, notice{time.Since(r.begin), s})
}

func (r *recorder) take() []notice {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.notices
	r.notices = nil
	return out
}

func (r *recorder) last(t *testing.T) readiness.State {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.notices) == 0 {
		t.Fatal("nothing was told")
	}
	return r.notices[len(r.notices)-1].state
}

func key(name string) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: name, IfName: "eth0"}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// start runs a watcher over the tables until the test ends, or stop is called.
func start(tb testing.TB, tables *fakeTables, change func(*readiness.Config)) (w *readiness.Watcher, stop func()) {
	tb.Helper()
	cfg := readiness.Config{Open: tables.Open, Log: quiet()}
	if change != nil {
		change(&cfg)
	}
	w, err := readiness.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				tb.Error(err)
			}
		})
	}
	tb.Cleanup(stop)
	return w, stop
}

// watch watches pod name, at path name, and returns its recorder.
func watch(tb testing.TB, w *readiness.Watcher, name string, ports ...uint16) *recorder {
	tb.Helper()
	r := newRecorder()
	if err := w.Watch(key(name), readiness.Spec{Netns: name, Ports: ports, Inbound: true}, r.tell); err != nil {
		tb.Fatal(err)
	}
	return r
}

var meshListeners = []string{"[::]:15008", "127.0.0.1:15001", "127.0.0.1:15002"}

func withMesh(addrs ...string) []string { return slices.Concat(meshListeners, addrs) }

// A state is told once at first and then only when it changes; each of the mesh's
// listeners counts only at its own address (contract 4.2), each port only where
// the app hop reaches it, and a port that does not listen is not among them
// (XDS-27).
func TestState(t *testing.T) {
	tests := []struct {
		name  string
		addrs []string
		want  readiness.State
	}{
		{"nothing", nil, readiness.State{}},
		{"the mesh's listeners", meshListeners, readiness.State{Inbound: true, OutboundHTTP: true, OutboundTCP: true}},
		{"inbound on 0.0.0.0", []string{"0.0.0.0:15008"}, readiness.State{Inbound: true}},
		{"inbound on loopback only", []string{"127.0.0.1:15008"}, readiness.State{}},
		{"outbound on 0.0.0.0 is an app's", []string{"0.0.0.0:15001", "0.0.0.0:15002"}, readiness.State{}},
		{"outbound on ::1 only", []string{"[::1]:15001", "[::1]:15002"}, readiness.State{}},
		{"outbound HTTP", []string{"127.0.0.1:15001", "[::1]:15001"}, readiness.State{OutboundHTTP: true}},
		{"outbound TCP", []string{"127.0.0.1:15002"}, readiness.State{OutboundTCP: true}},
		{"one port of two", []string{"127.0.0.1:8080"}, readiness.State{Listening: []uint16{8080}}},
		{"both ports, ascending", []string{"[::]:9090", "0.0.0.0:8080"}, readiness.State{Listening: []uint16{8080, 9090}}},
		{"a port that is not served", []string{"0.0.0.0:7777"}, readiness.State{}},
		{
			"a port on the pod's address",
			[]string{"10.77.0.2:9090", "127.0.0.1:8080"},
			readiness.State{Listening: []uint16{8080}, Misbound: []readiness.Misbound{{Port: 9090, Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.2")}}}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", tt.addrs...)
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090, 8080, 9090)
				synctest.Wait()
				if got := r.take(); len(got) != 1 || !got[0].state.Equal(tt.want) || got[0].at != 0 {
					t.Fatalf("told %+v, want %+v once and at once", got, tt.want)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := r.take(); got != nil {
					t.Errorf("told again without a change: %+v", got)
				}
			})
		})
	}
}

// Ports and mesh listeners that come or go together are told together: a pod is
// never half promoted (MESH-50).
func TestStateIsWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 8080, 9090)
		time.Sleep(time.Minute)
		r.take()
		tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
		time.Sleep(time.Minute)
		tables.set("a")
		time.Sleep(time.Minute)
		synctest.Wait()
		got := r.take()
		all := readiness.State{Inbound: true, OutboundHTTP: true, OutboundTCP: true, Listening: []uint16{8080, 9090}}
		if len(got) != 2 || !got[0].state.Equal(all) || !got[1].state.Equal(readiness.State{}) {
			t.Errorf("told %+v", got)
		}
	})
}

// A misbound port is named with its addresses, for people.
func TestMisboundString(t *testing.T) {
	m := readiness.Misbound{Port: 9090, Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("::1")}}
	if got, want := m.String(), "9090 (only on 10.77.0.2, ::1)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A port is told as soon as the polls allow and never before: 10 ms after an ADD,
// 100 ms in its first half minute, 500 ms later; and so is its loss. After a
// change the polls are frequent again.
func TestLatency(t *testing.T) {
	tests := []struct {
		name  string
		after time.Duration
		bound time.Duration
	}{
		{"after an ADD", 30 * time.Millisecond, 10 * time.Millisecond},
		{"in the first seconds", 3 * time.Second, 100 * time.Millisecond},
		{"in the first half minute", 29 * time.Second, 100 * time.Millisecond},
		{"later", 10 * time.Minute, 500 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090)
				// Right after a poll, the worst time.
				time.Sleep(tt.after + time.Microsecond)
				synctest.Wait()
				r.take()
				change := time.Since(r.begin)
				tables.set("a", "127.0.0.1:9090")
				time.Sleep(time.Second)
				synctest.Wait()
				got := r.take()
				if len(got) != 1 || !slices.Equal(got[0].state.Listening, []uint16{9090}) {
					t.Fatalf("told %+v", got)
				}
				if d := got[0].at - change; d < 0 || d > tt.bound {
					t.Errorf("told after %v, want within %v", d, tt.bound)
				}
				lost := time.Since(r.begin)
				tables.set("a")
				time.Sleep(time.Second)
				synctest.Wait()
				got = r.take()
				if len(got) != 1 || got[0].state.Listening != nil {
					t.Fatalf("told %+v", got)
				}
				if d := got[0].at - lost; d > 100*time.Millisecond {
					t.Errorf("the loss was told after %v, want within 100ms of a change", d)
				}
			})
		})
	}
}

// A quiet pod is polled twice a second.
func TestQuietPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		before := tables.readCount("a")
		time.Sleep(time.Minute)
		if got := tables.readCount("a") - before; got < 119 || got > 121 {
			t.Errorf("%d polls a minute, want 120", got)
		}
	})
}

// Readiness that flaps five times a second for half a minute costs a few notices;
// what is told ends as it is, and each loss is told at the next poll (XDS-55).
func TestFlapping(t *testing.T) {
	for _, up := range []bool{true, false} {
		t.Run(fmt.Sprintf("ends up=%v", up), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 8080, 9090)
				time.Sleep(time.Minute)
				synctest.Wait()
				r.take()
				for range 30 * 5 {
					tables.set("a", withMesh("0.0.0.0:8080")...)
					time.Sleep(100 * time.Millisecond)
					tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
					time.Sleep(100 * time.Millisecond)
				}
				if !up {
					tables.set("a", withMesh("0.0.0.0:8080")...)
				}
				synctest.Wait()
				notices := r.take()
				if len(notices) == 0 || len(notices) > 6 {
					t.Errorf("%d notices of 300 changes", len(notices))
				}
				for _, n := range notices {
					if !slices.Contains(n.state.Listening, 8080) || !n.state.Inbound {
						t.Errorf("a port that did not flap was told as lost: %+v", n.state)
					}
				}
				time.Sleep(10 * time.Second)
				synctest.Wait()
				notices = append(notices, r.take()...)
				last := notices[len(notices)-1]
				if got := slices.Contains(last.state.Listening, 9090); got != up {
					t.Errorf("told in the end: %v, want %v", got, up)
				}
			})
		})
	}
}

// A port that comes and goes every few seconds for an hour is told a bounded
// number of times, and is never told as there while it is not.
func TestFlappingSlowly(t *testing.T) {
	for _, period := range []time.Duration{time.Second, 3 * time.Second, 7 * time.Second, 12 * time.Second} {
		t.Run(period.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090)
				var there int
				for begin := time.Now(); time.Since(begin) < time.Hour; there = 1 - there {
					tables.set("a", []string{"127.0.0.1:9090"}[:there]...)
					time.Sleep(period)
				}
				synctest.Wait()
				if n := len(r.take()); n > 12+2*int(time.Hour/(2*lastHold)) {
					t.Errorf("%d notices in an hour", n)
				}
			})
		})
	}
}

// lastHold is the longest time for which a port that flaps must stay.
const lastHold = 8 * time.Second

// An app that is restarted once is back as soon as it listens; after half a minute
// of calm so is one that had flapped.
func TestRestartIsNotHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", "127.0.0.1:9090")
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		restart := func() time.Duration {
			t.Helper()
			tables.set("a")
			time.Sleep(time.Second)
			tables.set("a", "127.0.0.1:9090")
			back := time.Now()
			for !slices.Contains(r.last(t).Listening, 9090) {
				time.Sleep(time.Millisecond)
				synctest.Wait()
			}
			return time.Since(back)
		}
		time.Sleep(time.Minute)
		if d := restart(); d > 101*time.Millisecond {
			t.Errorf("back after %v", d)
		}
		for range 5 {
			restart()
		}
		if d := restart(); d < 4*time.Second {
			t.Errorf("after seven losses in a row back after %v, want held back; the test has no subject", d)
		}
		time.Sleep(31 * time.Second)
		if d := restart(); d > 101*time.Millisecond {
			t.Errorf("after calm back after %v", d)
		}
	})
}

// What changes nothing for traffic is told at most once a second, and the last
// word is right.
func TestMisboundIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(5 * time.Second)
		r.take()
		for range 50 {
			tables.set("a", "[::1]:9090")
			time.Sleep(100 * time.Millisecond)
			tables.set("a")
			time.Sleep(100 * time.Millisecond)
		}
		tables.set("a", "[::1]:9090")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		got := r.take()
		if len(got) > 13 {
			t.Errorf("%d notices in twelve seconds", len(got))
		}
		if last := got[len(got)-1].state; len(last.Misbound) != 1 || last.Misbound[0].Port != 9090 {
			t.Errorf("last told %+v", last)
		}
	})
}

// A table that cannot be read leaves the state as it was, with the error; it is
// opened again, and what is right then is told (contract 4.8).
func TestReadError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		good := r.last(t)
		tables.with(func() { tables.broken["a"] = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		got := r.take()
		if len(got) < 2 || len(got) > 3 {
			t.Fatalf("told %+v, want the first state and the error", got)
		}
		for _, n := range got[1:] {
			if n.state.Err == nil || !slices.Equal(n.state.Listening, good.Listening) || !n.state.Inbound {
				t.Errorf("told %+v", n.state)
			}
		}
		tables.with(func() { tables.broken["a"] = false })
		tables.set("a", meshListeners...)
		time.Sleep(time.Second)
		synctest.Wait()
		if last := r.last(t); last.Err != nil || last.Listening != nil || !last.Inbound {
			t.Errorf("told %+v", last)
		}
		if tables.open["a"] != 1 || tables.opens["a"] != 2 {
			t.Errorf("%d tables open, opened %d times", tables.open["a"], tables.opens["a"])
		}
	})
}

// A namespace that cannot be opened is said at once.
func TestWatchError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.broken["a"] = true
		w, _ := start(t, tables, nil)
		err := w.Watch(key("a"), readiness.Spec{Netns: "a"}, func(readiness.State) { t.Error("told") })
		if !errors.Is(err, errBroken) || !strings.Contains(err.Error(), "watch a-eth0") {
			t.Errorf("error %v", err)
		}
		time.Sleep(time.Second)
	})
}

// The whole table, whose cost grows with the machine's listeners, is dumped only
// while something is missing that should be there, and then once a second.
func TestDumpsOnlyWhatIsMissing(t *testing.T) {
	tests := []struct {
		name    string
		addrs   []string
		inbound bool
		want    int // in the first minute, at most
	}{
		{"all there", withMesh("127.0.0.1:9090"), true, 0},
		{"a client", []string{"127.0.0.1:15001", "127.0.0.1:15002", "0.0.0.0:9090"}, false, 0},
		{"a port is missing", meshListeners, true, 61},
		{"the inbound listener is missing", []string{"127.0.0.1:15001", "127.0.0.1:15002", "0.0.0.0:9090"}, true, 61},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", tt.addrs...)
				w, _ := start(t, tables, nil)
				if err := w.Watch(key("a"), readiness.Spec{Netns: "a", Ports: []uint16{9090}, Inbound: tt.inbound}, func(readiness.State) {}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if tables.dumps > tt.want || tables.dumps < tt.want-3 {
					t.Errorf("%d dumps in a minute, want %d", tables.dumps, tt.want)
				}
			})
		})
	}
}

// A dump that missed a socket, because the table changed, is no loss.
func TestTornDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:8080")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 8080, 9090)
		time.Sleep(time.Minute)
		r.take()
		tables.with(func() { tables.torn = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.take(); got != nil {
			t.Errorf("told %+v", got)
		}
	})
}

// Something of the app's on 127.0.0.1:15008 neither counts as the mesh's inbound
// listener nor hides it.
func TestHiddenInbound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:15008", "127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.take(); len(got) != 1 || !got[0].state.Inbound {
			t.Errorf("told %+v, want the inbound listener once", got)
		}
		tables.set("a", "127.0.0.1:15001", "127.0.0.1:15002", "127.0.0.1:15008", "127.0.0.1:9090")
		time.Sleep(time.Second)
		synctest.Wait()
		if r.last(t).Inbound {
			t.Error("the app's listener counts as the mesh's")
		}
	})
}

// Kick polls at once and keeps the polls frequent for a while.
func TestKick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		w.Kick(key("unknown"))
		time.Sleep(time.Minute + time.Millisecond)
		synctest.Wait()
		r.take()
		tables.set("a", "127.0.0.1:9090")
		w.Kick(key("a"))
		synctest.Wait()
		if got := r.take(); len(got) != 1 {
			t.Errorf("told %+v, want the port at once", got)
		}
		time.Sleep(time.Minute) // calm again
		before := tables.readCount("a")
		w.Kick(key("a"))
		time.Sleep(time.Second)
		if got := tables.readCount("a") - before; got < 9 {
			t.Errorf("%d polls in the second after", got)
		}
	})
}

// slowInterval is the longest time between two polls.
const slowInterval = 500 * time.Millisecond

// A callback that hangs delays its own pod alone; when it is back it is told the
// newest state once, and nothing that it knows already.
func TestSlowCallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		gate := make(chan struct{})
		slow := newRecorder()
		if err := w.Watch(key("slow"), readiness.Spec{Netns: "slow", Ports: []uint16{9090}}, func(s readiness.State) {
			slow.tell(s)
			<-gate
		}); err != nil {
			t.Fatal(err)
		}
		quick := watch(t, w, "quick", 9090)
		synctest.Wait()
		change := func(addrs ...string) {
			tables.set("slow", addrs...)
			tables.set("quick", addrs...)
			time.Sleep(slowInterval)
			synctest.Wait()
		}
		change("127.0.0.1:9090")
		change()
		change("127.0.0.1:9090")
		if n := len(quick.take()); n != 4 {
			t.Errorf("the quick callback was told %d times, want 4", n)
		}
		if n := len(slow.take()); n != 1 {
			t.Errorf("the slow callback was told %d times while it hung", n)
		}
		gate <- struct{}{}
		synctest.Wait()
		if got := slow.take(); len(got) != 1 || !slices.Equal(got[0].state.Listening, []uint16{9090}) {
			t.Errorf("told %+v, want the newest state", got)
		}
		time.Sleep(time.Minute)
		change()
		change("127.0.0.1:9090") // what the callback, which hangs again, was told last
		close(gate)
		synctest.Wait()
		if got := slow.take(); len(got) != 0 {
			t.Errorf("told what it knew: %+v", got)
		}
	})
}

// When Forget returns the callback has returned, is never called again, and the
// namespace is free.
func TestForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		w.Forget(key("unknown"))
		gate := make(chan struct{})
		calls := 0
		if err := w.Watch(key("a"), readiness.Spec{Netns: "a", Ports: []uint16{9090}}, func(readiness.State) {
			calls++
			<-gate
		}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		forgotten := make(chan struct{})
		go func() {
			w.Forget(key("a"))
			close(forgotten)
		}()
		synctest.Wait()
		select {
		case <-forgotten:
			t.Error("Forget returned while the callback ran")
		default:
		}
		if tables.open["a"] != 0 {
			t.Error("the namespace waits for the callback")
		}
		tables.set("a", "127.0.0.1:9090")
		close(gate)
		<-forgotten
		time.Sleep(time.Second)
		if calls != 1 {
			t.Errorf("%d calls", calls)
		}
	})
}

// Watching an attachment anew replaces everything of the first watch.
func TestWatchAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", "127.0.0.1:8080", "127.0.0.1:9090")
		w, _ := start(t, tables, nil)
		first := watch(t, w, "a", 8080)
		synctest.Wait()
		first.take()
		second := watch(t, w, "a", 8080, 9090)
		synctest.Wait()
		tables.set("a")
		time.Sleep(time.Second)
		synctest.Wait()
		if got := first.take(); got != nil {
			t.Errorf("the first callback was told %+v", got)
		}
		if got := second.take(); len(got) != 2 || !slices.Equal(got[0].state.Listening, []uint16{8080, 9090}) {
			t.Errorf("the second callback was told %+v", got)
		}
		if tables.open["a"] != 1 {
			t.Errorf("%d tables open", tables.open["a"])
		}
	})
}

// The callback of a second watch never runs beside the first one's.
func TestWatchAnewWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		gate := make(chan struct{})
		if err := w.Watch(key("a"), readiness.Spec{Netns: "a"}, func(readiness.State) { <-gate }); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		second := newRecorder()
		done := make(chan error, 1)
		go func() { done <- w.Watch(key("a"), readiness.Spec{Netns: "a"}, second.tell) }()
		time.Sleep(time.Second)
		if got := second.take(); got != nil {
			t.Errorf("the second callback was told %+v while the first one ran", got)
		}
		close(gate)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		second.last(t)
	})
}

// Of several watches of one attachment at one time one stays, with one table.
func TestWatchTwiceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		gate := make(chan struct{})
		tables.gate = gate
		w, _ := start(t, tables, nil)
		var all [3]*recorder
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() { all[i] = watch(t, w, "a", 9090) })
		}
		synctest.Wait()
		close(gate)
		wg.Wait()
		synctest.Wait()
		for _, r := range all {
			r.take()
		}
		tables.set("a", "127.0.0.1:9090")
		time.Sleep(time.Second)
		synctest.Wait()
		told := 0
		for _, r := range all {
			told += len(r.take())
		}
		if told != 1 || tables.open["a"] != 1 {
			t.Errorf("%d callbacks told of one change, %d tables open", told, tables.open["a"])
		}
	})
}

// When Run ends nothing is open and nothing runs, and Watch says so.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, stop := start(t, tables, nil)
		for i := range 5 {
			watch(t, w, fmt.Sprint(i), 9090)
		}
		synctest.Wait()
		stop()
		if err := w.Watch(key("late"), readiness.Spec{Netns: "late"}, func(readiness.State) {}); err == nil || !strings.Contains(err.Error(), "has stopped") {
			t.Errorf("error %v", err)
		}
		for path, n := range tables.open {
			if n != 0 {
				t.Errorf("%s is open", path)
			}
		}
		w.Forget(key("0"))
		w.Kick(key("0"))
	})
}

// With 200 pods the poller works a quarter of the time at most while all of them
// are new, and every one of them is told soon all the same.
func TestCostOfManyPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.cost = 50 * time.Microsecond
		w, _ := start(t, tables, nil)
		var all []*recorder
		for i := range 200 {
			tables.set(fmt.Sprint(i), withMesh("0.0.0.0:9090")...)
			all = append(all, watch(t, w, fmt.Sprint(i), 9090))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		reads := 0
		for i, r := range all {
			reads += tables.readCount(fmt.Sprint(i))
			if got := r.take(); len(got) != 1 || got[0].at > 100*time.Millisecond {
				t.Fatalf("pod %d was told %+v", i, got)
			}
		}
		if share := time.Duration(reads) * tables.cost; share > 2*time.Second/4+10*time.Millisecond {
			t.Errorf("%v of 2s were spent in reading", share)
		}
	})
}

// A pod whose table is expensive to read is polled less, and no pod waits for it
// more than the length of one read.
func TestCostOfOnePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.cost = 50 * time.Millisecond
		tables.set("big", withMesh("0.0.0.0:9090")...)
		w, _ := start(t, tables, nil)
		watch(t, w, "big", 9090)
		time.Sleep(time.Minute)
		if got := tables.readCount("big"); got < 55 || got > 62 {
			t.Errorf("%d reads of 50ms in a minute, want one a second", got)
		}
	})
}

// Whatever is watched, kicked and forgotten at one time, in the end exactly what
// is watched is open and told.
func TestRandomly(t *testing.T) {
	tables := newFakeTables()
	w, stop := start(t, tables, nil)
	const names, workers = 6, 8
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 7))
			for range 300 {
				name := fmt.Sprint(rnd.IntN(names))
				switch rnd.IntN(4) {
				case 0:
					w.Forget(key(name))
				case 1:
					w.Kick(key(name))
				case 2:
					tables.set(name, []string{"127.0.0.1:9090"}[:rnd.IntN(2)]...)
				default:
					if err := w.Watch(key(name), readiness.Spec{Netns: name, Ports: []uint16{9090}}, func(readiness.State) {}); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	told := make(chan readiness.State, 16)
	for i := range names {
		name := fmt.Sprint(i)
		tables.set(name, "127.0.0.1:9090")
		if err := w.Watch(key(name), readiness.Spec{Netns: name, Ports: []uint16{9090}}, func(s readiness.State) { told <- s }); err != nil {
			t.Fatal(err)
		}
	}
	for range names {
		if s := <-told; !slices.Equal(s.Listening, []uint16{9090}) || s.Err != nil {
			t.Errorf("told %+v", s)
		}
	}
	tables.with(func() {
		for i := range names {
			if n := tables.open[fmt.Sprint(i)]; n != 1 {
				t.Errorf("pod %d has %d open tables", i, n)
			}
		}
	})
	stop()
	for path, n := range tables.open {
		if n != 0 {
			t.Errorf("%s has %d open tables after the end", path, n)
		}
	}
}

// The metrics count pods, polls, errors and notices.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		reg := prometheus.NewRegistry()
		w, _ := start(t, tables, func(c *readiness.Config) { c.Metrics = reg })
		watch(t, w, "a", 9090)
		watch(t, w, "b", 9090)
		synctest.Wait()
		tables.with(func() { tables.broken["a"] = true })
		w.Kick(key("a"))
		synctest.Wait()
		w.Forget(key("b"))
		list, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range list {
			got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
		}
		want := map[string]float64{
			"portolan_readiness_pods":               1,
			"portolan_readiness_polls_total":        3,
			"portolan_readiness_poll_errors_total":  1,
			"portolan_readiness_poll_seconds_total": 0,
			"portolan_readiness_changes_total":      2,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if _, err := readiness.New(readiness.Config{Open: tables.Open, Log: quiet(), Metrics: reg}); err == nil {
			t.Error("two watchers share one registry")
		}
	})
}

// A watcher without its necessary parts is refused.
func TestNewRefuses(t *testing.T) {
	if _, err := readiness.New(readiness.Config{Log: quiet()}); err == nil {
		t.Error("no error without Open")
	}
	if _, err := readiness.New(readiness.Config{Open: newFakeTables().Open}); err == nil {
		t.Error("no error without a log")
	}
}
