package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

const (
	// podRounds is how many pods are made one after the other, togetherRounds how often
	// togetherPods are made at once.
	podRounds      = 20
	togetherRounds = 4
	togetherPods   = 10
)

// newPod is a pod on a node. It serves one port.
func newPod(name string, node int, annotations map[string]string) *corev1.Pod {
	grace := int64(1)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: annotations},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{corev1.LabelHostname: fmt.Sprintf("node%d", node)},
			TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{
				Name: "app", Image: "portolan/podserver:lab", Command: []string{"/usr/local/bin/podserver", "serve", "http:8080"},
			}},
		},
	}
}

// podWatch is what happens to the pods of the namespace.
type podWatch struct{ watch.Interface }

func (r *rig) watchPods(ctx context.Context) (podWatch, error) {
	w, err := r.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	return podWatch{w}, err
}

// await takes events until one is what was waited for, and returns when it came.
func (w podWatch) await(ctx context.Context, what string, ok func(kind watch.EventType, pod *corev1.Pod) bool) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		select {
		case ev := <-w.ResultChan():
			pod, isPod := ev.Object.(*corev1.Pod)
			if !isPod {
				return time.Time{}, fmt.Errorf("wait for %s: the watch of pods ended: %v", what, ev.Object)
			}
			if ok(ev.Type, pod) {
				return time.Now(), nil
			}
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait for %s: %w", what, ctx.Err())
		}
	}
}

// awaitAll waits until all pods of these names are Running, or deleted.
func (w podWatch) awaitAll(ctx context.Context, running bool, names ...string) (time.Time, error) {
	missing := make(map[string]bool, len(names))
	for _, name := range names {
		missing[name] = true
	}
	what := "be deleted"
	if running {
		what = "run"
	}
	return w.await(ctx, fmt.Sprintf("%s to %s", strings.Join(names, ", "), what), func(kind watch.EventType, pod *corev1.Pod) bool {
		if running && pod.Status.Phase == corev1.PodRunning || !running && kind == watch.Deleted {
			delete(missing, pod.Name)
		}
		return len(missing) == 0
	})
}

// begin makes pods at once and returns when the last one ran.
func (w podWatch) begin(ctx context.Context, r *rig, pods ...*corev1.Pod) (time.Time, error) {
	group, creating := errgroup.WithContext(ctx)
	names := make([]string, len(pods))
	for i, pod := range pods {
		names[i] = pod.Name
		group.Go(func() error {
			_, err := r.client.CoreV1().Pods(namespace).Create(creating, pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return time.Time{}, err
	}
	return w.awaitAll(ctx, true, names...)
}

// end deletes pods and returns when they are gone.
func (w podWatch) end(ctx context.Context, r *rig, pods ...*corev1.Pod) error {
	names := make([]string, len(pods))
	for i, pod := range pods {
		names[i] = pod.Name
		if err := r.client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	_, err := w.awaitAll(ctx, false, names...)
	return err
}

// live is the life of so many pods at once; it returns how long it took until the
// last one ran.
func (w podWatch) live(ctx context.Context, r *rig, count int, annotations map[string]string) (time.Duration, error) {
	pods := make([]*corev1.Pod, count)
	for i := range pods {
		pods[i] = newPod(fmt.Sprintf("server-%d", i), writerNode, annotations)
	}
	begin := time.Now()
	running, err := w.begin(ctx, r, pods...)
	if err != nil {
		return 0, err
	}
	return running.Sub(begin), w.end(ctx, r, pods...)
}

// lives are how long pods of one kind took from create to Running, one after the
// other and many at once, and what was written to the API server for one.
type lives struct {
	one, together []time.Duration
	writes        writes
}

// lives measures pods of one kind.
func (r *rig) lives(ctx context.Context, w podWatch, annotations map[string]string) (l lives, err error) {
	if _, err := w.live(ctx, r, 1, annotations); err != nil { // warms up
		return l, err
	}
	before, err := r.settledWrites(ctx)
	if err != nil {
		return l, err
	}
	for range podRounds {
		took, err := w.live(ctx, r, 1, annotations)
		if err != nil {
			return l, err
		}
		l.one = append(l.one, took)
	}
	after, err := r.settledWrites(ctx)
	if err != nil {
		return l, err
	}
	l.writes = after.since(before, podRounds)
	for range togetherRounds {
		took, err := w.live(ctx, r, togetherPods, annotations)
		if err != nil {
			return l, err
		}
		l.together = append(l.together, took)
	}
	return l, nil
}

// podLives compares pods of a lab without the mesh with pods, in the mesh and not, while it
// is installed. What is without is measured before and after: the machine is not equally
// fast all the time. A pod whose account has no other one on its node waits for a
// certificate too.
func podLives(ctx context.Context, r *rig) ([]measure.Figure, error) {
	if r.installed {
		return nil, errors.New("the mesh is installed: this must be the first row")
	}
	w, err := r.watchPods(ctx)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	before, err := r.lives(ctx, w, nil)
	if err != nil {
		return nil, err
	}
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	unmeshed, err := r.lives(ctx, w, nil)
	if err != nil {
		return nil, err
	}
	ports := map[string]string{"endpoint.aether.io/service": "server", "endpoint.aether.io/ports": "8080"}
	first, err := r.lives(ctx, w, ports)
	if err != nil {
		return nil, err
	}
	other := newPod("other", writerNode, map[string]string{"endpoint.aether.io/ports": "none"})
	if _, err := w.begin(ctx, r, other); err != nil {
		return nil, err
	}
	meshed, err := r.lives(ctx, w, ports)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(w.end(ctx, r, other), r.noMesh(ctx)); err != nil {
		return nil, err
	}
	after, err := r.lives(ctx, w, nil)
	if err != nil {
		return nil, err
	}
	return append([]measure.Figure{
		slower("pods not in the mesh", unmeshed.one, before.one, after.one, 1.05),
		slower("pods in the mesh", meshed.one, before.one, after.one, 1.1),
		slower("pods in the mesh, the first of their account on the node", first.one, before.one, after.one, 1.2),
		slower(fmt.Sprintf("%d pods in the mesh at once, the last one", togetherPods), meshed.together, before.together, after.together, 1.25),
	}, written(unmeshed.writes, meshed.writes, first.writes)), nil
}

// slower compares how long pods took with those of the lab without the mesh.
func slower(what string, got, before, after []time.Duration, aim float64) measure.Figure {
	ratio := measure.Ratio(measure.P50(got), measure.P50(slices.Concat(before, after)))
	return measure.Figure{
		OK: ratio <= aim, What: "pod create -> Running, " + what,
		Measured: fmt.Sprintf("%.2fx (p50 %s)", ratio, measure.Millis(measure.P50(got))),
		Compared: fmt.Sprintf("the lab before the installation (p50 %s) and after the removal (p50 %s)", measure.Millis(measure.P50(before)), measure.Millis(measure.P50(after))),
		Aim:      fmt.Sprintf("<= %.2fx", aim),
	}
}
