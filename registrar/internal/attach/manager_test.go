package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The order of an ADD is the one of contract 4.2: certificate, listeners and DNS,
// the endpoint UNHEALTHY, then the three proofs, then what listens.
func TestAddProvesBeforeItPublishesHealthy(t *testing.T) {
	w, m := setup(t)
	decided := -1
	err := m.Add(t.Context(), addRequest("c1", "payments-1", "10.1.0.2", multiPort()), func(d Decision) error {
		if !d.Meshed {
			t.Errorf("not meshed: %s", d.Reason)
		}
		decided = len(w.events())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"ensure payments", "mesh add c1-eth0", "dns add c1-eth0", "publish c1-eth0 8080=unhealthy,9090=unhealthy",
		"await listeners c1-eth0",
		"publish c1-eth0 8080=unhealthy,9090=unhealthy", // the mesh ports listen, nothing is proven yet
		"await secrets c1-eth0", "await dns c1-eth0",
		"publish c1-eth0 8080=unhealthy,9090=unhealthy",
	}
	if d := cmp.Diff(want, w.events()); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	if decided != 4 {
		t.Errorf("decision was sent after %d events, want 4: before the proof is awaited", decided)
	}
	w.watchers[key("c1")](PortState{Inbound: true, OutboundHTTP: true, OutboundTCP: true, Listening: []uint16{8080}})
	if got := describe(w.endpoints()["c1-eth0"]); got != "c1-eth0 8080=healthy,9090=unhealthy" {
		t.Errorf("after 8080 listens: %s", got)
	}
}

// Contract 4.4, XDS-21: a port that listens is not published while 15008 does not.
func TestNoHealthyPortWithoutInbound(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
	w.watchers[key("c1")](PortState{OutboundHTTP: true, OutboundTCP: true, Listening: []uint16{8080, 9090}})
	if got := describe(w.endpoints()["c1-eth0"]); got != "c1-eth0 8080=unhealthy,9090=unhealthy" {
		t.Errorf("without 15008: %s", got)
	}
}

// Each missing proof fails the ADD with a kind that means "try again", names what
// is missing, and leaves nothing behind (CNI-D4, contract 5, XDS-21).
func TestAddFailsAndUndoes(t *testing.T) {
	tests := []struct {
		name string
		set  func(*world)
		want string
	}{
		{"envoy away", func(w *world) { w.missing = "Envoy is not connected" }, "Envoy is not connected"},
		{"no certificate", func(w *world) { w.signErr = errors.New("signer is away") }, "no certificate for spiffe://aether.internal/ns/default/sa/payments: signer is away"},
		{"listeners not accepted", func(w *world) { w.noListeners = true }, "envoy has not accepted the pod's listeners"},
		{"not listening", func(w *world) { w.silentListen = true }, "acknowledged but not listening yet (15008, 15002)"},
		{"secrets not accepted", func(w *world) { w.noSecrets = true }, "envoy has not accepted the pod's certificates"},
		{"no dns", func(w *world) { w.dnsErr = errors.New("not connected") }, "mesh DNS of the pod: not connected"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w, m := setup(t)
			tt.set(w)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			err := m.Add(ctx, addRequest("c1", "payments-1", "10.1.0.2", multiPort()), func(Decision) error { return nil })
			if err == nil || !strings.Contains(err.Error(), tt.want) || KindOf(err) != NotReady {
				t.Fatalf("error %v (kind %d), want NotReady with %q", err, KindOf(err), tt.want)
			}
			if len(w.endpoints()) != 0 || len(m.Pods()) != 0 || len(w.watchers) != 0 {
				t.Errorf("left behind: %v, %v, %d watchers", w.endpoints(), m.Pods(), len(w.watchers))
			}
			stored, err := m.store.load()
			if err != nil || len(stored) != 0 {
				t.Errorf("stored %v, %v", stored, err)
			}
		})
	}
}

