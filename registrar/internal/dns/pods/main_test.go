package pods_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// The tests run in a sandbox: real namespaces, nothing left behind. No pod leaves
// a goroutine behind either.
func TestMain(m *testing.M) {
	os.Exit(sandbox.Run(func() int {
		code := m.Run()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		return code
	}))
}

const (
	port  = 15053
	addr4 = "127.0.0.1:15053"
	addr6 = "[::1]:15053"
)

// fakeAlive records what is done to the capture of one namespace.
type fakeAlive struct {
	mu        sync.Mutex
	refreshed int
	withdrawn int
	open      int
	// refuse makes Refresh fail.
	refuse error
	// onRefresh and onWithdraw are called before, without the lock.
	onRefresh, onWithdraw func()
}

var errNoTable = errors.New("table inet portolan is missing")

func (a *fakeAlive) Refresh() error {
	if a.onRefresh != nil {
		a.onRefresh()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refuse != nil {
		return a.refuse
	}
	a.refreshed++
	return nil
}

func (a *fakeAlive) Withdraw() error {
	if a.onWithdraw != nil {
		a.onWithdraw()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.withdrawn++
	return nil
}

func (a *fakeAlive) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open--
	return nil
}

func (a *fakeAlive) setRefuse(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuse = err
}

func (a *fakeAlive) counts() (refreshed, withdrawn, open int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refreshed, a.withdrawn, a.open
}

// world is a set with what is around it.
type world struct {
	set     *pods.Set
	table   *table.Table
	limiter *forward.Limiter
	metrics *prometheus.Registry

	mu     sync.Mutex
	alives map[string]*fakeAlive
	// changes counts the reports about each pod.
	changes map[model.AttachmentKey]int
}

// alive is the capture of a namespace, before or after it was opened.
func (w *world) alive(netns string) *fakeAlive {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.alives[netns] == nil {
		w.alives[netns] = &fakeAlive{}
	}
	return w.alives[netns]
}

func (w *world) openAlive(netns string) (pods.Alive, error) {
	a := w.alive(netns)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open++
	return a, nil
}

// newWorld has payments.aether.internal and an upstream resolver.
func newWorld(tb testing.TB, change func(*pods.Config)) *world {
	tb.Helper()
	w := &world{
		table: table.New(), limiter: forward.NewLimiter(forward.DefaultLimits()), metrics: prometheus.NewRegistry(),
		alives: map[string]*fakeAlive{}, changes: map[model.AttachmentKey]int{},
	}
	upstream := dnstest.NewResolver(tb, nil, "127.0.0.1:0")
	vip := table.VIP{V4: netip.MustParseAddr("198.18.0.1"), V6: netip.MustParseAddr("fd70:6f72:746f::1")}
	if _, err := w.table.Apply(table.Change{
		Full: true, Settings: &table.Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{upstream.Addr}},
		SetNames: map[string]table.VIP{"payments.aether.internal": vip},
	}); err != nil {
		tb.Fatal(err)
	}
	f := forward.New(forward.Config{Metrics: forward.NewMetrics(w.metrics)})
	tb.Cleanup(f.Close)
	cfg := pods.Config{
		Responder: responder.New(w.table), Forwarder: f, Limiter: w.limiter, Upstreams: w.table.Upstreams,
		OpenAlive: w.openAlive, Metrics: pods.NewMetrics(w.metrics), Log: slog.New(slog.DiscardHandler), Port: port,
		OnChange: func(k model.AttachmentKey) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.changes[k]++
		},
	}
	if change != nil {
		change(&cfg)
	}
	w.set = pods.New(cfg)
	tb.Cleanup(w.set.Close)
	return w
}

func key(name string) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: name, IfName: "eth0"}
}

func (w *world) put(tb testing.TB, list ...table.Pod) {
	tb.Helper()
	w.set.Apply(tb.Context(), nil, list)
}

func (w *world) remove(tb testing.TB, names ...string) {
	tb.Helper()
	var keys []model.AttachmentKey
	for _, n := range names {
		keys = append(keys, key(n))
	}
	w.set.Apply(tb.Context(), keys, nil)
}

func (w *world) status(tb testing.TB, name string) pods.Status {
	tb.Helper()
	st, ok := w.set.Status(key(name))
	if !ok {
		tb.Fatalf("pod %s is not in the set", name)
	}
	return st
}

// metric returns the value of a metric without labels.
func (w *world) metric(tb testing.TB, name string) float64 {
	tb.Helper()
	families, err := w.metrics.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	tb.Fatalf("no metric %s", name)
	return 0
}
