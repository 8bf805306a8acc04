package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/lab"
)

const (
	readyRounds = 40
	// gate is the condition by which the pod is made Ready and not.
	gate = "portolan.test/gate"
)

// readyToEnvoy measures from the Ready of a pod, as any watch sees it, until the
// Envoy of the other node counts its endpoint as healthy. The pod has a readiness
// gate, so that one pod can be Ready many times.
func readyToEnvoy(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	w, err := r.watchPods(ctx)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	gated := newPod("gated", writerNode, map[string]string{"endpoint.aether.io/service": "gated", "endpoint.aether.io/ports": "8080"})
	gated.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: gate}}
	caller := newPod("caller", readerNode, map[string]string{"endpoint.aether.io/ports": "none", "config.aether.io/upstreams": "gated." + namespace})
	if _, err := w.begin(ctx, r, gated, caller); err != nil {
		return nil, err
	}
	var took []time.Duration
	for round := range readyRounds + 1 {
		t, err := r.readyRound(ctx, w)
		if err != nil {
			return nil, err
		}
		if round > 0 { // the first one warms up
			took = append(took, t)
		}
	}
	if err := w.end(ctx, r, gated, caller); err != nil {
		return nil, err
	}
	p50, p99 := measure.P50(took), measure.Quantile(took, 0.99)
	return []measure.Figure{{
		OK:       p50 <= 8*time.Millisecond && p99 <= 15*time.Millisecond,
		What:     fmt.Sprintf("pod Ready, as a watch sees it -> the other node's Envoy has it, %d times (looked at every ms)", readyRounds),
		Measured: fmt.Sprintf("p50 %s, p99 %s", measure.Millis(p50), measure.Millis(p99)),
		Aim:      "p50 <= 8 ms, p99 <= 15 ms: those of an EDS answer and 5 ms to Envoy",
	}}, nil
}

// readyRound makes the pod Ready and not Ready again.
func (r *rig) readyRound(ctx context.Context, w podWatch) (took time.Duration, err error) {
	for _, ready := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse} {
		patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":%q,"status":%q}]}}`, gate, ready)
		if _, err := r.client.CoreV1().Pods(namespace).Patch(ctx, "gated", types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
			return 0, err
		}
		begin, err := w.await(ctx, "the gated pod", func(_ watch.EventType, pod *corev1.Pod) bool {
			return pod.Name == "gated" && condition(pod, corev1.PodReady) == ready
		})
		if err != nil {
			return 0, err
		}
		want := 0
		if ready == corev1.ConditionTrue {
			want = 1
		}
		if err := r.awaitMembers(ctx, readerNode, "gated."+namespace+".aether.internal", want); err != nil {
			return 0, err
		}
		if ready == corev1.ConditionTrue {
			took = time.Since(begin)
		}
	}
	return took, nil
}

// condition of a pod.
func condition(pod *corev1.Pod, kind corev1.PodConditionType) corev1.ConditionStatus {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return corev1.ConditionUnknown
}

// awaitMembers waits until a node's Envoy has so many healthy endpoints in a cluster.
func (r *rig) awaitMembers(ctx context.Context, node int, cluster string, want int) error {
	return poll(ctx, time.Millisecond, fmt.Sprintf("%d endpoints of %s in node%d's Envoy", want, cluster, node), func() (bool, error) {
		text, err := r.lab.Get(ctx, node, lab.EnvoySocket, "/stats?filter=^cluster\\."+cluster+"\\.membership_healthy$&format=json")
		if err != nil {
			return false, err
		}
		var stats struct {
			Stats []struct{ Value int }
		}
		if err := json.Unmarshal(text, &stats); err != nil {
			return false, fmt.Errorf("statistics of node%d's Envoy: %w", node, err)
		}
		return len(stats.Stats) == 1 && stats.Stats[0].Value == want, nil
	})
}