// Contract 1: bad annotations refuse the pod with a text that names the key, and
// a pod that stays out is told to nobody.
func TestAddDecisions(t *testing.T) {
	tests := []struct {
		name   string
		mutate func(*cniv1.AddRequest)
		meshed bool
		bad    string
	}{
		{"meshed", func(*cniv1.AddRequest) {}, true, ""},
		{"no annotation", func(r *cniv1.AddRequest) { r.Annotations = map[string]string{"app": "x"} }, false, ""},
		{"annotations unknown (CNI-45)", func(r *cniv1.AddRequest) { r.AnnotationsKnown = false }, false, ""},
		{"managed false", func(r *cniv1.AddRequest) { r.Annotations["aether.io/managed"] = "false" }, false, ""},
		{"bad weight of a pod that does not join", func(r *cniv1.AddRequest) { r.Annotations = map[string]string{"endpoint.aether.io/weight": "x"} }, false, ""},
		{"bad port", func(r *cniv1.AddRequest) { r.Annotations["endpoint.aether.io/ports"] = "8080,99999" }, false, "endpoint.aether.io/ports"},
		{"no service name", func(r *cniv1.AddRequest) {
			r.CniArgs[argName] = "Bad_Name"
			delete(r.GetAnnotations(), "endpoint.aether.io/service")
		}, false, `the pod's name "Bad_Name" cannot name its service, as it is not a DNS label: give the pod the annotation endpoint.aether.io/service, `},
		{"bad namespace", func(r *cniv1.AddRequest) { r.CniArgs[argNamespace] = "Bad_NS" }, false, "K8S_POD_NAMESPACE"},
		{"bad address", func(r *cniv1.AddRequest) { r.Addresses = []string{"10.1.2"} }, false, "10.1.2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w, m := setup(t)
			req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
			tt.mutate(req)
			var got Decision
			err := m.Add(t.Context(), req, func(d Decision) error { got = d; return nil })
			if tt.bad != "" {
				if err == nil || !strings.Contains(err.Error(), tt.bad) || KindOf(err) != BadInput {
					t.Fatalf("error %v, want BadInput naming %s", err, tt.bad)
				}
			} else if err != nil {
				t.Fatal(err)
			}
			if got.Meshed != tt.meshed {
				t.Errorf("meshed %v (%s), want %v", got.Meshed, got.Reason, tt.meshed)
			}
			if !tt.meshed && len(w.events()) != 0 {
				t.Errorf("somebody was told of a pod that stays out: %v", w.events())
			}
		})
	}
}

// CNI-22: a late DEL of an old sandbox of the same pod touches only the old one.
func TestStaleDelLeavesTheNewSandbox(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	mustAdd(t, m, addRequest("c2", "web-0", "10.1.0.3", multiPort()))
	if _, err := m.Del(t.Context(), key("c1")); err != nil {
		t.Fatal(err)
	}
	if _, ok := w.endpoints()["c2-eth0"]; !ok || len(w.endpoints()) != 1 {
		t.Errorf("published %v, want exactly c2", w.endpoints())
	}
	if slices.Contains(w.events(), "withdraw c2-eth0") || slices.Contains(w.events(), "mesh remove c2-eth0") {
		t.Error("the new sandbox was touched")
	}
}

// CNI-27: DEL of an unknown attachment succeeds, five times, and tells nobody.
// Contract 4.4: DEL withdraws before the listeners go.
func TestDel(t *testing.T) {
	w, m := setup(t)
	for range 5 {
		if uncaptured, err := m.Del(t.Context(), key("never")); err != nil || uncaptured {
			t.Fatalf("uncaptured %v, %v", uncaptured, err)
		}
	}
	if len(w.events()) != 0 {
		t.Errorf("events of unknown DELs: %v", w.events())
	}
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	before := len(w.events())
	if uncaptured, err := m.Del(t.Context(), key("c1")); err != nil || !uncaptured {
		t.Fatalf("uncaptured %v, %v", uncaptured, err)
	}
	want := []string{"withdraw c1-eth0", "await withdrawn c1-eth0", "connected c1-eth0", "uncapture c1-eth0", "dns remove c1-eth0", "mesh remove c1-eth0", "release payments", "disconnect c1-eth0"}
	if d := cmp.Diff(want, w.events()[before:]); d != "" {
		t.Errorf("DEL (-want +got):\n%s", d)
	}
}

