package attach

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// hang makes Envoy acknowledge no listener any more.
func (w *world) hang() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noListeners = true
}

// A DEL waits for nothing that is done for the pod and that nobody waits for, however
// long an Envoy that hangs, or a listen table, holds that up. The pod is gone then and
// does not come back.
func TestWorkYieldsToDEL(t *testing.T) {
	changed := func(t *testing.T, w *world, o *orchestra, m *Manager) {
		t.Helper()
		wl := o.set(workload(multiPort()))
		mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
		w.hang()
		wl.Annotations = map[string]string{annotation.KeyPorts: "7000"}
		m.Observe(t.Context(), o.set(wl))
	}
	for name, begin := range map[string]func(*testing.T, *world, *orchestra, *Manager){
		"a change of ports, while the old ones drain": changed,
		"a change of ports, while the new ones are proven": func(t *testing.T, w *world, o *orchestra, m *Manager) {
			t.Helper()
			changed(t, w, o, m)
			time.Sleep(m.cfg.DrainWait + time.Second) // fake time, as below
		},
		"the next proof of new ports": func(t *testing.T, w *world, o *orchestra, m *Manager) {
			t.Helper()
			changed(t, w, o, m)
			time.Sleep(m.cfg.DrainWait + 2*provePorts)
			go m.Sweep(t.Context())
		},
		"an adoption by the runtime's list": func(t *testing.T, w *world, o *orchestra, m *Manager) {
			t.Helper()
			w.hang()
			o.set(workload(multiPort()))
			req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
			req.CniArgs[argUID] = "u1"
			o.sandboxes = []*cniv1.AddRequest{req}
			go m.Sweep(t.Context())
		},
		"an adoption by a note": func(t *testing.T, w *world, o *orchestra, m *Manager) {
			t.Helper()
			w.hang()
			o.set(workload(multiPort()))
			leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", time.Minute))
			go m.Sweep(t.Context())
		},
		"what could not be told at the start": func(t *testing.T, w *world, o *orchestra, m *Manager) {
			t.Helper()
			o.set(workload(multiPort()))
			mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
			m.mu.Lock()
			pod := m.pods[key("c1")].pod
			m.pods[key("c1")] = stored(pod)
			m.mu.Unlock()
			w.mu.Lock()
			w.unread = true
			w.mu.Unlock()
			go m.Sweep(t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, o, m := orchestrated(t)
				begin(t, w, o, m)
				synctest.Wait()
				if m.keys.locks[key("c1")] == nil {
					t.Fatal("nobody is at work")
				}
				began := time.Now()
				del(t, m, "c1")
				if took := time.Since(began); took > m.cfg.DrainWait/2 {
					t.Errorf("DEL waited for %v", took)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				stored, err := m.store.load()
				if got := w.record("c1-eth0"); got != "none" || len(m.Pods()) != 0 || len(stored) != 0 || err != nil || len(m.keys.locks) != 0 {
					t.Errorf("record %s, attached %v, stored %v, %v; %d locks", got, attachedIDs(m), stored, err, len(m.keys.locks))
				}
			})
		})
	}
}

// What yields and waits behind a DEL, or comes while one waits, does not begin; an ADD is
// waited for.
func TestNothingYieldingBeginsDuringDEL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keyLocks
		work, unlock, err := locks.lockYielding(t.Context(), key("c1"))
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		done := make(chan struct{}, 2)
		go func() {
			next, free, err := locks.lockYielding(t.Context(), key("c1"))
			if err != nil || !removed(next) {
				t.Errorf("who waited before the DEL began: %v, %v", next.Err(), err)
			}
			order = append(order, "yielding")
			free()
			done <- struct{}{}
		}()
		synctest.Wait()
		go func() {
			free, err := locks.lockToRemove(t.Context(), key("c1"))
			if err != nil {
				t.Error(err)
			}
			order = append(order, "DEL")
			free()
			done <- struct{}{}
		}()
		synctest.Wait()
		if !removed(work) {
			t.Error("the work goes on")
		}
		unlock()
		<-done
		<-done
		if d := cmp.Diff([]string{"yielding", "DEL"}, order); d != "" {
			t.Errorf("order (-want +got):\n%s", d)
		}
		after, free, err := locks.lockYielding(t.Context(), key("c1"))
		if err != nil || after.Err() != nil {
			t.Errorf("after the DEL: %v, %v", after.Err(), err)
		}
		free()
		if len(locks.locks) != 0 {
			t.Errorf("%d locks left", len(locks.locks))
		}
	})
}

// Pods that are gone, and a mesh that is away, hold no sweep up, however many there are:
// what it has not is for the next one, and of what is gone the note goes.
func TestSweepWaitsForNoPod(t *testing.T) {
	const pods = 20
	left := func(t *testing.T, m *Manager) {
		t.Helper()
		for i := range pods {
			id := fmt.Sprint("c", i)
			note := unmeshedNote(id, "10.1.0.2", time.Minute)
			if i%2 == 0 { // labels say whether these join
				note.GetUnmeshed().Annotations, note.GetUnmeshed().AnnotationsKnown = nil, false
			}
			leaveNote(t, m.cfg.SpoolDir, note)
			leaveNote(t, m.cfg.NetnsDir, attachedNote(fmt.Sprint("d", i), "10.1.0.2", time.Minute))
		}
	}
	for name, test := range map[string]struct {
		set  func(*world, *orchestra)
		left int
	}{
		"gone, says the list": {func(*world, *orchestra) {}, pods / 2},
		"gone with their namespaces": {func(w *world, _ *orchestra) {
			for i := range pods {
				w.gone[key(fmt.Sprint("c", i))] = true
			}
		}, 0},
		"no list yet":     {func(_ *world, o *orchestra) { o.unsynced = true }, pods},
		"no Envoy either": {func(w *world, o *orchestra) { o.set(workload(multiPort())); w.missing = "Envoy is not connected" }, pods},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, o, m := orchestrated(t)
				w.onReady = func() { t.Error("an adoption waits for the mesh") }
				left(t, m)
				test.set(w, o)
				began := time.Now()
				m.Sweep(t.Context())
				if took := time.Since(began); took != 0 {
					t.Errorf("the sweep took %v", took)
				}
				if got := files(t, m.cfg.SpoolDir); len(got) != test.left {
					t.Errorf("%d notes of unmeshed pods are left, want %d", len(got), test.left)
				}
			})
		})
	}
}

// A start waits for the list of pods once, not for each pod that is gone; it recovers who
// is there, in whatever order.
func TestRestoreWaitsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := orchestrated(t)
		for i := range 20 {
			leaveNote(t, m.cfg.NetnsDir, attachedNote(fmt.Sprint("c", i), "10.1.0.2", time.Minute))
		}
		here := attachedNote("x", "10.1.0.3", time.Minute)
		here.GetAttached().CniArgs[argName] = "here-1"
		leaveNote(t, m.cfg.NetnsDir, here)
		wl := workload(multiPort())
		wl.Name, wl.UID, wl.ObjectUID = "here-1", "u2", "u2"
		o.set(wl)
		began := time.Now()
		if err := m.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took >= 2*knownWait {
			t.Errorf("the start took %v", took)
		}
		if got := attachedIDs(m); !slices.Equal(got, []string{"x"}) {
			t.Errorf("attached %v; %v", got, w.events())
		}
	})
}
