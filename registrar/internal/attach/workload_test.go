package attach

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// Contract 1, 3: account, opt-in and ports come from the API object.
func TestDecideInACluster(t *testing.T) {
	joined := func(edit func(*model.Workload)) *model.Workload {
		w := workload(nil)
		edit(&w)
		return &w
	}
	tests := []struct {
		name       string
		request    map[string]string
		workload   *model.Workload
		meshed     bool
		wantReason string
		wantPorts  int
		service    string
	}{
		{"annotated", multiPort(), joined(func(w *model.Workload) { w.Annotations = multiPort() }), true, "by annotation", 2, "payments"},
		{"the account names the service", nil, joined(func(w *model.Workload) { w.Annotations = map[string]string{annotation.KeyPorts: "8080"} }), true, "by annotation", 1, "till"},
		{"the object's annotations are newer", map[string]string{annotation.KeyPorts: "7000"}, joined(func(w *model.Workload) { w.Annotations = multiPort() }), true, "by annotation", 2, "payments"},
		{"by label", nil, joined(func(w *model.Workload) { w.Word = annotation.Joined }), true, "by the label", 1, "till"},
		{"out by label", nil, joined(func(w *model.Workload) { w.Word = annotation.Out }), false, `"false"`, 0, ""},
		{"the pod's annotation wins over labels", nil, joined(func(w *model.Workload) {
			w.Word, w.Annotations = annotation.Joined, map[string]string{annotation.KeyManaged: "false"}
		}), false, `"false"`, 0, ""},
		{"ports and a namespace that stays out", nil, joined(func(w *model.Workload) { w.Word, w.Annotations = annotation.Out, multiPort() }), true, "by annotation", 2, "payments"},
		{"a label that is no word", nil, joined(func(w *model.Workload) { w.WordProblem = "label of the pod: neither" }), false, "neither", 0, ""},
		{"host network", multiPort(), joined(func(w *model.Workload) { w.HostNetwork, w.Annotations = true, multiPort() }), false, "node's network", 0, ""},
		{"ended", multiPort(), joined(func(w *model.Workload) { w.Ending, w.Annotations = model.Finished, multiPort() }), false, "has ended", 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d, err := Decide(addRequest("c1", "payments-1", "10.1.0.2", tt.request), Facts{TrustDomain: "aether.internal", Workload: tt.workload})
			if err != nil {
				t.Fatal(err)
			}
			if d.Meshed != tt.meshed || !strings.Contains(d.Reason, tt.wantReason) {
				t.Fatalf("meshed %v, %q; want %v, %q", d.Meshed, d.Reason, tt.meshed, tt.wantReason)
			}
			if !d.Meshed {
				return
			}
			if len(d.Pod.Ports) != tt.wantPorts || d.Pod.Service.Name != tt.service || d.Pod.UID != "u1" {
				t.Errorf("pod %+v", d.Pod)
			}
			if got := d.Pod.Identity.SPIFFE(); got != "spiffe://aether.internal/ns/default/sa/till" {
				t.Errorf("identity %s", got)
			}
		})
	}
}

// Contract 1: a ServiceAccount with a dot names no service, and the error says what to do; a
// pod that does it has its account as its identity.
func TestAccountThatNamesNoService(t *testing.T) {
	w := workload(map[string]string{annotation.KeyPorts: "8080"})
	w.Account = "till.v2"
	req := addRequest("c1", "payments-1", "10.1.0.2", nil)
	_, err := Decide(req, Facts{TrustDomain: "aether.internal", Workload: &w})
	want := `the pod's ServiceAccount "till.v2" cannot name its service, as it is not a DNS label: give the pod the annotation endpoint.aether.io/service, `
	if err == nil || !strings.Contains(err.Error(), want) || KindOf(err) != BadInput {
		t.Errorf("got %v, want BadInput: %s", err, want)
	}
	w.Annotations[annotation.KeyService] = "till"
	d, err := Decide(req, Facts{TrustDomain: "aether.internal", Workload: &w})
	if err != nil || d.Pod.Service.Name != "till" || d.Pod.Identity.SPIFFE() != "spiffe://aether.internal/ns/default/sa/till.v2" {
		t.Errorf("with the annotation: %+v, %v", d.Pod, err)
	}
}

