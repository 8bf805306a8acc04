package birthtaint

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

// CNI-18, on a real API server: the taint of this node alone goes, when the registrar is
// ready and not before; other taints stay, also one that comes at the same time. A node
// that never had it is reported and not changed; one that had it is no news later.
func TestRemove(t *testing.T) {
	server := apiservertest.Start(t)
	admin := kubernetes.NewForConfigOrDie(server.Admin())
	mine := []corev1.Taint{{Key: Key, Effect: corev1.TaintEffectNoSchedule}, {Key: Key, Effect: corev1.TaintEffectNoExecute}}
	other := corev1.Taint{Key: "gpu", Value: "yes", Effect: corev1.TaintEffectNoSchedule}
	for name, taints := range map[string][]corev1.Taint{"born": append(slices.Clone(mine), other), "plain": {other}, "elsewhere": mine} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints}}
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) *corev1.Node {
		t.Helper()
		node, err := admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return node
	}

	late := corev1.Taint{Key: "node.kubernetes.io/disk-pressure", Effect: corev1.TaintEffectNoSchedule}
	client := &raced{NodesGetter: admin.CoreV1(), before: func() {
		node := get("born")
		node.Spec.Taints = append(node.Spec.Taints, late)
		if _, err := admin.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
	}}
	var asked atomic.Int32
	r := newRig(t, client, "born", func() bool {
		if asked.Add(1) < 3 {
			if got := keys(get("born").Spec.Taints); len(got) < 2 || got[0] != Key || got[1] != Key {
				t.Error("the taint is gone before the registrar is ready")
			}
			return false
		}
		return true
	})
	r.run()
	if asked.Load() < 3 {
		t.Error("the taint was removed before the registrar was ready")
	}
	// The API server itself adds the second one to a new node.
	want := []string{"gpu", "node.kubernetes.io/not-ready", late.Key}
	if got := get("born").Spec.Taints; !slices.Equal(keys(got), want) || got[0] != other {
		t.Errorf("taints %v, want %v", got, want)
	}
	if r.metric("portolan_node_taint_errors_total") != 1 || r.metric("portolan_node_not_born_tainted") != 0 {
		t.Errorf("metrics; log %s", r.log.String())
	}

	r = newRig(t, admin.CoreV1(), "born", ready)
	r.run()
	if r.log.String() != "" || r.metric("portolan_node_not_born_tainted") != 0 {
		t.Errorf("a later start says %s", r.log.String())
	}

	before := get("plain")
	r = newRig(t, admin.CoreV1(), "plain", ready)
	r.run()
	if !strings.Contains(r.log.String(), "not born tainted") || r.metric("portolan_node_not_born_tainted") != 1 {
		t.Errorf("a node without the taint: %s", r.log.String())
	}
	if get("plain").ResourceVersion != before.ResourceVersion {
		t.Error("a node without the taint was changed")
	}
	if got := keys(get("elsewhere").Spec.Taints); len(got) != 3 || got[0] != Key || got[1] != Key {
		t.Errorf("another node's taints are %v", got)
	}
}

// While the API is away it is asked again until the registrar ends.
func TestAway(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := newRig(t, &away{after: 3, then: cancel}, "born", ready)
	if err := r.remover.Run(ctx); err != nil {
		t.Errorf("ended with %v", err)
	}
	if got := r.metric("portolan_node_taint_errors_total"); got != 2 {
		t.Errorf("%v errors counted", got)
	}
}

func ready() bool { return true }

func keys(taints []corev1.Taint) []string {
	var out []string
	for _, t := range taints {
		out = append(out, t.Key)
	}
	return out
}

// raced changes the node between the first look and the patch.
type raced struct {
	typedv1.NodesGetter
	once   sync.Once
	before func()
}

// Nodes implements NodesGetter.
func (r *raced) Nodes() typedv1.NodeInterface { return racedNodes{r.NodesGetter.Nodes(), r} }

type racedNodes struct {
	typedv1.NodeInterface
	r *raced
}

// Get implements NodeInterface.
func (n racedNodes) Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.Node, error) {
	node, err := n.NodeInterface.Get(ctx, name, o)
	n.r.once.Do(n.r.before)
	return node, err
}

// away fails, and calls then at the last time.
type away struct {
	typedv1.NodeInterface
	after int
	then  func()
}

// Nodes implements NodesGetter.
func (a *away) Nodes() typedv1.NodeInterface { return a }

// Get implements NodeInterface.
func (a *away) Get(context.Context, string, metav1.GetOptions) (*corev1.Node, error) {
	if a.after--; a.after == 0 {
		a.then()
	}
	return nil, errors.New("connection refused")
}

// rig is a Remover with what it tells.
type rig struct {
	t       *testing.T
	remover *Remover
	log     bytes.Buffer
	reg     *prometheus.Registry
}

func newRig(t *testing.T, client typedv1.NodesGetter, node string, ready func() bool) *rig {
	t.Helper()
	r := &rig{t: t, reg: prometheus.NewRegistry()}
	var err error
	r.remover, err = New(Config{
		Client: client, Node: node, Ready: ready, Interval: time.Millisecond, Now: time.Now,
		Log: slog.New(slog.NewTextHandler(&r.log, nil)), Metrics: r.reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) run() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	if err := r.remover.Run(ctx); err != nil || ctx.Err() != nil {
		r.t.Fatalf("%v, %v: %s", err, ctx.Err(), r.log.String())
	}
}

func (r *rig) metric(name string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	r.t.Fatalf("there is no metric %s", name)
	return 0
}
