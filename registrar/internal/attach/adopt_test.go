package attach

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// attachedNote is what an ADD of a pod left beside its pin so long ago.
func attachedNote(id, ip string, ago time.Duration) *cniv1.Note {
	return &cniv1.Note{UnixNanos: time.Now().Add(-ago).UnixNano(), What: &cniv1.Note_Attached{
		Attached: addRequest(id, "payments-1", ip, multiPort()),
	}}
}

func unmeshedNote(id, ip string, ago time.Duration) *cniv1.Note {
	return &cniv1.Note{UnixNanos: time.Now().Add(-ago).UnixNano(), What: &cniv1.Note_Unmeshed{
		Unmeshed: addRequest(id, "payments-1", ip, multiPort()),
	}}
}

func dropNote(t *testing.T, dir, id string, kind spool.Kind) {
	t.Helper()
	name, err := spool.Name(&cniv1.Attachment{ContainerId: id, Ifname: "eth0"}, kind)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func del(t *testing.T, m *Manager, id string) {
	t.Helper()
	if _, err := m.Del(t.Context(), key(id)); err != nil {
		t.Error(err)
	}
}

// XDS-47: a sweep looks at the notes once and takes time over each; a pod that was
// deleted since then, by whatever sign, is not adopted.
func TestDeletedWhileSweepAdopts(t *testing.T) {
	tests := []struct {
		name string
		goes func(*testing.T, *world, *Manager)
	}{
		// The plugin takes pin and note away only after the answer.
		{"DEL answered", func(t *testing.T, _ *world, m *Manager) { t.Helper(); del(t, m, "c2") }},
		{"DEL carried out by the plugin alone", func(t *testing.T, _ *world, m *Manager) {
			t.Helper()
			dropNote(t, m.cfg.NetnsDir, "c2", spool.Attached)
		}},
		{"DEL spooled", func(t *testing.T, _ *world, m *Manager) {
			t.Helper()
			leaveNote(t, m.cfg.SpoolDir, deletedNote("c2", time.Now()))
		}},
		{"pin gone", func(_ *testing.T, w *world, _ *Manager) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.gone[key("c2")] = true
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w, m := setup(t)
			leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", 2*time.Minute))
			leaveNote(t, m.cfg.NetnsDir, attachedNote("c2", "10.1.0.3", time.Minute))
			w.onPublish = func() { tt.goes(t, w, m) } // while c1 is adopted
			m.Replay(t.Context())
			if d := cmp.Diff([]string{"c1"}, attachedIDs(m)); d != "" {
				t.Errorf("attached (-want +got):\n%s", d)
			}
			if slices.Contains(w.events(), "mesh add c2-eth0") {
				t.Error("the mesh was told of a deleted pod")
			}
		})
	}
}

// The same between the sweep's own looks: what happens while an adoption waits for
// another request of the same attachment counts.
func TestDeletedWhileAdoptionWaits(t *testing.T) {
	tests := []struct {
		name string
		goes func(*testing.T, *Manager)
	}{
		{"DEL", func(_ *testing.T, m *Manager) { m.depart(key("c1")) }},
		{"note taken back", func(t *testing.T, m *Manager) { t.Helper(); dropNote(t, m.cfg.NetnsDir, "c1", spool.Attached) }},
		{"DEL spooled", func(t *testing.T, m *Manager) {
			t.Helper()
			leaveNote(t, m.cfg.SpoolDir, deletedNote("c1", time.Now()))
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, m := setup(t)
				leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", time.Minute))
				unlock, err := m.keys.lock(t.Context(), key("c1"))
				if err != nil {
					t.Fatal(err)
				}
				go m.Replay(t.Context())
				synctest.Wait()
				tt.goes(t, m)
				unlock()
				synctest.Wait()
				if got := w.events(); slices.Contains(got, "mesh add c1-eth0") {
					t.Errorf("adopted: %v", got)
				}
			})
		})
	}
}

// A sweep does not wait for a DEL that drains, and the pod does not come back after it,
// neither by its note nor by a list of the runtime; the next ADD has it at once, and
// what departed is not remembered for ever.
func TestAdoptionAfterDEL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := setup(t)
		req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
		mustAdd(t, m, req)
		leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", time.Minute))
		w.connected = 1000
		gone := make(chan struct{})
		go func() { del(t, m, "c1"); close(gone) }()
		synctest.Wait()
		began := time.Now()
		if !m.adopt(t.Context(), req) || time.Now() != began {
			t.Errorf("the sweep waited %v for a DEL", time.Since(began))
		}
		<-gone
		m.Replay(t.Context())
		if !m.adopt(t.Context(), req) || len(m.Pods()) != 0 {
			t.Errorf("attached after the DEL: %v", attachedIDs(m))
		}
		mustAdd(t, m, req)
		if len(m.departed) != 0 {
			t.Error("a pod that was added again counts as departed")
		}
		del(t, m, "c1")
		time.Sleep(departedFor)
		m.Replay(t.Context())
		if len(m.departed) != 0 || len(m.Pods()) != 1 {
			t.Errorf("after %v: %d departed, attached %v", departedFor, len(m.departed), attachedIDs(m))
		}
	})
}