// A pod whose address is one of the mesh's services could not be called: its ADD fails and
// names address, range and settings, and so hears the owner of a pod that runs already.
func TestAddressOfAService(t *testing.T) {
	const want = "the pod's address 198.18.4.2 is in 198.18.0.0/15, whose addresses are the mesh's services: give pods addresses of another range, or the mesh (settings vipRange and "
	w, o, m := orchestrated(t)
	m.cfg.ServiceRanges = model.Ranges{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")}
	o.set(workload(multiPort()))
	req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
	req.Addresses = []string{"10.1.0.2", "198.18.4.2/16"}
	req.CniArgs[argUID] = "u1"
	if err := m.Add(t.Context(), req, func(Decision) error { return nil }); KindOf(err) != BadInput || !strings.Contains(err.Error(), want) {
		t.Errorf("ADD: %v", err)
	}
	o.sandboxes = []*cniv1.AddRequest{req}
	for range 3 {
		m.Sweep(t.Context())
	}
	if len(o.reports) != 1 || !strings.Contains(o.reports[0], reasonInvalid+": the pod is not in the mesh: "+want) {
		t.Errorf("reports: %q", o.reports)
	}
	if len(w.events()) != 0 {
		t.Errorf("events: %v", w.events())
	}
	req.Addresses = []string{"198.20.0.1", "fd70:6f72:746f:1::1"}
	mustAdd(t, m, req)
}

// CNI-36 and contract 5: a pod that the orchestrator has not told of fails when it
// asks for the mesh, and starts unmeshed otherwise.
func TestUnknownPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := orchestrated(t)
		o.unsynced = true
		err := m.Add(t.Context(), addRequest("c1", "payments-1", "10.1.0.2", multiPort()), func(Decision) error { return nil })
		if KindOf(err) != NotReady || !strings.Contains(err.Error(), "account is not known") {
			t.Errorf("a pod that asks for the mesh: %v", err)
		}
		var got Decision
		if err := m.Add(t.Context(), addRequest("c2", "other", "10.1.0.3", nil), func(d Decision) error { got = d; return nil }); err != nil || got.Meshed || !strings.Contains(got.Reason, "adopted if they ask for it") {
			t.Errorf("a pod that does not: %+v, %v", got, err)
		}
		if len(w.events()) != 0 {
			t.Errorf("events: %v", w.events())
		}
	})
}

// A port is HEALTHY only while the pod is Ready, DRAINING from the deletion time on
// whatever the probes say (XDS-10), and gone with the pod's end (CNI-37). Once it turns
// Ready its listen table is looked at without waiting for the next turn.
func TestReadinessAndEnd(t *testing.T) {
	w, o, m := orchestrated(t)
	wl := workload(multiPort())
	wl.Ready = false
	o.set(wl)
	mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
	w.listen(key("c1"), listening(8080, 9090))
	steps := []struct {
		name   string
		change func(*model.Workload)
		want   string
		looks  int
	}{
		{"not Ready", func(*model.Workload) {}, "8080=unhealthy,9090=unhealthy", 0},
		{"Ready", func(w *model.Workload) { w.Ready = true }, "8080=healthy,9090=healthy", 1},
		{"Ready as before", func(*model.Workload) {}, "8080=healthy,9090=healthy", 1},
		{"not Ready again", func(w *model.Workload) { w.Ready = false }, "8080=unhealthy,9090=unhealthy", 1},
		{"terminating", func(w *model.Workload) { w.Ending, w.Ready = model.Terminating, true }, "8080=draining,9090=draining", 2},
		{"terminating, probes fail", func(w *model.Workload) { w.Ready = false }, "8080=draining,9090=draining", 2},
		{"terminating, the application closes a port", func(*model.Workload) { w.listen(key("c1"), listening(9090)) }, "8080=draining,9090=draining", 2},
		{"finished", func(w *model.Workload) { w.Ending = model.Finished }, "none", 2},
	}
	for _, s := range steps {
		s.change(&wl)
		m.Observe(t.Context(), wl)
		if got := w.record("c1-eth0"); got != s.want {
			t.Errorf("%s: %s, want %s", s.name, got, s.want)
		}
		if got := w.count("kick c1-eth0"); got != s.looks {
			t.Errorf("%s: looked at the listen table %d times so far, want %d", s.name, got, s.looks)
		}
	}
	before := len(w.events())
	w.listen(key("c1"), listening())
	if got := w.events()[before:]; len(got) != 0 {
		t.Errorf("a finished pod's listen table led to %v", got)
	}
}