// Contract 4.6: what is in flight finishes before the pod's listeners and connections go,
// unless it takes longer than DEL may wait.
func TestDelWaitsForWhatIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := setup(t)
		mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
		mustAdd(t, m, addRequest("c2", "web-1", "10.1.0.3", multiPort()))
		looks := func(id string) (n int) {
			for _, e := range w.events() {
				if e == "connected "+id+"-eth0" {
					n++
				}
			}
			return n
		}
		for id, connected := range map[string]int{"c1": 10, "c2": 1 << 20} {
			w.connected = connected
			if _, err := m.Del(t.Context(), key(id)); err != nil {
				t.Fatal(err)
			}
		}
		if n := looks("c1"); n != 11 {
			t.Errorf("%d looks, want until nobody is connected", n)
		}
		if n, most := looks("c2"), int(m.cfg.DrainWait/idlePoll); n < most-1 || n > most+1 {
			t.Errorf("%d looks, want about %d", n, most)
		}
	})
}

// A capture that cannot be removed is left to the plugin, and the pod goes all the same.
func TestDelLeavesCapture(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	w.removeErr = errors.New("no nftables")
	if uncaptured, err := m.Del(t.Context(), key("c1")); err != nil || uncaptured {
		t.Errorf("uncaptured %v, %v", uncaptured, err)
	}
	if len(m.Pods()) != 0 || len(w.endpoints()) != 0 {
		t.Errorf("left %v, published %v", m.Pods(), w.endpoints())
	}
}

// A pod's capture is made with the TCP ports of the decision; those that changed until
// its proof are set again, and only those.
func TestTCPPortsChangeDuringAdd(t *testing.T) {
	for _, changes := range []bool{false, true} {
		w, m := setup(t)
		want := []netip.AddrPort{netip.MustParseAddrPort("198.18.0.9:5432"), netip.MustParseAddrPort("198.18.0.9:6379")}
		err := m.Add(t.Context(), addRequest("c1", "web-0", "10.1.0.2", multiPort()), func(Decision) error {
			if changes {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.tcpPorts = want
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if got, set := w.tcp[key("c1")]; set != changes || changes && !slices.Equal(got, want) {
			t.Errorf("changes %v: set %v to %v", changes, set, got)
		}
	}
}

// CNI-37: an address that comes again has one owner: the newer attachment.
func TestAddressReuse(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("old", "job-1", "10.1.0.2", multiPort()))
	mustAdd(t, m, addRequest("new", "web-0", "10.1.0.2", multiPort()))
	if got := w.endpoints(); len(got) != 1 || got["new-eth0"].PodName != "web-0" || got["new-eth0"].Since.IsZero() {
		t.Errorf("published %v, want only the new owner, with the time of its ADD", got)
	}
}

// XDS-47: a late listen-table state of a detached pod resurrects nothing.
func TestLateStateAfterDel(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	late := w.watchers[key("c1")]
	if _, err := m.Del(t.Context(), key("c1")); err != nil {
		t.Fatal(err)
	}
	late(PortState{Inbound: true, Listening: []uint16{8080}})
	if len(w.endpoints()) != 0 {
		t.Errorf("resurrected: %v", w.endpoints())
	}
}

// CNI-30: what GC removes, by list and by netns.
func TestGC(t *testing.T) {
	tests := []struct {
		name  string
		valid []model.AttachmentKey
		want  []model.AttachmentKey
	}{
		{"empty list: only what has no netns", nil, []model.AttachmentKey{key("c2")}},
		{"live one listed", []model.AttachmentKey{key("c1")}, []model.AttachmentKey{key("c2")}},
		{"both listed", []model.AttachmentKey{key("c1"), key("c2")}, []model.AttachmentKey{}},
		{"list without the live one", []model.AttachmentKey{key("other")}, []model.AttachmentKey{key("c1"), key("c2")}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w, m := setup(t)
			mustAdd(t, m, addRequest("c1", "a", "10.1.0.2", multiPort()))
			mustAdd(t, m, addRequest("c2", "b", "10.1.0.3", multiPort()))
			other := addRequest("c3", "c", "10.1.0.4", multiPort())
			other.Network = "othernet"
			mustAdd(t, m, other)
			w.gone[key("c2")], w.gone[key("c3")] = true, true
			got, err := m.GC(t.Context(), "podnet", tt.valid)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("removed (-want +got):\n%s", d)
			}
			if _, ok := w.endpoints()["c3-eth0"]; !ok {
				t.Error("an attachment of another network was removed")
			}
		})
	}
}

