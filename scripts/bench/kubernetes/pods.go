package main

import (
	"context"
	"errors"
	"fmt"
	"time"

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

// awaitPhase waits until so many pods are Running, or deleted.
func (w podWatch) awaitPhase(ctx context.Context, pods int, running bool) (time.Time, error) {
	seen := make(map[string]bool)
	what := fmt.Sprintf("%d pods to be deleted", pods)
	if running {
		what = fmt.Sprintf("%d pods to run", pods)
	}
	return w.await(ctx, what, func(kind watch.EventType, pod *corev1.Pod) bool {
		if running && pod.Status.Phase == corev1.PodRunning || !running && kind == watch.Deleted {
			seen[pod.Name] = true
		}
		return len(seen) == pods
	})
}

// live makes so many pods at once and deletes them when all are Running, which is
// how long it returns.
func (w podWatch) live(ctx context.Context, r *rig, pods int, annotations map[string]string) (took time.Duration, err error) {
	begin := time.Now()
	errs := make(chan error, pods)
	name := func(i int) string { return fmt.Sprintf("server-%d", i) }
	for i := range pods {
		go func() {
			_, err := r.client.CoreV1().Pods(namespace).Create(ctx, newPod(name(i), writerNode, annotations), metav1.CreateOptions{})
			errs <- err
		}()
	}
	for range pods {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return 0, err
	}
	running, err := w.awaitPhase(ctx, pods, true)
	if err != nil {
		return 0, err
	}
	for i := range pods {
		if err := r.client.CoreV1().Pods(namespace).Delete(ctx, name(i), metav1.DeleteOptions{}); err != nil {
			return 0, err
		}
	}
	_, err = w.awaitPhase(ctx, pods, false)
	return running.Sub(begin), err
}

// lives are what the lives of pods of one kind cost.
type lives struct {
	// one pod at a time, and many at once, from create to Running.
	one, together []time.Duration
	// writes to the API server for one pod.
	writes writes
}

// lives measures pods of one kind.
func (r *rig) lives(ctx context.Context, annotations map[string]string) (l lives, err error) {
	w, err := r.watchPods(ctx)
	if err != nil {
		return l, err
	}
	defer w.Stop()
	if _, err := w.live(ctx, r, 1, annotations); err != nil { // warms up
		return l, err
	}
	before, err := r.writes(ctx)
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
	if err := r.awaitNoEndpoints(ctx); err != nil {
		return l, err
	}
	after, err := r.writes(ctx)
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

// podLives compares pods of a lab without the mesh with pods, in the mesh and not,
// after its installation.
func podLives(ctx context.Context, r *rig) ([]measure.Figure, error) {
	if r.installed {
		return nil, errors.New("the mesh is installed: this must be the first row")
	}
	without, err := r.lives(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	unmeshed, err := r.lives(ctx, nil)
	if err != nil {
		return nil, err
	}
	meshed, err := r.lives(ctx, map[string]string{"endpoint.aether.io/service": "server", "endpoint.aether.io/ports": "8080"})
	if err != nil {
		return nil, err
	}
	compare := func(what string, got, with []time.Duration, aim float64) measure.Figure {
		ratio := measure.Ratio(measure.P50(got), measure.P50(with))
		return measure.Figure{
			OK: ratio <= aim, What: "pod create -> Running, " + what,
			Measured: fmt.Sprintf("%.2fx (p50 %s)", ratio, measure.Millis(measure.P50(got))),
			Compared: fmt.Sprintf("the lab before the installation (p50 %s)", measure.Millis(measure.P50(with))),
			Aim:      fmt.Sprintf("<= %.2fx", aim),
		}
	}
	adds := meshed.writes.total() - unmeshed.writes.total()
	return []measure.Figure{
		compare("pods not in the mesh", unmeshed.one, without.one, 1.05),
		compare("pods in the mesh", meshed.one, without.one, 1.1),
		compare(fmt.Sprintf("%d pods in the mesh at once, the last one", togetherPods), meshed.together, without.together, 1.25),
		{
			OK: adds <= 4, What: "API writes in the life of a pod, that the mesh adds",
			Measured: fmt.Sprintf("%.2f (%s)", adds, meshed.writes), Compared: fmt.Sprintf("pods not in the mesh (%s)", unmeshed.writes), Aim: "<= 4",
		},
	}, nil
}
