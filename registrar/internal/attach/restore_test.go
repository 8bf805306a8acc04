package attach

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// leaveNote puts a note where the plugin would.
func leaveNote(t *testing.T, dir string, note *cniv1.Note) {
	t.Helper()
	name, err := spool.Name(note.Key(), spool.KindOf(note))
	if err != nil {
		t.Fatal(err)
	}
	if err := spool.Write(dir, name, note); err != nil {
		t.Fatal(err)
	}
}

func deletedNote(id string, at time.Time) *cniv1.Note {
	return &cniv1.Note{UnixNanos: at.UnixNano(), What: &cniv1.Note_Deleted{Deleted: &cniv1.DelRequest{
		Attachment: &cniv1.Attachment{ContainerId: id, Ifname: "eth0"}, Network: "podnet",
	}}}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// CNI-29, contract 5: DELs that were spooled while the registrar was away are
// carried out before anything is served, 256 of them within a second, known or not;
// one that is older than a new ADD of the same sandbox is void.
func TestRestoreReplaysTheSpool(t *testing.T) {
	w := newWorld()
	db := emptyDB(t)
	m := newManager(t, w, db)
	for _, id := range []string{"c1", "c2", "c3"} {
		mustAdd(t, m, addRequest(id, "web-"+id, "10.1.0."+id[1:], multiPort()))
	}
	w2 := newWorld()
	m2 := newManager(t, w2, db)
	leaveNote(t, m2.cfg.SpoolDir, deletedNote("c1", time.Now()))
	leaveNote(t, m2.cfg.SpoolDir, deletedNote("c2", time.Now().Add(-time.Hour)))
	for i := range 254 {
		leaveNote(t, m2.cfg.SpoolDir, deletedNote(fmt.Sprintf("unknown%d", i), time.Now()))
	}
	before := db.Stats().TxStats
	if err := m2.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A note costs no write of its own: each would wait for the disk.
	after := db.Stats().TxStats
	if n := after.GetWrite() - before.GetWrite(); n > 32 {
		t.Errorf("the replay of 256 notes made %d page writes, want those of one transaction", n)
	}
	got := []string{}
	for _, p := range m2.Pods() {
		got = append(got, p.Key.ContainerID)
	}
	if d := cmp.Diff([]string{"c2", "c3"}, got); d != "" {
		t.Errorf("attached after the replay (-want +got):\n%s", d)
	}
	if left := files(t, m2.cfg.SpoolDir); len(left) != 0 {
		t.Errorf("notes left: %v", left)
	}
}

// restoredWithoutC2 is a restart with c1 and c2 stored, of which c2's network
// namespace went while nobody looked.
func restoredWithoutC2(t *testing.T, db *bolt.DB) (*world, *Manager) {
	t.Helper()
	m := newManager(t, newWorld(), db)
	mustAdd(t, m, addRequest("c1", "a", "10.1.0.2", multiPort()))
	mustAdd(t, m, addRequest("c2", "b", "10.1.0.3", multiPort()))
	w := newWorld()
	w.gone[key("c2")] = true
	again := newManager(t, w, db)
	again.cfg.NetnsDir = m.cfg.NetnsDir
	if err := os.WriteFile(filepath.Join(filepath.Dir(m.cfg.NetnsDir), runMarker), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := again.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w, again
}

// Contract 4.8, MESH-24: a restart tells everybody what runs, and a pod whose
// network namespace is gone to nobody.
func TestRestoreTells(t *testing.T) {
	db := emptyDB(t)
	w, m2 := restoredWithoutC2(t, db)
	want := []string{"ensure payments", "mesh add c1-eth0", "dns add c1-eth0", "publish c1-eth0 8080=unhealthy,9090=unhealthy"}
	if d := cmp.Diff(want, w.events()); d != "" {
		t.Errorf("told (-want +got):\n%s", d)
	}
	// It is not forgotten before it was missing for some passes, and told when it is back.
	w.gone[key("c2")] = false
	m2.Sweep(t.Context())
	if _, ok := w.watchers[key("c2")]; !ok {
		t.Error("a pod whose netns is back was not told")
	}
}

// Pods that run over a change of the trust domain get certificates and records of the
// new one, and are stored with it.
func TestRestoreUnderAnotherTrustDomain(t *testing.T) {
	db := emptyDB(t)
	m := newManager(t, newWorld(), db)
	for _, id := range []string{"c1", "c2"} {
		mustAdd(t, m, addRequest(id, "web", "10.1.0."+id[1:], multiPort()))
	}
	w := newWorld()
	m2 := newManager(t, w, db)
	m2.cfg.TrustDomain = "mesh.corp"
	if err := m2.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	for uid, ep := range w.endpoints() {
		if got := ep.Identity.SPIFFE(); got != "spiffe://mesh.corp/ns/default/sa/payments" {
			t.Errorf("%s is published as %s", uid, got)
		}
	}
	stored, err := m2.store.load()
	if err != nil || len(stored) != 2 || len(w.endpoints()) != 2 {
		t.Errorf("stored %d, %v; published %d", len(stored), err, len(w.endpoints()))
	}
	for _, p := range stored {
		if p.Identity.TrustDomain != "mesh.corp" {
			t.Errorf("%s is stored as %s", p.Key, p.Identity.SPIFFE())
		}
	}
}

// MESH-41: after a reboot, which wipes the run folder, every pin is void: all that have no
// netns go at once, without the breaker, with their records, and the next start, which is
// no reboot, has nothing of them. What has a netns all the same stays.
func TestRestoreAfterReboot(t *testing.T) {
	db := emptyDB(t)
	m := newManager(t, newWorld(), db)
	for i := range 6 {
		mustAdd(t, m, addRequest(fmt.Sprintf("c%d", i), "web", fmt.Sprintf("10.1.0.%d", i+2), multiPort()))
	}
	w, want := newWorld(), []string{}
	for i := range 5 {
		id := fmt.Sprintf("c%d", i)
		w.gone[key(id)] = true
		want = append(want, "withdraw "+id+"-eth0", "unpin "+id+"-eth0")
	}
	m2, counted := metered(t, newManager(t, w, db)) // another run folder: no marker in it
	if err := m2.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"c5"}, attachedIDs(m2)); d != "" {
		t.Errorf("attached (-want +got):\n%s", d)
	}
	got := slices.DeleteFunc(w.events(), func(e string) bool { return !strings.HasPrefix(e, "withdraw") && !strings.HasPrefix(e, "unpin") })
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("taken away (-want +got):\n%s", d)
	}
	if stored, err := m2.store.load(); err != nil || len(stored) != 1 {
		t.Errorf("stored %v, %v", stored, err)
	}
	if n := counted()["portolan_attach_detached_total"]; n != 5 {
		t.Errorf("counted %v as detached, want 5", n)
	}
	w.gone[key("c5")] = true
	m3 := newManager(t, w, db)
	m3.cfg.NetnsDir = m2.cfg.NetnsDir
	if err := m3.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"c5"}, attachedIDs(m3)); d != "" {
		t.Errorf("a restart takes for gone what it cannot see (-want +got):\n%s", d)
	}
}