// Contract 4.8: after a restart a record stands until the orchestrator has spoken.
func TestRestartBeforeTheOrchestratorSpeaks(t *testing.T) {
	w, _, m := serving(t, 8080, 9090)

	o, again := restarted(t, w, m)
	o.unsynced = true
	if err := again.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.listen(key("c1"), listening(8080))
	again.Sweep(t.Context())
	if got := w.record("c1-eth0"); got != "8080=healthy,9090=healthy" {
		t.Errorf("before the orchestrator spoke: %s", got)
	}
	again.Observe(t.Context(), workload(multiPort()))
	if got := w.record("c1-eth0"); got != "8080=healthy,9090=unhealthy" {
		t.Errorf("after it spoke: %s", got)
	}
	// A pod that went meanwhile is never spoken of: the complete list says so.
	o.unsynced = false
	again.Sweep(t.Context())
	if got := w.record("c1-eth0"); got != "none" {
		t.Errorf("a pod that the orchestrator does not have: %s", got)
	}
}

// Contract 4.8: after a restart a record stands until the pod's listen table was read,
// though the orchestrator has spoken: a registrar that is rolled takes no pod out of
// the load assignments. The record of a pod that has ended goes at once.
func TestRestartBeforeTheListenTableIsRead(t *testing.T) {
	w, _, m := serving(t, 8080, 9090)
	wl := workload(multiPort())

	_, again := restarted(t, w, m)
	before := len(w.events())
	again.Observe(t.Context(), wl)
	if got := w.events()[before:]; !slices.Equal(got, []string{"kick c1-eth0"}) {
		t.Errorf("before the listen table was read the orchestrator's word led to %v", got)
	}
	wl.Ending = model.Finished
	again.Observe(t.Context(), wl)
	if got := w.record("c1-eth0"); got != "none" {
		t.Errorf("a pod that has ended: %s", got)
	}
}

// Contract 3: a region and zone that are learned after the start reach every record that
// there is, once; those that must stand as they are get them with their next change, and a
// pod that has none gets no record for it.
func TestLocalityIsLearnedLate(t *testing.T) {
	w, o, m := serving(t, 8080, 9090)
	client := workload(map[string]string{"endpoint.aether.io/ports": "none"})
	client.UID, client.ObjectUID, client.Name = "uid-client", "uid-client", "client-1"
	o.set(client)
	req := addRequest("c2", "client-1", "10.1.0.3", map[string]string{"endpoint.aether.io/ports": "none"})
	req.CniArgs["K8S_POD_UID"] = "uid-client"
	mustAdd(t, m, req)

	zone := func() string { return w.endpoints()["c1-eth0"].Locality.Zone }
	before := len(w.events())
	for range 2 {
		m.SetLocality(t.Context(), model.Locality{Region: "eu", Zone: "north"})
	}
	want := []string{"publish c1-eth0 8080=healthy,9090=healthy"}
	if d := cmp.Diff(want, w.events()[before:]); d != "" || zone() != "north" {
		t.Errorf("zone %q; events (-want +got):\n%s", zone(), d)
	}

	o, again := restarted(t, w, m)
	o.unsynced = true
	if err := again.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	again.SetLocality(t.Context(), model.Locality{Region: "eu", Zone: "south"})
	if zone() != "north" {
		t.Errorf("zone %q before the orchestrator spoke", zone())
	}
	w.listen(key("c1"), listening(8080, 9090))
	again.Observe(t.Context(), workload(multiPort()))
	if zone() != "south" {
		t.Errorf("zone %q after it spoke", zone())
	}
}

// Two things that change at once write two records, of which the older may come last: it
// is refused, which is no fault. A record that is refused for another reason is one.
func TestOvertakenRecord(t *testing.T) {
	w, o, m := orchestrated(t)
	var log bytes.Buffer
	m.log = slog.New(slog.NewTextHandler(&log, nil))
	o.set(workload(multiPort()))
	mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
	w.mu.Lock()
	w.onPublish = func() { m.SetLocality(t.Context(), model.Locality{Region: "eu", Zone: "north"}) }
	w.mu.Unlock()
	w.listen(key("c1"), listening(8080, 9090))
	if got := w.endpoints()["c1-eth0"]; got.Locality.Zone != "north" || describe(got) != "c1-eth0 8080=healthy,9090=healthy" {
		t.Errorf("published is %s in %v", describe(got), got.Locality)
	}
	if strings.Contains(log.String(), "cannot publish") {
		t.Errorf("the log says:\n%s", log.String())
	}
	w.mu.Lock()
	last := w.published["c1-eth0"]
	last.Generation = math.MaxUint64
	w.published["c1-eth0"] = last
	w.mu.Unlock()
	w.listen(key("c1"), listening(8080))
	if !strings.Contains(log.String(), "cannot publish") {
		t.Error("a record that is refused is not logged")
	}
}

// table is a registry that takes no record that is not newer than its end.
type table struct{ *registry.Table }

func (r table) Publish(_ context.Context, ep model.Endpoint) error { return r.Upsert(ep) }

