// Package birthtaint removes the taint that a node is born with so that no pod lands
// on it before the mesh is ready.
//
// The taint is set by whoever makes the node: kubelet's --register-with-taints or the
// cloud's node pool. A taint that is added later is too late, pods are there already;
// so this package only ever removes it (CNI-18).
package birthtaint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
)

const (
	// Key of the taint, whatever its effect.
	Key = "portolan.aether.io/not-ready"
	// removedKey is the annotation of a node whose taint was removed, with the time.
	// It tells a registrar that starts later that the node was born with it.
	removedKey = "portolan.aether.io/taint-removed"
)

// Config is what a Remover needs.
type Config struct {
	// Client may get and patch the node.
	Client typedv1.NodesGetter
	// Node is this node's name.
	Node string
	// Ready reports whether a pod could be added now. It is asked every Interval.
	Ready func() bool
	// Interval is also the pause after an error.
	Interval time.Duration
	Now      func() time.Time
	Log      *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// Remover removes the birth taint of one node.
type Remover struct {
	cfg    Config
	unborn prometheus.Gauge
	errors prometheus.Counter
}

// New makes a Remover; the node is not touched yet.
func New(cfg Config) (*Remover, error) {
	if cfg.Interval <= 0 {
		return nil, fmt.Errorf("interval %s: need a time above 0", cfg.Interval)
	}
	r := &Remover{
		cfg: cfg,
		unborn: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "portolan_node_not_born_tainted",
			Help: "1 if the node never had the taint " + Key + ": pods may have started before the mesh was ready.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "portolan_node_taint_errors_total", Help: "Failed attempts to remove the node's birth taint.",
		}),
	}
	if cfg.Metrics == nil {
		return r, nil
	}
	return r, errors.Join(cfg.Metrics.Register(r.unborn), cfg.Metrics.Register(r.errors))
}

// Run waits until the registrar is ready, removes the taint, and ends. Errors of the
// API are tried again; it ends early, with nil, when ctx ends.
func (r *Remover) Run(ctx context.Context) error {
	t := time.NewTicker(r.cfg.Interval)
	defer t.Stop()
	for {
		if r.cfg.Ready() {
			err := r.remove(ctx)
			if err == nil {
				return nil
			}
			if ctx.Err() == nil {
				r.errors.Inc()
				r.cfg.Log.Warn("birth taint is not removed yet", "node", r.cfg.Node, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// remove looks at the node and takes the taint away if it is there.
func (r *Remover) remove(ctx context.Context) error {
	node, err := r.cfg.Client.Nodes().Get(ctx, r.cfg.Node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("get node: %w", err)
	}
	keep := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return t.Key == Key })
	if len(keep) == len(node.Spec.Taints) {
		if _, ok := node.Annotations[removedKey]; !ok {
			r.unborn.Set(1)
			r.cfg.Log.Warn("node was not born tainted: pods may have started before the mesh was ready; let kubelet register it with the taint",
				"node", r.cfg.Node, "taint", Key)
		}
		return nil
	}
	// The version makes the API refuse a list of taints that is no longer the node's.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{
			"resourceVersion": node.ResourceVersion,
			"annotations":     map[string]string{removedKey: r.cfg.Now().UTC().Format(time.RFC3339)},
		},
		"spec": map[string]any{"taints": keep},
	})
	if err != nil {
		return err
	}
	_, err = r.cfg.Client.Nodes().Patch(ctx, r.cfg.Node, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "portolan-registrar"})
	if apierrors.IsConflict(err) {
		return fmt.Errorf("the node changed meanwhile: %w", err)
	}
	if err != nil {
		return fmt.Errorf("patch node: %w", err)
	}
	r.cfg.Log.Info("birth taint removed", "node", r.cfg.Node, "taint", Key)
	return nil
}