// CNI-36: a pod on its way out is not taken in late, also if a note of the plugin asks.
func TestEndingPodIsNotAdopted(t *testing.T) {
	for _, ending := range []model.Ending{model.Living, model.Terminating, model.Finished} {
		for _, kind := range []spool.Kind{spool.Attached, spool.Unmeshed} {
			t.Run(fmt.Sprintf("%s, %s", ending, kind), func(t *testing.T) {
				_, o, m := orchestrated(t)
				w := workload(multiPort())
				w.Ending = ending
				o.set(w)
				if kind == spool.Attached {
					leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", time.Minute))
				} else {
					leaveNote(t, m.cfg.SpoolDir, unmeshedNote("c1", "10.1.0.2", time.Minute))
				}
				m.Replay(t.Context())
				if adopted := len(m.Pods()) == 1; adopted != (ending == model.Living) {
					t.Errorf("adopted: %v", adopted)
				}
				if left := files(t, m.cfg.SpoolDir); len(left) != 0 {
					t.Errorf("notes left: %v", left)
				}
			})
		}
	}
}

// An adopted pod is as old as its note: a DEL that was spooled before the adoption is
// carried out after it, and the address of a later pod stays the later pod's (CNI-37).
func TestAdoptedIsAsOldAsItsNote(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("new", "web", "10.1.0.2", multiPort()))
	leaveNote(t, m.cfg.NetnsDir, attachedNote("old", "10.1.0.2", time.Minute))
	leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.3", time.Minute))
	m.Replay(t.Context())
	if d := cmp.Diff([]string{"c1", "new"}, attachedIDs(m)); d != "" || len(w.endpoints()) != 2 {
		t.Errorf("attached (-want +got):\n%s\npublished %v", d, w.endpoints())
	}
	leaveNote(t, m.cfg.SpoolDir, deletedNote("c1", time.Now().Add(-30*time.Second)))
	m.Replay(t.Context())
	if d := cmp.Diff([]string{"new"}, attachedIDs(m)); d != "" {
		t.Errorf("attached after the DEL (-want +got):\n%s", d)
	}
}

// The pod that lost its address to a new one does not come back for it.
func TestEvictedIsNotAdopted(t *testing.T) {
	_, m := setup(t)
	mustAdd(t, m, addRequest("old", "web", "10.1.0.2", multiPort()))
	leaveNote(t, m.cfg.NetnsDir, attachedNote("old", "10.1.0.2", time.Minute))
	mustAdd(t, m, addRequest("new", "web", "10.1.0.2", multiPort()))
	del(t, m, "new")
	m.Replay(t.Context())
	if got := attachedIDs(m); len(got) != 0 {
		t.Errorf("attached: %v", got)
	}
}

// Contract 5: a pod that asks by its label and came while Envoy was away starts unmeshed.
// Its plugin takes back what it told, as it does not know how far the registrar came, and
// then leaves a note: the pod is adopted once Envoy is there, and not after a later DEL.
func TestUnmeshedAfterUndo(t *testing.T) {
	del := func(t *testing.T, m *Manager) {
		t.Helper()
		if _, err := m.Del(t.Context(), key("c1")); err != nil {
			t.Fatal(err)
		}
	}
	spooled := func(t *testing.T, m *Manager) {
		t.Helper()
		leaveNote(t, m.cfg.SpoolDir, deletedNote("c1", time.Now()))
	}
	for name, tt := range map[string]struct {
		undo, later func(*testing.T, *Manager)
		want        []string
	}{
		"told":             {del, nil, []string{"c1"}},
		"spooled":          {spooled, nil, []string{"c1"}},
		"told, deleted":    {del, del, []string{}},
		"spooled, deleted": {spooled, spooled, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			w, o, m := orchestrated(t)
			word := workload(nil)
			word.Word, word.Running = annotation.Joined, false
			o.set(word)
			req := addRequest("c1", "payments-1", "10.1.0.2", nil)
			w.missing = "no Envoy"
			if err := m.Add(t.Context(), req, func(Decision) error { return nil }); KindOf(err) != NotReady {
				t.Fatal(err)
			}
			tt.undo(t, m)
			leaveNote(t, m.cfg.SpoolDir, &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Unmeshed{Unmeshed: req}})
			word.Running = true
			m.Observe(t.Context(), o.set(word))
			o.sandboxes = []*cniv1.AddRequest{req}
			m.Sweep(t.Context())
			if got := attachedIDs(m); len(got) != 0 {
				t.Fatalf("attached without Envoy: %v", got)
			}
			if tt.later != nil {
				tt.later(t, m)
			}
			w.missing = ""
			m.Sweep(t.Context())
			if d := cmp.Diff(tt.want, attachedIDs(m)); d != "" {
				t.Errorf("attached (-want +got):\n%s", d)
			}
		})
	}
}

// MESH-34: neither a runtime nor a signer that hangs holds a sweep up for long, and the next
// one does what was to be done.
func TestSweepIsBounded(t *testing.T) {
	bounded := func(t *testing.T, m *Manager) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // fake time
		defer cancel()
		m.Sweep(ctx)
		if ctx.Err() != nil {
			t.Error("the sweep waited")
		}
	}
	t.Run("runtime", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, o, m := orchestrated(t)
			o.set(workload(multiPort()))
			req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
			req.CniArgs[argUID] = "u1"
			o.sandboxes, o.hangs = []*cniv1.AddRequest{req}, true
			bounded(t, m)
			o.hangs = false
			m.Sweep(t.Context())
			if d := cmp.Diff([]string{"c1"}, attachedIDs(m)); d != "" {
				t.Errorf("attached (-want +got):\n%s", d)
			}
		})
	})
	t.Run("signer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w, m := restoredWithoutC2(t, emptyDB(t))
			w.gone[key("c2")], w.signHangs = false, true
			bounded(t, m)
			w.signHangs = false
			m.Sweep(t.Context())
			if w.count("mesh add c2-eth0") != 1 {
				t.Errorf("told: %v", w.events())
			}
		})
	})
}