func (r table) Withdraw(_ context.Context, uid string, generation uint64) error {
	return r.Delete(uid, generation)
}

// A record that was withdrawn comes back, also on a clock that was set back meanwhile.
func TestClockGoesBack(t *testing.T) {
	w, _, m := serving(t, 8080, 9090)
	records := table{registry.NewTable()}
	m.cfg.Registry = records
	wl := workload(multiPort())
	wl.Ending = model.Finished
	m.Observe(t.Context(), wl)
	m.cfg.Now = func() time.Time { return time.Now().Add(-time.Hour) }
	wl.Ending = model.Living
	m.Observe(t.Context(), wl)
	if n := records.Len(); n != 1 {
		t.Errorf("%d records; told %v", n, w.events())
	}
}

// Contract 1: a changed annotation changes the ports of a running pod, new ones are
// published after their proof, old ones leave before their chain.
func TestChangedPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t, 8080, 9090)
		wl := workload(multiPort())
		before := len(w.events())

		wl.Annotations = map[string]string{annotation.KeyPorts: "8080,7000", annotation.KeyService: "renamed", annotation.KeyWeight: "9"}
		m.Observe(t.Context(), wl)
		synctest.Wait()
		if got := w.record("c1-eth0"); got != "8080=healthy,9090=unhealthy" {
			t.Errorf("before the old chain goes: %s", got)
		}
		w.mu.Lock()
		w.noListeners = true
		w.mu.Unlock()
		time.Sleep(m.cfg.DrainWait + provePorts + time.Second) // fake time, and that of the store
		synctest.Wait()
		w.listen(key("c1"), listening(7000, 8080, 9090))
		if got := w.record("c1-eth0"); got != "7000=unhealthy,8080=healthy" {
			t.Errorf("without the proof of the new chain: %s", got)
		}
		w.mu.Lock()
		w.noListeners = false
		w.mu.Unlock()
		m.Sweep(t.Context())
		if got := w.record("c1-eth0"); got != "7000=healthy,8080=healthy" {
			t.Errorf("at the end: %s", got)
		}
		ep := w.endpoints()["c1-eth0"]
		if ep.Service.Name != "payments" || ep.Weight != 1 {
			t.Errorf("more than the ports changed: %+v", ep)
		}
		order := slices.DeleteFunc(w.events()[before:], func(e string) bool {
			return !strings.HasPrefix(e, "mesh add") && e != "publish c1-eth0 8080=healthy,9090=unhealthy"
		})
		if d := cmp.Diff([]string{"publish c1-eth0 8080=healthy,9090=unhealthy", "mesh add c1-eth0"}, order); d != "" {
			t.Errorf("order (-want +got):\n%s", d)
		}
		stored, err := m.store.load()
		if err != nil || len(stored) != 1 || len(stored[0].Ports) != 2 || stored[0].Ports[0].Number != 7000 {
			t.Errorf("stored: %+v, %v", stored, err)
		}
	})
}

// The last word counts, also when it comes while an earlier one is half done, and equals
// what that had left of the ports until then.
func TestPortsChangeTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t, 7000, 8080, 9090)
		wl := workload(multiPort())
		for _, ports := range []string{"8080,7000", "8080"} {
			wl.Annotations = map[string]string{annotation.KeyPorts: ports}
			m.Observe(t.Context(), wl)
			synctest.Wait()
		}
		time.Sleep(2 * (m.cfg.DrainWait + provePorts)) // fake time
		synctest.Wait()
		w.listen(key("c1"), listening(7000, 8080, 9090))
		if got := w.record("c1-eth0"); got != "8080=healthy" {
			t.Errorf("record: %s, want the last word", got)
		}
	})
}

// Contract 4.4: of a running pod that is to serve nothing any more, or nothing of what it
// served, nothing is called before its chains go.
func TestPortsAllChange(t *testing.T) {
	const uncalled = "publish c1-eth0 8080=unhealthy,9090=unhealthy"
	for ports, want := range map[string]struct{ first, record string }{"none": {"withdraw c1-eth0", "none"}, "7000": {uncalled, "7000=healthy"}} {
		t.Run(ports, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _, m := serving(t, 7000, 8080, 9090)
				wl := workload(multiPort())
				before := len(w.events())
				wl.Annotations = map[string]string{annotation.KeyPorts: ports}
				m.Observe(t.Context(), wl)
				time.Sleep(m.cfg.DrainWait + provePorts) // fake time
				synctest.Wait()
				w.listen(key("c1"), listening(7000, 8080, 9090))
				if got := w.record("c1-eth0"); got != want.record {
					t.Errorf("record: %s, want %s", got, want.record)
				}
				order := slices.DeleteFunc(w.events()[before:], func(e string) bool {
					return !strings.HasPrefix(e, "mesh add") && !strings.HasPrefix(e, "withdraw") && e != uncalled
				})
				if d := cmp.Diff([]string{want.first, "mesh add c1-eth0"}, order); d != "" {
					t.Errorf("order (-want +got):\n%s", d)
				}
			})
		})
	}
}

