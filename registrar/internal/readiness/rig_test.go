package readiness_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

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
