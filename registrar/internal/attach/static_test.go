package attach

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// static is a static pod whose mirror has that UID; the runtime knows the pod as "hash".
func static(mirror string) model.Workload {
	w := workload(multiPort())
	w.UID, w.ObjectUID = "hash", mirror
	return w
}

// addStatic attaches the static pod, which listens.
func addStatic(t *testing.T, w *world, m *Manager) {
	t.Helper()
	req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
	req.CniArgs[argUID] = "hash"
	mustAdd(t, m, req)
	w.listen(key("c1"), listening(8080, 9090))
}

// servingStatic is serving for the static pod, whose mirror has the UID mirror-1.
func servingStatic(t *testing.T) (*world, *orchestra, *Manager) {
	t.Helper()
	w, o, m := orchestrated(t)
	o.set(static("mirror-1"))
	addStatic(t, w, m)
	return w, o, m
}

// owner returns the record's ports and what it calls its pod.
func (w *world) owner(uid string) string {
	return w.record(uid) + " of " + w.endpoints()[uid].PodUID
}

const served = "8080=healthy,9090=healthy of "

// A static pod whose mirror is made anew is served on, and its record says nothing of the
// mirror. Whoever tells first, the stream or the complete list, and also when the
// registrar was away meanwhile.
func TestMirrorMadeAnew(t *testing.T) {
	told := map[string]func(*testing.T, *Manager, model.Workload){
		"by the stream": func(t *testing.T, m *Manager, w model.Workload) { t.Helper(); m.Observe(t.Context(), w) },
		"by the list":   func(t *testing.T, m *Manager, _ model.Workload) { t.Helper(); m.Sweep(t.Context()) },
	}
	for name, tell := range told {
		t.Run(name, func(t *testing.T) {
			w, o, m := servingStatic(t)
			if got := w.owner("c1-eth0"); got != served+"hash" {
				t.Fatalf("record: %s", got)
			}
			delete(o.pods, "mirror-1")
			tell(t, m, o.set(static("mirror-2")))
			m.Sweep(t.Context())
			if got := w.owner("c1-eth0"); got != served+"hash" {
				t.Errorf("record: %s", got)
			}

			o, again := restarted(t, w, m)
			if err := again.Restore(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.listen(key("c1"), listening(8080, 9090))
			tell(t, again, o.set(static("mirror-3")))
			if got := w.owner("c1-eth0"); got != served+"hash" {
				t.Errorf("record after a restart: %s", got)
			}
			if slices.Contains(w.events(), "withdraw c1-eth0") {
				t.Errorf("the pod was not served all the while: %v", w.events())
			}
		})
	}
}

// The same while the ADD is at work, whether the attachment is there to be told or not.
func TestMirrorMadeAnewDuringADD(t *testing.T) {
	for name, hook := range map[string]func(*world, func()){
		"before the attachment": func(w *world, f func()) { w.onReady = f },
		"after it":              func(w *world, f func()) { w.onPublish = f },
	} {
		t.Run(name, func(t *testing.T) {
			w, o, m := orchestrated(t)
			o.set(static("mirror-1"))
			hook(w, func() {
				delete(o.pods, "mirror-1")
				m.Observe(t.Context(), o.set(static("mirror-2")))
			})
			addStatic(t, w, m)
			if got := w.owner("c1-eth0"); got != served+"hash" {
				t.Errorf("record: %s", got)
			}
		})
	}
}

// A static pod without a mirror for long is not known to live, so it has no record; the
// next mirror gives it one.
func TestMirrorComesLate(t *testing.T) {
	w, o, m := servingStatic(t)
	delete(o.pods, "mirror-1")
	m.Sweep(t.Context())
	if got := w.record("c1-eth0"); got != "none" {
		t.Errorf("without a mirror: %s", got)
	}
	m.Observe(t.Context(), o.set(static("mirror-2")))
	if got := w.owner("c1-eth0"); got != served+"hash" {
		t.Errorf("record: %s", got)
	}
}

// A registrar that begins while the mirror is away waits for it as one that saw it go,
// and no longer; for no other pod.
func TestRestartWithoutMirror(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := servingStatic(t)
		_, again := restarted(t, w, m)
		if err := again.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.listen(key("c1"), listening(8080, 9090))
		for _, step := range []struct {
			after time.Duration
			want  string
		}{{0, "8080=healthy,9090=healthy"}, {model.MirrorGrace - time.Second, "8080=healthy,9090=healthy"}, {time.Second, "none"}} {
			time.Sleep(step.after)
			again.Sweep(t.Context())
			if got := w.record("c1-eth0"); got != step.want {
				t.Errorf("%v later: %s, want %s", step.after, got, step.want)
			}
		}
	})
	w, _, m := serving(t, 8080, 9090)
	_, again := restarted(t, w, m)
	if err := again.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	again.Sweep(t.Context())
	if got := w.record("c1-eth0"); got != "none" {
		t.Errorf("a pod of the API server: %s", got)
	}
}

// Who makes a mirror that names another pod's UID says nothing of that pod.
func TestMirrorOfAnotherPod(t *testing.T) {
	w, o, m := servingStatic(t)
	for _, edit := range []func(*model.Workload){
		func(w *model.Workload) { w.Namespace = "elsewhere" },
		func(w *model.Workload) { w.Name = "payments-2" },
	} {
		forged := static("forged")
		edit(&forged)
		forged.Ready, forged.Ending = false, model.Finished
		m.Observe(t.Context(), o.set(forged))
		m.Sweep(t.Context())
	}
	if got := w.owner("c1-eth0"); got != served+"hash" || slices.Contains(w.events(), "withdraw c1-eth0") {
		t.Errorf("record: %s; %v", got, w.events())
	}
}

// What a record calls its pod is the UID of an API object if that is the pod's own, and
// looks like none otherwise.
func TestLastingUID(t *testing.T) {
	const object = "4c0b6ad5-0000-4000-8000-000000000001"
	for runtime, want := range map[string]string{
		"": object, object: object, "ce9dfd1633d73a68286f7e6287f4b407": "ce9dfd1633d73a68286f7e6287f4b407",
		"5d1c7be6-0000-4000-8000-000000000002": "5d1c7be6000040008000000000000002",
	} {
		if got := lastingUID(model.Pod{UID: object, RuntimeUID: runtime}); got != want {
			t.Errorf("the runtime says %q: %s, want %s", runtime, got, want)
		}
	}
}

// A pod that an older version stored does not say what the runtime calls it: what the
// orchestrator says does, also to the next registrar.
func TestMirrorOfOlderVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := servingStatic(t)
		old := m.Pods()[0]
		old.RuntimeUID = ""
		if err := m.store.put(old); err != nil {
			t.Fatal(err)
		}
		for _, mirror := range []string{"mirror-1", "mirror-2"} {
			o, again := restarted(t, w, m)
			if err := again.Restore(t.Context()); err != nil {
				t.Fatal(err)
			}
			w.listen(key("c1"), listening(8080, 9090))
			again.Observe(t.Context(), o.set(static(mirror)))
			time.Sleep(time.Second) // it is stored beside the rest
			again.Sweep(t.Context())
			if got := w.owner("c1-eth0"); got != served+"hash" {
				t.Errorf("record with %s: %s", mirror, got)
			}
		}
	})
}