// A pod that serves nothing any more has no record, also when its application lets go of the
// ports while they drain.
func TestPortsGoWhileTheyDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t, 8080, 9090)
		wl := workload(map[string]string{annotation.KeyPorts: "none"})
		m.Observe(t.Context(), wl)
		synctest.Wait()
		w.listen(key("c1"), listening(9090))
		time.Sleep(m.cfg.DrainWait + provePorts) // fake time
		if got := w.record("c1-eth0"); got != "none" {
			t.Errorf("record: %s", got)
		}
	})
}

// A sweep does not wait for ports that are just being changed.
func TestSweepWhilePortsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t, 7000, 8080, 9090)
		w.hang()
		m.Observe(t.Context(), workload(map[string]string{annotation.KeyPorts: "7000"}))
		synctest.Wait()
		began := time.Now()
		m.settlePorts(t.Context())
		if took := time.Since(began); took > 0 {
			t.Errorf("it waited for %v", took)
		}
		time.Sleep(m.cfg.DrainWait + provePorts) // fake time
	})
}

// CNI-37: a pod whose address is given on while its ports change leaves nothing behind.
func TestEvictedWhilePortsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t, 8080, 9090)
		next := addRequest("c2", "client-1", "10.1.0.2", map[string]string{annotation.KeyPorts: "none"})
		w.mu.Lock()
		w.onTell = func() {
			if err := m.evictAddresses(t.Context(), mustDecide(t, next)); err != nil {
				t.Error(err)
			}
		}
		w.mu.Unlock()
		m.Observe(t.Context(), workload(map[string]string{annotation.KeyPorts: "8080,9090=h2,7000"}))
		time.Sleep(m.cfg.DrainWait + provePorts) // fake time
		events := w.events()
		for _, what := range []string{"mesh", "dns"} {
			told := slices.DeleteFunc(slices.Clone(events), func(e string) bool { return e != what+" add c1-eth0" && e != what+" remove c1-eth0" })
			if last := told[len(told)-1]; last != what+" remove c1-eth0" {
				t.Errorf("last is %q", last)
			}
		}
		if stored, err := m.store.load(); err != nil || len(stored) != 0 || len(w.watchers) != 0 {
			t.Errorf("stored %v, %v, watched %d", stored, err, len(w.watchers))
		}
	})
}

// mustDecide returns the pod that a request means, as of now.
func mustDecide(t *testing.T, req *cniv1.AddRequest) model.Pod {
	t.Helper()
	d, err := Decide(req, Facts{TrustDomain: "aether.internal", Now: time.Now()})
	if err != nil || !d.Meshed {
		t.Fatalf("decided %+v, %v", d, err)
	}
	return d.Pod
}

// Contract 2: a portless name never stands for a port that no pod declared its default,
// also while the default port of a running pod goes, or changes its protocol.
func TestDefaultGoes(t *testing.T) {
	for _, test := range []struct{ name, ports, during, after string }{
		{"another number", "7000,9090", "8080=unhealthy,9090=healthy default 8080", "7000=healthy,9090=healthy default 7000"},
		{"another class", "8080=tcp,9090", "8080=unhealthy,9090=healthy default 8080", "8080=healthy,9090=healthy default 8080"},
		{"another protocol of its class", "8080=h2,9090", "8080=healthy,9090=healthy default 8080", "8080=healthy,9090=healthy default 8080"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, _, m := serving(t, 7000, 8080, 9090)
				wl := workload(multiPort())
				record := func() string { return fmt.Sprint(w.record("c1-eth0"), " default ", w.endpoints()["c1-eth0"].Default) }
				wl.Annotations = map[string]string{annotation.KeyPorts: test.ports}
				m.Observe(t.Context(), wl)
				synctest.Wait()
				if got := record(); got != test.during {
					t.Errorf("during the change: %s, want %s", got, test.during)
				}
				time.Sleep(m.cfg.DrainWait + provePorts) // fake time
				synctest.Wait()
				w.listen(key("c1"), listening(7000, 8080, 9090))
				if got := record(); got != test.after {
					t.Errorf("after it: %s, want %s", got, test.after)
				}
			})
		})
	}
}