// XDS-43, MESH-41: a running pod whose record was lost is found by the plugin's
// note beside its pin, with what it was added with, as old as that; one whose netns is
// gone is not, and one that has a record is as its record says.
func TestRestoreRecovers(t *testing.T) {
	_, former := setup(t)
	mustAdd(t, former, addRequest("c0", "payments-0", "10.1.0.2", map[string]string{"endpoint.aether.io/ports": "8080"}))
	w := newWorld()
	m, counted := metered(t, newManager(t, w, former.cfg.DB))
	if _, err := m.markRun(); err != nil {
		t.Fatal(err)
	}
	recovered := attachedNote("c1", "10.1.0.3", time.Hour)
	for _, note := range []*cniv1.Note{attachedNote("c0", "10.1.0.2", time.Hour), recovered, attachedNote("c2", "10.1.0.4", time.Hour)} {
		leaveNote(t, m.cfg.NetnsDir, note)
	}
	w.gone[key("c2")] = true
	if err := m.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"c0", "c1"}, attachedIDs(m)); d != "" {
		t.Fatalf("attached (-want +got):\n%s", d)
	}
	pods := m.Pods()
	if len(pods[0].Ports) != 1 || pods[0].Since.UnixNano() != former.Pods()[0].Since.UnixNano() {
		t.Errorf("stored, and now %+v", pods[0])
	}
	if len(pods[1].Ports) != 2 || pods[1].Service.Name != "payments" || pods[1].Since.UnixNano() != recovered.GetUnixNanos() {
		t.Errorf("recovered %+v, want it with its ports, as old as its note", pods[1])
	}
	if stored, err := m.store.load(); err != nil || len(stored) != 2 {
		t.Errorf("stored %v, %v", stored, err)
	}
	if n := counted()["portolan_attach_recovered_total"]; n != 1 {
		t.Errorf("counted %v as recovered, want 1", n)
	}
	w.watchers[key("c1")](PortState{Inbound: true, Listening: []uint16{8080}})
	if got := w.record("c1-eth0"); got != "8080=healthy,9090=unhealthy" {
		t.Errorf("published %s", got)
	}
}

// An ADD that is under way when the registrar starts is none that was lost: it comes. But
// where there is no record of any pod they may all have been lost.
func TestRestoreLeavesAddsUnderWay(t *testing.T) {
	for _, kept := range []bool{true, false} {
		_, former := setup(t)
		var want []string
		if kept {
			mustAdd(t, former, addRequest("c0", "payments-0", "10.1.0.2", multiPort()))
			want = append(want, "c0")
		} else {
			want = append(want, "young")
		}
		m := newManager(t, newWorld(), former.cfg.DB)
		leaveNote(t, m.cfg.NetnsDir, attachedNote("young", "10.1.0.3", time.Second))
		leaveNote(t, m.cfg.NetnsDir, attachedNote("z-old", "10.1.0.4", adoptAge+time.Second))
		if err := m.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(append(want, "z-old"), attachedIDs(m)); d != "" {
			t.Errorf("records kept: %t: attached (-want +got):\n%s", kept, d)
		}
	}
}