// CNI-26, MESH-41: a ghost goes after three passes; a mass of ghosts does not go.
func TestGhosts(t *testing.T) {
	w, m := setup(t)
	for i := range 10 {
		mustAdd(t, m, addRequest(fmt.Sprintf("c%d", i), "web", fmt.Sprintf("10.1.0.%d", i+2), multiPort()))
	}
	w.gone[key("c0")] = true
	for pass := range ghostPasses {
		if len(m.Pods()) != 10 {
			t.Fatalf("a ghost went before pass %d", pass)
		}
		m.Sweep(t.Context())
	}
	if len(m.Pods()) != 9 || !slices.Contains(w.events(), "unpin c0-eth0") {
		t.Errorf("%d pods left, want 9 and the pin removed", len(m.Pods()))
	}
	for i := 1; i < 6; i++ {
		w.gone[key(fmt.Sprintf("c%d", i))] = true
	}
	for range ghostPasses + 2 {
		m.Sweep(t.Context())
	}
	if len(m.Pods()) != 9 {
		t.Errorf("%d pods left after a mass of ghosts, want 9: the breaker", len(m.Pods()))
	}
	if _, err := m.GC(t.Context(), "podnet", nil); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("GC of a mass of ghosts on one witness: %v, want a refusal", err)
	}
}

// A network namespace that is away for some passes, and back between, is no ghost: only
// passes in a row count.
func TestGhostComesBack(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web", "10.1.0.2", multiPort()))
	for pass := range 3 * ghostPasses {
		w.gone[key("c1")] = pass%ghostPasses != 0
		m.Sweep(t.Context())
	}
	if len(m.Pods()) != 1 {
		t.Error("a pod went that was there at every third look")
	}
}

// CNI-57: every sweep looks whether the captures of running pods are whole, and of no others.
func TestSweepLooksAtCaptures(t *testing.T) {
	db := emptyDB(t)
	w, m := restoredWithoutC2(t, db)
	for range 2 {
		m.Sweep(t.Context())
	}
	if n, other := w.count("ensure capture c1-eth0"), w.count("ensure capture c2-eth0"); n != 2 || other != 0 {
		t.Errorf("looked %d times at a running pod and %d times at one that is not there, want 2 and 0", n, other)
	}
}

// A drained node: a mass of ghosts goes if the orchestrator has let go of their pods as
// well, and only those. Two witnesses are enough, as for GC (CNI-30).
func TestGhostsOfEndedPods(t *testing.T) {
	w, o, m := orchestrated(t)
	for i := range 10 {
		req := addRequest(fmt.Sprintf("c%d", i), fmt.Sprintf("web-%d", i), fmt.Sprintf("10.1.0.%d", i+2), multiPort())
		wl := workload(multiPort())
		wl.Name, wl.UID = req.GetCniArgs()[argName], fmt.Sprintf("u%d", i)
		wl.ObjectUID = wl.UID
		o.set(wl)
		mustAdd(t, m, req)
		w.gone[key(req.GetAttachment().GetContainerId())] = true
	}
	o.mu.Lock()
	for i := range 5 {
		delete(o.pods, fmt.Sprintf("u%d", i))
	}
	o.mu.Unlock()
	for range ghostPasses {
		m.Sweep(t.Context())
	}
	if d := cmp.Diff([]string{"c5", "c6", "c7", "c8", "c9"}, attachedIDs(m)); d != "" {
		t.Errorf("attached (-want +got):\n%s", d)
	}
}