// A running pod whose annotations ask for the mesh no more does not leave it: it keeps its
// ports and serves none that it never listed, and its owner is told once. One that joined
// by a label serves its default port then.
func TestAnnotationsTakenAway(t *testing.T) {
	for _, test := range []struct {
		name    string
		word    annotation.Managed
		left    map[string]string
		want    string
		reports int
	}{
		{"by annotation", annotation.Unset, nil, "9090=healthy", 1},
		{"set to stay out", annotation.Unset, map[string]string{annotation.KeyManaged: "false", annotation.KeyPorts: "7000"}, "9090=healthy", 1},
		{"by label", annotation.Joined, map[string]string{annotation.KeyService: "payments"}, "8080=healthy", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, o, m := orchestrated(t)
				had := map[string]string{annotation.KeyService: "payments", annotation.KeyPorts: "9090"}
				wl := workload(had)
				wl.Word = test.word
				wl = o.set(wl)
				mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", had))
				w.listen(key("c1"), listening(7000, 8080, 9090))
				wl.Annotations = test.left
				for range 3 {
					m.Observe(t.Context(), wl)
				}
				time.Sleep(m.cfg.DrainWait + provePorts) // fake time
				synctest.Wait()
				w.listen(key("c1"), listening(7000, 8080, 9090))
				if got := w.record("c1-eth0"); got != test.want {
					t.Errorf("record: %s, want %s", got, test.want)
				}
				if len(o.reports) != test.reports {
					t.Errorf("reports: %q", o.reports)
				}
			})
		})
	}
}

// Contract 1: the owner of a pod with an annotation that nothing reads is told, once,
// whether the pod is in the mesh or not.
func TestUnknownAnnotation(t *testing.T) {
	typo := map[string]string{"endpoint.aether.io/prots": "8080"}
	t.Run("meshed", func(t *testing.T) {
		_, o, m := orchestrated(t)
		annotations := multiPort()
		maps.Copy(annotations, typo)
		o.set(workload(annotations))
		mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", annotations))
		if len(o.reports) != 1 || !strings.Contains(o.reports[0], reasonUnknown) || !strings.Contains(o.reports[0], "prots") {
			t.Errorf("reports: %q", o.reports)
		}
	})
	t.Run("running outside", func(t *testing.T) {
		_, o, m := orchestrated(t)
		wl := workload(typo)
		wl.Running = true
		o.set(wl)
		for range 3 {
			m.Sweep(t.Context())
		}
		if len(o.reports) != 1 || !strings.Contains(o.reports[0], reasonUnknown) || !strings.Contains(o.reports[0], "not in the mesh") {
			t.Errorf("reports: %q", o.reports)
		}
	})
}

// The owner of a pod that says what it is in the mesh, and not that it joins, is told, once.
// One that says that it stays out knows.
func TestAnnotationsOfNoMember(t *testing.T) {
	for _, tt := range []struct {
		name        string
		annotations map[string]string
		word        annotation.Managed
		told        bool
	}{
		{"service alone", map[string]string{annotation.KeyService: "inventory"}, annotation.Unset, true},
		{"stays out by annotation", map[string]string{annotation.KeyService: "inventory", annotation.KeyManaged: "false"}, annotation.Unset, false},
		{"stays out by label", map[string]string{annotation.KeyService: "inventory"}, annotation.Out, false},
		{"nothing of the mesh", nil, annotation.Unset, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, o, m := orchestrated(t)
			wl := workload(tt.annotations)
			wl.Word = tt.word
			o.set(wl)
			for range 3 {
				m.Sweep(t.Context())
			}
			want := reasonUnmeshed + ": the pod is not in the mesh, for which it has the annotation " + annotation.KeyService
			if told := len(o.reports) == 1 && strings.Contains(o.reports[0], want); told != tt.told || !tt.told && len(o.reports) > 0 {
				t.Errorf("reports: %q", o.reports)
			}
		})
	}
}