// Who waits for the records of restored pods waits for none whose network namespace is not
// there: nobody publishes it.
func TestToldOfWhatIsThere(t *testing.T) {
	_, former := setup(t)
	mustAdd(t, former, addRequest("c0", "payments-0", "10.1.0.2", multiPort()))
	mustAdd(t, former, addRequest("c1", "payments-1", "10.1.0.3", multiPort()))
	w := newWorld()
	m := newManager(t, w, former.cfg.DB)
	if _, err := m.markRun(); err != nil {
		t.Fatal(err)
	}
	w.gone[key("c0")] = true
	if err := m.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if told := m.Told(); len(told) != 1 || told[0].Key != key("c1") || len(m.Pods()) != 2 {
		t.Errorf("told of %v of %v, want c1 of both", told, m.Pods())
	}
}

// A pod whose record was lost is published when it is recovered, though the orchestrator
// spoke of it before.
func TestRecoveredIsPublished(t *testing.T) {
	w, o, m := orchestrated(t)
	m.Observe(t.Context(), o.set(workload(multiPort())))
	leaveNote(t, m.cfg.NetnsDir, attachedNote("c1", "10.1.0.2", time.Hour))
	synctest.Test(t, func(t *testing.T) {
		if err := m.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	w.watchers[key("c1")](listening(8080))
	if got := w.record("c1-eth0"); got != "8080=healthy,9090=unhealthy" {
		t.Errorf("published %q", got)
	}
}

// What an ADD that was killed has left is removed once its network namespace is gone: not
// while it may be at work, nor what belongs to an attachment, nor what lives.
func TestAbandoned(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("attached", "payments-1", "10.1.0.2", multiPort()))
	w.missing = "no Envoy" // nobody is adopted
	for id, ago := range map[string]time.Duration{"attached": time.Hour, "lives": time.Hour, "killed": time.Hour, "new": 0} {
		leaveNote(t, m.cfg.NetnsDir, attachedNote(id, "10.1.0.9", ago))
		w.gone[key(id)] = id != "lives"
	}
	m.Replay(t.Context())
	got := slices.DeleteFunc(w.events(), func(e string) bool { return !strings.HasPrefix(e, "unpin") })
	if d := cmp.Diff([]string{"unpin killed-eth0"}, got); d != "" {
		t.Errorf("removed (-want +got):\n%s", d)
	}
}

// Contract 5: a pod that started unmeshed although its annotations ask for the
// mesh is adopted in place and captured; one that did not ask is left alone.
func TestUnmeshedNotes(t *testing.T) {
	w, m := setup(t)
	leaveNote(t, m.cfg.SpoolDir, &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Unmeshed{
		Unmeshed: addRequest("c1", "payments-1", "10.1.0.2", multiPort()),
	}})
	leaveNote(t, m.cfg.SpoolDir, &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Unmeshed{
		Unmeshed: addRequest("c2", "other", "10.1.0.3", map[string]string{"app": "x"}),
	}})
	w.missing = "no Envoy"
	m.Replay(t.Context())
	if left := files(t, m.cfg.SpoolDir); len(left) != 1 {
		t.Errorf("notes %v, want the one that cannot be adopted yet", left)
	}
	w.missing = ""
	m.Replay(t.Context())
	if pods := m.Pods(); len(pods) != 1 || pods[0].Netns != "/run/netns/c1" {
		t.Errorf("adopted %+v, want c1 by the runtime's own path", pods)
	}
	if left := files(t, m.cfg.SpoolDir); len(left) != 0 {
		t.Errorf("notes left: %v", left)
	}
	captured := false
	for _, e := range w.events() {
		captured = captured || e == "ensure capture c1-eth0"
	}
	if !captured {
		t.Error("the adopted pod is not captured")
	}
}

// DEL of a stored pod that nobody was told of withdraws and uncaptures it and releases no
// identity: c1 has the same one, and keeps its certificate.
func TestDelOfUntold(t *testing.T) {
	db := emptyDB(t)
	w, m2 := restoredWithoutC2(t, db)
	before := len(w.events())
	if _, err := m2.Del(t.Context(), key("c2")); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"withdraw c2-eth0", "await withdrawn c2-eth0", "connected c2-eth0", "uncapture c2-eth0"}, w.events()[before:]); d != "" {
		t.Errorf("DEL (-want +got):\n%s", d)
	}
	if pods := m2.Pods(); len(pods) != 1 || pods[0].Key != key("c1") {
		t.Errorf("attached: %v", pods)
	}
}
