package attach

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// orchestra is an orchestrator whose pods the test sets.
type orchestra struct {
	mu        sync.Mutex
	pods      map[string]model.Workload // by object UID
	unsynced  bool
	sandboxes []*cniv1.AddRequest
	lists     int  // of the sandboxes
	hangs     bool // the runtime does not answer
	reports   []string
	heard     int // so many reports were returned by told
}

func (o *orchestra) Lookup(ctx context.Context, namespace, name, uid string) (model.Workload, error) {
	if w, ok := o.Known(namespace, name, uid); ok {
		return w, nil
	}
	<-ctx.Done()
	return model.Workload{}, ctx.Err()
}

func (o *orchestra) Known(namespace, name, uid string) (model.Workload, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, w := range o.pods {
		if w.Namespace == namespace && w.Name == name && (uid == "" || w.UID == uid || w.ObjectUID == uid) {
			return w, true
		}
	}
	return model.Workload{}, false
}

func (o *orchestra) Pods() ([]model.Workload, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []model.Workload
	for _, w := range o.pods {
		out = append(out, w)
	}
	slices.SortFunc(out, func(a, b model.Workload) int { return strings.Compare(a.UID, b.UID) })
	return out, !o.unsynced
}

func (o *orchestra) List(ctx context.Context) ([]*cniv1.AddRequest, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lists++
	if o.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if o.sandboxes == nil {
		return nil, errors.New("the runtime is away")
	}
	return o.sandboxes, nil
}

func (o *orchestra) Report(w model.Workload, reason, message string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reports = append(o.reports, w.Ref()+" "+reason+": "+message)
}

func (o *orchestra) set(w model.Workload) model.Workload {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pods[w.ObjectUID] = w
	return w
}

// orchestrated returns a Manager in a cluster.
func orchestrated(t *testing.T) (*world, *orchestra, *Manager) {
	t.Helper()
	w, m := setup(t)
	return w, join(m), m
}

// serving returns a Manager in a cluster whose pod payments-1, of multiPort, is attached as
// c1 and listens on these ports.
func serving(t *testing.T, ports ...uint16) (*world, *orchestra, *Manager) {
	t.Helper()
	w, o, m := orchestrated(t)
	o.set(workload(multiPort()))
	mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
	w.listen(key("c1"), listening(ports...))
	return w, o, m
}

// restarted returns the Manager of a next process on the same node, before Restore, and its
// orchestrator, which has not said anything yet.
func restarted(t *testing.T, w *world, m *Manager) (*orchestra, *Manager) {
	t.Helper()
	again := newManager(t, w, m.cfg.DB)
	return join(again), again
}

func join(m *Manager) *orchestra {
	o := &orchestra{pods: map[string]model.Workload{}}
	m.cfg.Workloads, m.cfg.Sandboxes, m.cfg.Reporter = o, o, o
	m.cfg.Bypass = []string{"kube-system"}
	return o
}

// workload is the pod that addRequest("c1", "payments-1", …) tells of.
func workload(annotations map[string]string) model.Workload {
	return model.Workload{
		Namespace: "default", Name: "payments-1", UID: "u1", ObjectUID: "u1", Account: "till",
		Annotations: annotations, Running: true, Ready: true,
	}
}

func listening(ports ...uint16) PortState {
	return PortState{Inbound: true, OutboundHTTP: true, OutboundTCP: true, Listening: ports}
}

func (w *world) listen(k model.AttachmentKey, s PortState) {
	w.mu.Lock()
	fn := w.watchers[k]
	w.mu.Unlock()
	fn(s)
}

// count is how often that was noted.
func (w *world) count(event string) (n int) {
	for _, e := range w.events() {
		if e == event {
			n++
		}
	}
	return n
}

func (w *world) record(uid string) string {
	ep, ok := w.endpoints()[uid]
	if !ok {
		return "none"
	}
	_, ports, _ := strings.Cut(describe(ep), " ")
	return ports
}
