package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bolt "go.etcd.io/bbolt"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// world is everything around a Manager, recording what it was told, in order.
type world struct {
	mu        sync.Mutex
	log       []string
	published map[string]model.Endpoint
	watchers  map[model.AttachmentKey]func(PortState)
	gone      map[model.AttachmentKey]bool
	tcp       map[model.AttachmentKey][]netip.AddrPort

	missing      string
	noListeners  bool // listeners are never acknowledged
	noSecrets    bool
	dnsErr       error
	signErr      error
	signHangs    bool // nobody answers who asks for a certificate
	silentListen bool // the listen table never shows the mesh ports
	unread       bool // the listen table is never read
	removeErr    error
	ensureErr    error            // captures are not programmed
	onPublish    func()           // called once, before a record is taken
	onReady      func()           // called when an ADD has been decided
	onTell       func()           // called once, when the mesh is told of a pod
	connected    int              // so many looks find connections to the pod
	tcpPorts     []netip.AddrPort // of the mesh
}

func newWorld() *world {
	return &world{
		published: map[string]model.Endpoint{}, watchers: map[model.AttachmentKey]func(PortState){},
		gone: map[model.AttachmentKey]bool{}, tcp: map[model.AttachmentKey][]netip.AddrPort{},
	}
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, fmt.Sprintf(format, args...))
}

func (w *world) events() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.log)
}

func (w *world) endpoints() map[string]model.Endpoint {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]model.Endpoint{}
	maps.Copy(out, w.published)
	return out
}

// The parts that Manager calls.

func (w *world) Missing() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.missing
}

func (w *world) AwaitReady(context.Context) error {
	if w.onReady != nil {
		w.onReady()
	}
	if missing := w.Missing(); missing != "" {
		return errors.New(missing)
	}
	return nil
}

func (w *world) AddPod(p model.Pod) {
	w.note("mesh add %s", p.Key)
	w.mu.Lock()
	hook := w.onTell
	w.onTell = nil
	w.mu.Unlock()
	if hook != nil {
		hook()
	}
}

func (w *world) RemovePod(k model.AttachmentKey) { w.note("mesh remove %s", k) }
func (w *world) TCPPorts() []netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tcpPorts
}

func (w *world) AwaitWithdrawn(_ context.Context, _ model.ServiceKey, uid string) error {
	w.note("await withdrawn %s", uid)
	return nil
}