// Why a running pod is outside the mesh comes with what its owner can do about that.
func TestRemedyOfOutsider(t *testing.T) {
	const (
		node    = "the pod uses the node's network and has no ports of its own to capture; take hostNetwork out of the pod, or the mesh's annotations"
		service = "the pod is not in the mesh, for which it has the annotation endpoint.aether.io/service: "
		slip    = "nothing reads the annotation endpoint.aether.io/prots: look for a slip in its name; the pod is not in the mesh: "
	)
	for _, tt := range []struct {
		name        string
		annotations map[string]string
		edit        func(*model.Workload)
		want        string
	}{
		{"service alone", map[string]string{annotation.KeyService: "a"}, nil, reasonUnmeshed + ": " + service + "no port annotation and no aether.io/managed; add endpoint.aether.io/ports"},
		{"service alone, the node's network", map[string]string{annotation.KeyService: "a"}, func(w *model.Workload) { w.HostNetwork = true }, reasonUnmeshed + ": " + service + node},
		{"ports, the node's network", map[string]string{annotation.KeyPorts: "8080"}, func(w *model.Workload) { w.HostNetwork = true }, reasonUnmeshed + ": " + node},
		{"invalid ports, the node's network", map[string]string{annotation.KeyPorts: "no"}, func(w *model.Workload) { w.HostNetwork = true }, reasonUnmeshed + ": " + node},
		{"a slip", map[string]string{"endpoint.aether.io/prots": "1"}, nil, reasonUnknown + ": " + slip + "no port annotation and no aether.io/managed"},
		{"a slip, the node's network", map[string]string{"endpoint.aether.io/prots": "1"}, func(w *model.Workload) { w.HostNetwork = true }, reasonUnknown + ": " + slip + node},
		{"a label that is no word", nil, func(w *model.Workload) { w.WordProblem = "label of the pod: write this" }, reasonInvalid + ": the pod is not in the mesh: label of the pod: write this"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := workload(tt.annotations)
			if tt.edit != nil {
				tt.edit(&w)
			}
			_, wrong := outside(w)
			var got []string
			for _, p := range wrong {
				got = append(got, p.Reason+": "+p.Message)
			}
			expect(t, "problems", got, tt.want)
		})
	}
}

// Contract 1: an invalid change keeps the old set and is reported once.
func TestInvalidChange(t *testing.T) {
	w, o, m := serving(t, 8080, 9090)
	wl := workload(multiPort())
	wl.Annotations = map[string]string{annotation.KeyPorts: "8080,99999"}
	for range 3 {
		m.Observe(t.Context(), wl)
	}
	if got := w.record("c1-eth0"); got != "8080=healthy,9090=healthy" {
		t.Errorf("record: %s", got)
	}
	if len(o.reports) != 1 || !strings.Contains(o.reports[0], reasonInvalid) || !strings.Contains(o.reports[0], "99999") {
		t.Errorf("reports: %q", o.reports)
	}
}

// CNI-2, CNI-74: running pods that no ADD told of are adopted, with the runtime's
// netns; not those that have no sandbox yet, use the node's network, or are the
// cluster's own. Who runs and cannot join is told why; whose ADD fails hears it from
// the kubelet.
func TestMissedPods(t *testing.T) {
	w, o, m := orchestrated(t)
	missed := o.set(workload(multiPort()))
	pod := func(uid, namespace string, edit func(*model.Workload)) {
		wl := workload(multiPort())
		wl.UID, wl.ObjectUID, wl.Name, wl.Namespace = uid, uid, "pod-"+uid, namespace
		edit(&wl)
		o.set(wl)
	}
	pod("u2", "default", func(*model.Workload) {})
	pod("u3", "default", func(w *model.Workload) { w.HostNetwork = true })
	pod("u4", "kube-system", func(*model.Workload) {})
	pod("u5", "default", func(w *model.Workload) { w.Ending = model.Terminating })
	invalid := func(w *model.Workload) { w.Annotations = map[string]string{annotation.KeyPorts: "no"} }
	pod("u6", "default", invalid)
	pod("u7", "default", func(w *model.Workload) { invalid(w); w.Running = false })

	odd := func(w *model.Workload) { w.WordProblem = "label aether.io/managed=\"yes\" of the pod" }
	pod("u8", "default", func(w *model.Workload) { odd(w); w.Annotations = nil })
	pod("u9", "default", func(w *model.Workload) { odd(w); w.Annotations = map[string]string{annotation.KeyManaged: "false"} })

	w.missing = "Envoy is not connected"
	m.Sweep(t.Context())
	if len(m.missed) != 2 || len(o.reports) != 3 {
		t.Errorf("without Envoy: %d missed, want 2; reports %q, want those of u3, u6 and u8", len(m.missed), o.reports)
	}
	w.missing = ""
	m.Sweep(t.Context()) // the runtime is away
	if len(m.missed) != 2 {
		t.Errorf("%d missed with the runtime away, want 2", len(m.missed))
	}
	req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
	req.CniArgs[argUID], req.Netns = "u1", req.GetRuntimeNetns()
	o.sandboxes = []*cniv1.AddRequest{req}
	m.Sweep(t.Context())
	pods := m.Pods()
	if len(pods) != 1 || pods[0].UID != missed.ObjectUID || pods[0].Netns != "/run/netns/c1" || len(m.missed) != 0 {
		t.Errorf("adopted %+v, missed %d", pods, len(m.missed))
	}
	if !slices.Contains(w.events(), "ensure capture c1-eth0") {
		t.Error("the adopted pod was not captured")
	}
	slices.Sort(o.reports)
	if len(o.reports) != 3 || !strings.Contains(o.reports[2], "pod-u8 "+reasonInvalid+": the pod is not in the mesh: label") || !strings.Contains(o.reports[0], "pod-u3 "+reasonUnmeshed) || !strings.Contains(o.reports[1], "pod-u6 "+reasonInvalid+": the pod is not in the mesh: ") {
		t.Errorf("reports: %q", o.reports)
	}
}

