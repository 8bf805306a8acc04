package installer

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; only a broken installer uses it up.
const patience = 30 * time.Second

// testNode is the part of a node that an installer sees.
type testNode struct {
	t    *testing.T
	cfg  Config
	conf string
	logs *logs
	mu   sync.Mutex
	time time.Time // guarded by mu
	// metrics of each installer.
	metrics map[*Installer]*prometheus.Registry
}

// logs keeps what was logged.
type logs struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newTestNode makes empty folders, and a plugin to install. The clock moves only by
// advance.
func newTestNode(t *testing.T) *testNode {
	t.Helper()
	dir := t.TempDir()
	n := &testNode{t: t, conf: filepath.Join(dir, "net.d"), logs: &logs{}, time: time.Unix(1e9, 0), metrics: make(map[*Installer]*prometheus.Registry)}
	source := filepath.Join(dir, "portolan.source")
	if err := os.WriteFile(source, []byte(strings.Repeat("the plugin ", 20000)), 0o600); err != nil {
		t.Fatal(err)
	}
	n.cfg = Config{
		ConfDir: n.conf, BinDir: filepath.Join(dir, "bin"), Source: source, OwnedName: "02-own.conflist", Instance: "a",
		Poll: time.Hour, Now: n.now, Log: slog.New(slog.NewTextHandler(n.logs, nil)),
	}
	if err := os.Mkdir(n.conf, 0o750); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *testNode) now() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.time
}

func (n *testNode) advance(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.time = n.time.Add(d)
}

// installer makes an Installer that is not running.
func (n *testNode) installer(change func(*Config)) *Installer {
	n.t.Helper()
	cfg, reg := n.cfg, prometheus.NewRegistry()
	cfg.Metrics = reg
	if change != nil {
		change(&cfg)
	}
	i, err := New(cfg)
	if err != nil {
		n.t.Fatal(err)
	}
	n.metrics[i] = reg
	return i
}

// run runs an Installer; stop ends it and waits.
func (n *testNode) run(change func(*Config)) (i *Installer, stop func()) {
	n.t.Helper()
	i = n.installer(change)
	ctx, cancel := context.WithCancel(n.t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Errorf("the installer ended with %v", err)
		}
	})
	n.t.Cleanup(stop)
	return i, stop
}

// put writes a file in place, as a primary does by a redirection of a shell.
func put(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (n *testNode) put(name, text string) { n.t.Helper(); put(n.t, n.conf, name, text) }

// putAtomically writes a file beside and renames it.
func (n *testNode) putAtomically(name, text string) {
	n.t.Helper()
	put(n.t, n.conf, name+".new", text)
	n.rename(name+".new", name)
}

func (n *testNode) rename(from, to string) {
	n.t.Helper()
	if err := os.Rename(filepath.Join(n.conf, from), filepath.Join(n.conf, to)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *testNode) remove(name string) {
	n.t.Helper()
	if err := os.Remove(filepath.Join(n.conf, name)); err != nil {
		n.t.Fatal(err)
	}
}

// read returns a file, "" if there is none.
func (n *testNode) read(name string) string {
	n.t.Helper()
	text, err := os.ReadFile(filepath.Join(n.conf, name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	return string(text)
}

// names lists the configurations.
func (n *testNode) names() []string {
	n.t.Helper()
	paths, err := libcni.ConfFiles(n.conf, []string{".conf", ".conflist", ".json"})
	if err != nil {
		n.t.Fatal(err)
	}
	slices.Sort(paths)
	for k := range paths {
		paths[k] = filepath.Base(paths[k])
	}
	return paths
}

// load is what containerd does when it reloads: the first file, by libcni. Its own
// code is not in our modules; libcni does the reading there as here.
func load(dir string) (*libcni.NetworkConfigList, error) {
	paths, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, errors.New("no network configuration")
	}
	slices.Sort(paths)
	if filepath.Ext(paths[0]) == ".conflist" {
		return libcni.ConfListFromFile(paths[0])
	}
	text, err := os.ReadFile(paths[0])
	if err != nil {
		return nil, err
	}
	conf, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(conf) //nolint:staticcheck // SA1019: containerd calls it, and we stand for that
}

// types are the plugins that the runtime would call.
func (n *testNode) types() string {
	l, err := load(n.conf)
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, p := range l.Plugins {
		out = append(out, p.Network.Type)
	}
	return strings.Join(out, ",")
}

// await waits until the runtime would call these plugins.
func (n *testNode) await(types string) {
	n.t.Helper()
	eventually(n.t, "the chain "+types, func() bool { return n.types() == types })
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	end := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("%s did not come about", what)
		}
		<-tick.C
	}
}

// metric reads one of an installer's metrics.
func (n *testNode) metric(i *Installer, name string) int {
	n.t.Helper()
	families, err := n.metrics[i].Gather()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "portolan_cni_"+name {
			m := f.GetMetric()[0]
			return int(m.GetGauge().GetValue() + m.GetCounter().GetValue())
		}
	}
	n.t.Fatalf("there is no metric %s", name)
	return 0
}
