package podsource

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// mirrored is a Source without an API server, whose events the test makes itself.
type mirrored struct {
	*Source
	t *testing.T // of the bubble

	sink sync.Mutex // guards told
	told []string
}

// mirrors runs what test does with fake time.
func mirrors(t *testing.T, test func(*mirrored)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		source, err := New(Config{Client: &kubernetes.Clientset{}, Namespaces: &metadata.Client{}, Node: "node1", Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		s := &mirrored{Source: source, t: t}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.work(t.Context(), s.hear)
		}()
		s.onNamespace(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
		test(s)
		s.queue.ShutDown()
		<-ended
	})
}

func (s *mirrored) hear(_ context.Context, w model.Workload) {
	s.sink.Lock()
	defer s.sink.Unlock()
	s.told = append(s.told, describe(w))
}

func describe(w model.Workload) string {
	parts := []string{w.ObjectUID, w.Ending.String()}
	if w.Running {
		parts = append(parts, "running")
	}
	if w.Ready {
		parts = append(parts, "ready")
	}
	return strings.Join(parts, " ")
}

// since returns what the sink was told since the last call.
func (s *mirrored) since() string {
	synctest.Wait()
	s.sink.Lock()
	defer s.sink.Unlock()
	told := strings.Join(s.told, ", ")
	s.told = nil
	return told
}

// found is what look-ups say of the pod: the one that waits, and the complete list.
func (s *mirrored) found() string {
	s.t.Helper()
	w, ok, _ := s.find("shop", "static-node1", "hash")
	s.synced = []cache.InformerSynced{func() bool { return true }}
	pods, _ := s.Pods()
	if !ok || len(pods) != 1 {
		if ok || len(pods) > 0 {
			s.t.Errorf("found %v, listed %d", ok, len(pods))
		}
		return "none"
	}
	if one, other := describe(w), describe(pods[0]); one != other {
		s.t.Errorf("found %s, listed %s", one, other)
	}
	return describe(w)
}

// mirror is the API object of a static pod, as the kubelet makes it.
func mirror(uid string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "static-node1", UID: types.UID(uid), Annotations: map[string]string{mirrorAnnotation: "hash"},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

// reported is the object once the kubelet has written how the pod is.
func reported(p *corev1.Pod, phase corev1.PodPhase, ready corev1.ConditionStatus) *corev1.Pod {
	p = p.DeepCopy()
	p.Status = corev1.PodStatus{Phase: phase, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}
	return p
}

func deleting(p *corev1.Pod) *corev1.Pod {
	p = p.DeepCopy()
	p.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	return p
}

// Who deletes the mirror of a static pod ends nothing: the pod is what it was until the
// kubelet has made another and says of that how the pod is.
func TestMirrorMadeAnew(t *testing.T) {
	mirrors(t, func(s *mirrored) {
		step := func(what string, event func(), want string) {
			s.t.Helper()
			event()
			if got := s.since(); got != want {
				s.t.Errorf("%s: told %q, want %q", what, got, want)
			}
		}
		first := reported(mirror("m1"), corev1.PodRunning, corev1.ConditionTrue)
		step("the first", func() { s.onPod(mirror("m1")) }, "m1 living")
		step("it runs", func() { s.onPodChanged(mirror("m1"), first) }, "m1 living running ready")
		step("it is to go", func() { s.onPodChanged(first, deleting(first)) }, "m1 living running ready")
		step("it is gone", func() { s.onPodGone(deleting(first)) }, "")
		if got := s.found(); got != "m1 living running ready" {
			s.t.Errorf("without a mirror: %s", got)
		}
		step("the second", func() { s.onPod(mirror("m2")) }, "m2 living running ready")
		step("it goes before the kubelet spoke", func() { s.onPodGone(mirror("m2")) }, "")
		step("the third", func() { s.onPod(mirror("m3")) }, "m3 living running ready")
		step("one change for both", func() { s.onPodChanged(mirror("m3"), mirror("m4")) }, "m4 living running ready")
		step("the kubelet speaks", func() { s.onPod(reported(mirror("m4"), corev1.PodRunning, corev1.ConditionFalse)) }, "m4 living running")
		step("later", func() { time.Sleep(2 * model.MirrorGrace) }, "m4 living running")
		if got := s.found(); got != "m4 living running" {
			s.t.Errorf("at the end: %s", got)
		}
	})
}

// A static pod ends when nobody makes another mirror, or at once when the mirror said so.
func TestMirrorGoneForGood(t *testing.T) {
	mirrors(t, func(s *mirrored) {
		running := reported(mirror("m1"), corev1.PodRunning, corev1.ConditionTrue)
		s.onPod(running)
		synctest.Wait()
		s.onPodGone(running)
		time.Sleep(model.MirrorGrace - time.Second)
		if got := s.since(); got != "m1 living running ready" {
			s.t.Errorf("told %q", got)
		}
		time.Sleep(time.Second)
		if got := s.since(); got != "m1 finished running" || s.found() != "none" || s.count() != 0 {
			s.t.Errorf("told %q; found %s, %d known", got, s.found(), s.count())
		}
		// The kubelet makes the first one of a pod that it starts again.
		s.onPod(mirror("m2"))
		if got := s.since(); got != "m2 living" {
			s.t.Errorf("told %q", got)
		}
		ended := reported(mirror("m2"), corev1.PodFailed, corev1.ConditionFalse)
		s.onPod(ended)
		s.onPodGone(ended)
		if got := s.since(); got != "m2 finished" || s.found() != "none" {
			s.t.Errorf("told %q; found %s", got, s.found())
		}
	})
}

// A pod that was made anew under its name while the watch was away is told as two; one
// that names another pod's UID in its mirror annotation is that pod to nobody.
func TestPodsOfOneNameOrUID(t *testing.T) {
	mirrors(t, func(s *mirrored) {
		plain := func(uid string) *corev1.Pod {
			p := reported(mirror(uid), corev1.PodRunning, corev1.ConditionTrue)
			p.Annotations = nil
			return p
		}
		s.onPod(plain("hash"))
		synctest.Wait()
		forged := mirror("forged")
		forged.Name = "other"
		s.onPod(forged)
		if got := s.since(); got != "hash living running ready, forged living" {
			s.t.Errorf("told %q", got)
		}
		if w, ok, _ := s.find("shop", "static-node1", "hash"); !ok || w.ObjectUID != "hash" {
			s.t.Errorf("found %+v, %v", w, ok)
		}
		s.onPodChanged(plain("hash"), plain("u2"))
		if got := s.since(); got != "hash finished running, u2 living running ready" {
			s.t.Errorf("told %q", got)
		}
		if s.count() != 2 {
			s.t.Errorf("%d known", s.count())
		}
	})
}