func (w *world) AwaitListeners(ctx context.Context, k model.AttachmentKey) error {
	w.note("await listeners %s", k)
	w.mu.Lock()
	hang := w.noListeners
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (w *world) AwaitSecrets(ctx context.Context, k model.AttachmentKey) error {
	w.note("await secrets %s", k)
	if w.noSecrets {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (w *world) Publish(_ context.Context, ep model.Endpoint) error {
	w.note("publish %s", describe(ep))
	w.mu.Lock()
	hook := w.onPublish
	w.onPublish = nil
	w.mu.Unlock()
	if hook != nil {
		hook()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if old, ok := w.published[ep.UID]; ok && old.Generation >= ep.Generation {
		return fmt.Errorf("generation %d after %d", ep.Generation, old.Generation)
	}
	w.published[ep.UID] = ep
	return nil
}

func (w *world) Withdraw(_ context.Context, uid string, _ uint64) error {
	w.note("withdraw %s", uid)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.published, uid)
	return nil
}

type fakeIdentities struct{ w *world }

func (f fakeIdentities) Ensure(ctx context.Context, id model.Identity) error {
	f.w.note("ensure %s", id.Account)
	if f.w.signHangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return f.w.signErr
}
func (f fakeIdentities) Release(id model.Identity) { f.w.note("release %s", id.Account) }

type fakeNames struct{ w *world }

func (f fakeNames) Missing() string                 { return "" }
func (f fakeNames) SetPod(p model.Pod)              { f.w.note("dns add %s", p.Key) }
func (f fakeNames) RemovePod(k model.AttachmentKey) { f.w.note("dns remove %s", k) }
func (f fakeNames) AwaitPod(_ context.Context, k model.AttachmentKey) error {
	f.w.note("await dns %s", k)
	return f.w.dnsErr
}

type fakeReadiness struct{ w *world }

func (f fakeReadiness) Watch(p model.Pod, fn func(PortState)) error {
	f.w.mu.Lock()
	f.w.watchers[p.Key] = fn
	silent, unread := f.w.silentListen, f.w.unread
	f.w.mu.Unlock()
	if unread {
		return nil
	}
	if silent {
		fn(PortState{OutboundHTTP: true})
		return nil
	}
	fn(PortState{Inbound: true, OutboundHTTP: true, OutboundTCP: true})
	return nil
}

func (f fakeReadiness) Kick(k model.AttachmentKey) { f.w.note("kick %s", k) }

func (f fakeReadiness) Forget(k model.AttachmentKey) {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	delete(f.w.watchers, k)
}

type fakeCapture struct{ w *world }

func (f fakeCapture) SetTCPPorts(p model.Pod, ports []netip.AddrPort) error {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	f.w.tcp[p.Key] = ports
	return nil
}

func (f fakeCapture) Ensure(p model.Pod, _ []netip.AddrPort) (bool, error) {
	f.w.note("ensure capture %s", p.Key)
	return false, f.w.ensureErr
}

func (f fakeCapture) Gone(p model.Pod) bool {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	return f.w.gone[p.Key]
}

func (f fakeCapture) Connected(p model.Pod) (bool, error) {
	f.w.note("connected %s", p.Key)
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	f.w.connected--
	return f.w.connected >= 0, nil
}

func (f fakeCapture) Disconnect(p model.Pod) error {
	f.w.note("disconnect %s", p.Key)
	return nil
}

func (f fakeCapture) Remove(p model.Pod) error {
	f.w.note("uncapture %s", p.Key)
	return f.w.removeErr
}

func (f fakeCapture) Unpin(k model.AttachmentKey) error { f.w.note("unpin %s", k); return nil }

func describe(ep model.Endpoint) string {
	parts := make([]string, 0, len(ep.Ports))
	for _, p := range ep.Ports {
		parts = append(parts, fmt.Sprintf("%d=%s", p.Number, p.Health))
	}
	return ep.UID + " " + strings.Join(parts, ",")
}

func openDB(t *testing.T, path string) *bolt.DB {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func newManager(t *testing.T, w *world, db *bolt.DB) *Manager {
	t.Helper()
	m, err := New(Config{
		DB: db, Log: slog.New(slog.DiscardHandler), Node: "node1", TrustDomain: "aether.internal",
		NetnsDir: t.TempDir(), SpoolDir: t.TempDir(), DrainWait: time.Second, SweepInterval: time.Hour, Now: time.Now,
		Mesh: w, Registry: w, Identities: fakeIdentities{w}, Names: fakeNames{w},
		Readiness: fakeReadiness{w}, Capture: fakeCapture{w},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// emptyDB is a state file with nothing in it.
func emptyDB(t *testing.T) *bolt.DB {
	t.Helper()
	return openDB(t, filepath.Join(t.TempDir(), "state.db"))
}

// metered returns a Manager like m, on the same state, and what it has counted.
func metered(t *testing.T, m *Manager) (*Manager, func() map[string]float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	cfg := m.cfg
	cfg.Metrics = reg
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m, func() map[string]float64 {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, s := range f.GetMetric() {
				name := f.GetName()
				for _, l := range s.GetLabel() {
					name += " " + l.GetName() + "=" + l.GetValue()
				}
				got[name] = s.GetCounter().GetValue() + s.GetGauge().GetValue() + float64(s.GetHistogram().GetSampleCount())
			}
		}
		return got
	}
}

// setup returns a Manager of a machine of its own.
func setup(t *testing.T) (*world, *Manager) {
	t.Helper()
	w := newWorld()
	return w, newManager(t, w, emptyDB(t))
}

func addRequest(id, name, ip string, annotations map[string]string) *cniv1.AddRequest {
	return &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: id, Ifname: "eth0"},
		Network:    "podnet", Netns: "/run/portolan/netns/" + id + "-eth0", RuntimeNetns: "/run/netns/" + id,
		Addresses: []string{ip}, CniArgs: map[string]string{argName: name, argNamespace: "default"},
		Annotations: annotations, AnnotationsKnown: true,
	}
}

func multiPort() map[string]string {
	return map[string]string{"endpoint.aether.io/ports": "8080,9090=h2", "endpoint.aether.io/service": "payments"}
}

func mustAdd(t *testing.T, m *Manager, req *cniv1.AddRequest) {
	t.Helper()
	if err := m.Add(t.Context(), req, func(Decision) error { return nil }); err != nil {
		t.Fatalf("Add: %v", err)
	}
}

func key(id string) model.AttachmentKey { return model.AttachmentKey{ContainerID: id, IfName: "eth0"} }

// attachedIDs are the container IDs of what is attached.
func attachedIDs(m *Manager) []string {
	out := []string{}
	for _, p := range m.Pods() {
		out = append(out, p.Key.ContainerID)
	}
	return out
}