// Pods that ask for the mesh while they run, by whatever word, are taken in at the event:
// all pods of a namespace that was labelled by one look at the runtime. Who cannot be taken
// in makes no further looks, whatever is said of it.
func TestLateWord(t *testing.T) {
	const pods = 30
	for name, ask := range map[string]func(*model.Workload){
		"label":      func(w *model.Workload) { w.Word = annotation.Joined },
		"annotation": func(w *model.Workload) { w.Annotations = multiPort() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, o, m := orchestrated(t)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- m.Run(ctx) }()
				observeAll := func(edit func(*model.Workload)) {
					for i := range pods {
						wl := workload(nil)
						wl.Name, wl.UID = fmt.Sprint("pod-", i), fmt.Sprint("uid-", i)
						wl.ObjectUID = wl.UID
						edit(&wl)
						m.Observe(ctx, o.set(wl))
						time.Sleep(lateLook / (2 * pods)) // fake time, as below
					}
				}
				o.sandboxes = []*cniv1.AddRequest{}
				for i := range pods {
					req := addRequest(fmt.Sprint("c", i), fmt.Sprint("pod-", i), fmt.Sprint("10.1.0.", i+2), nil)
					req.CniArgs[argUID], req.Netns, req.AnnotationsKnown = fmt.Sprint("uid-", i), req.GetRuntimeNetns(), false
					o.sandboxes = append(o.sandboxes, req)
				}
				observeAll(func(*model.Workload) {})
				time.Sleep(time.Minute)
				if got := len(m.Pods()); got != 0 || o.lists != 0 {
					t.Errorf("before the word: %d attached, %d looks", got, o.lists)
				}
				observeAll(ask)
				time.Sleep(2 * lateLook)
				synctest.Wait()
				if got := len(m.Pods()); got != pods || o.lists != 1 {
					t.Errorf("after the word: %d of %d attached, %d looks", got, pods, o.lists)
				}

				// Envoy does not take this one.
				w.mu.Lock()
				w.noListeners = true
				w.mu.Unlock()
				hangs := workload(nil)
				hangs.Name, hangs.UID, hangs.ObjectUID = "hangs", "uid-h", "uid-h"
				ask(&hangs)
				req := addRequest("ch", "hangs", "10.1.1.2", nil)
				req.CniArgs[argUID], req.Netns = "uid-h", req.GetRuntimeNetns()
				o.mu.Lock()
				o.sandboxes = append(o.sandboxes, req)
				o.mu.Unlock()
				for range 5 {
					m.Observe(ctx, o.set(hangs))
					time.Sleep(2 * adoptTimeout)
				}
				if got := len(m.Pods()); got != pods || o.lists != 2 || len(m.missed) != 1 {
					t.Errorf("with an Envoy that hangs: %d attached, %d looks, %d missed", got, o.lists, len(m.missed))
				}
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// CNI-D9: a start does not wait an interval for the pods that it missed, but for
// what an ADD needs and for the first complete list.
func TestMissedPodsAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := orchestrated(t)
		m.cfg.SweepInterval = time.Hour
		w.missing, o.unsynced = "Envoy is not connected", true
		o.set(workload(multiPort()))
		req := addRequest("c1", "payments-1", "10.1.0.2", multiPort())
		req.CniArgs[argUID], req.Netns = "u1", req.GetRuntimeNetns()
		o.sandboxes = []*cniv1.AddRequest{req}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		for _, step := range []struct {
			missing  string
			unsynced bool
			want     int
		}{
			{"Envoy is not connected", true, 0},
			{"Envoy is not connected", false, 0},
			{"", true, 0},
			{"", false, 1},
		} {
			w.mu.Lock()
			w.missing = step.missing
			w.mu.Unlock()
			o.mu.Lock()
			o.unsynced = step.unsynced
			o.mu.Unlock()
			time.Sleep(2 * firstLook)
			synctest.Wait()
			if got := len(m.Pods()); got != step.want {
				t.Errorf("%+v: %d attached", step, got)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