// Contract 4.8: a restart finds what was attached, tells everybody again, and
// keeps what the registry has until the listen table speaks.
func TestRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld()
	m := newManager(t, w, db)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	want := m.Pods()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	w2 := newWorld()
	m2 := newManager(t, w2, openDB(t, path))
	if d := cmp.Diff(want, m2.Pods(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(time.Time.Equal)); d != "" {
		t.Errorf("after restart (-before +after):\n%s", d)
	}
}

// A stored record that cannot be read is set aside under its key; the others load.
func TestUnreadableRecord(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	db := m.cfg.DB
	if err := db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(bucketAttachments)).Put([]byte("c9/eth0"), []byte("{broken"))
	}); err != nil {
		t.Fatal(err)
	}
	m2 := newManager(t, w, db)
	if len(m2.Pods()) != 1 {
		t.Errorf("loaded %v", m2.Pods())
	}
	if err := db.View(func(tx *bolt.Tx) error {
		if v := tx.Bucket([]byte(bucketAttachments + ".unreadable")).Get([]byte("c9/eth0")); string(v) != "{broken" {
			return fmt.Errorf("set aside: %q", v)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// ADD twice without DEL changes nothing that is there (C11).
func TestAddTwice(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	since := m.Pods()[0].Since
	mustAdd(t, m, addRequest("c1", "web-0", "10.1.0.2", multiPort()))
	if len(m.Pods()) != 1 || !m.Pods()[0].Since.Equal(since) || len(w.endpoints()) != 1 {
		t.Errorf("after the second ADD: %v", m.Pods())
	}
}

// A second ADD of the same attachment that fails, or that serves nothing any more,
// leaves no record of the first one.
func TestSecondAddTakesOverTheRecord(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "a", "10.1.0.2", multiPort()))
	w.signErr = errors.New("the signer is away")
	if err := m.Add(t.Context(), addRequest("c1", "a", "10.1.0.2", multiPort()), func(Decision) error { return nil }); err == nil {
		t.Fatal("ADD without a certificate succeeded")
	}
	if got := w.endpoints(); len(got) != 0 || len(m.Pods()) != 0 {
		t.Errorf("a second ADD failed and %v are published", got)
	}
	w.signErr = nil
	mustAdd(t, m, addRequest("c2", "b", "10.1.0.3", multiPort()))
	mustAdd(t, m, addRequest("c2", "b", "10.1.0.3", map[string]string{"endpoint.aether.io/ports": "none"}))
	if got := w.endpoints(); len(got) != 0 {
		t.Errorf("a pod that serves nothing any more publishes %v", got)
	}
}

// Of two ADDs with one address that wait at the same time the later one owns it,
// whichever goes on first (CNI-37).
func TestLaterAddOwnsTheAddress(t *testing.T) {
	_, m := setup(t)
	now := time.Now()
	m.cfg.Now = func() time.Time { return now }
	mustAdd(t, m, addRequest("c2", "b", "10.1.0.2", multiPort()))
	now = now.Add(-time.Second) // c1 came before, and waited
	err := m.Add(t.Context(), addRequest("c1", "a", "10.1.0.2", multiPort()), func(Decision) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "c2-eth0") {
		t.Errorf("the earlier ADD: %v, want an error that names the later", err)
	}
	if _, err := m.Check(key("c2")); err != nil {
		t.Errorf("the later attachment is gone: %v", err)
	}
}
