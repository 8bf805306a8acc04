package attach

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// outsiders returns what the status says is wrong with pods that are not attached.
func outsiders(m *Manager) (out []string) {
	for _, o := range m.Outsiders() {
		for _, p := range o.Problems {
			out = append(out, o.Namespace+"/"+o.Name+" "+p.Reason+": "+p.Message)
		}
	}
	return out
}

// problems returns what the status says is wrong with the pod of c1.
func problems(m *Manager) (out []string) {
	for _, s := range m.Status() {
		for _, p := range s.Problems {
			out = append(out, s.Pod.Namespace+"/"+s.Pod.Name+" "+p.Reason+": "+p.Message)
		}
	}
	return out
}

func expect(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// The status says of a pod outside the mesh what its event says, as long as that is so: a
// mended pod has nothing wrong, and hears of the same mistake again.
func TestProblemsOfOutsider(t *testing.T) {
	_, o, m := orchestrated(t)
	o.sandboxes = []*cniv1.AddRequest{}
	service := o.set(workload(map[string]string{annotation.KeyService: "payments"}))
	other := workload(map[string]string{annotation.KeyPorts: "no"})
	other.Name, other.UID, other.ObjectUID = "a-1", "u2", "u2"
	o.set(other)
	for range 2 {
		m.Sweep(t.Context())
	}
	if len(o.reports) != 2 {
		t.Errorf("reports: %q", o.reports)
	}
	want := []string{o.reports[1], o.reports[0]} // by name
	if !strings.Contains(want[0], `a-1 InvalidAnnotation: the pod is not in the mesh: endpoint.aether.io/ports="no"`) || !strings.Contains(want[1], "payments-1 NotMeshed: the pod is not in the mesh, for which it has the annotation") {
		t.Errorf("reports: %q", o.reports)
	}
	expect(t, "status", outsiders(m), want...)

	mended := service
	mended.Annotations = nil
	o.set(mended)
	m.Sweep(t.Context())
	expect(t, "status once it was mended", outsiders(m), want[0])
	o.set(service)
	m.Sweep(t.Context())
	expect(t, "status when it is back", outsiders(m), want...)
	if len(o.reports) != 3 || o.reports[2] != want[1] {
		t.Errorf("reports when it is back: %q", o.reports)
	}

	other.Ending = model.Finished
	o.mu.Lock()
	delete(o.pods, other.ObjectUID)
	o.mu.Unlock()
	m.Observe(t.Context(), other)
	expect(t, "status once it ended", outsiders(m), want[1])
}

// The status names pods that run outside the mesh and should not, also while what the
// registrar lacks is no fault of theirs, of which no event tells. One that was taken in has
// nothing wrong.
func TestProblemsOfMissedPod(t *testing.T) {
	w, o, m := orchestrated(t)
	o.set(workload(multiPort()))
	notYet := workload(multiPort())
	notYet.Name, notYet.UID, notYet.ObjectUID, notYet.Running = "b-1", "u2", "u2", false
	o.set(notYet)
	w.missing = "Envoy is not connected"
	m.Sweep(t.Context())
	const outside = "default/payments-1 NotMeshed: the pod runs outside the mesh and "
	expect(t, "without Envoy", outsiders(m), outside+"is not taken in yet: Envoy is not connected")
	w.missing = ""
	m.Sweep(t.Context())
	expect(t, "without the runtime", outsiders(m), outside+"is not taken in yet: the container runtime does not say where it runs: the runtime is away")
	sandboxes := m.cfg.Sandboxes
	m.cfg.Sandboxes = nil
	m.Sweep(t.Context())
	expect(t, "without any runtime", outsiders(m), outside+"is not taken in yet: the registrar asks no container runtime for it (--cri-socket is empty); make the pod anew")
	m.cfg.Sandboxes = sandboxes
	expect(t, "events", o.reports)

	req := addRequest("c1", "payments-1", "10.1.0.2", nil)
	req.CniArgs[argUID], req.Netns = "u1", req.GetRuntimeNetns()
	o.sandboxes = []*cniv1.AddRequest{req}
	w.dnsErr = errors.New("no sockets")
	const told = outside + "could not be taken in yet; the registrar's log says why"
	for range 2 {
		m.Sweep(t.Context())
	}
	expect(t, "not adopted", outsiders(m), told)
	expect(t, "events of one not adopted", o.reports, told)
	w.missing = "Envoy is not connected"
	m.Sweep(t.Context())
	expect(t, "not adopted, without Envoy", outsiders(m), told)
	w.missing, w.dnsErr = "", nil
	m.Sweep(t.Context())
	expect(t, "adopted", append(outsiders(m), problems(m)...))
	expect(t, "events in the end", o.reports, told)
}

// A pod that is attached when the rest of its adoption fails has nothing wrong once a sweep
// has seen to that.
func TestProblemsOfHalfAdopted(t *testing.T) {
	w, o, m := orchestrated(t)
	o.set(workload(multiPort()))
	req := addRequest("c1", "payments-1", "10.1.0.2", nil)
	req.CniArgs[argUID], req.Netns = "u1", req.GetRuntimeNetns()
	o.sandboxes = []*cniv1.AddRequest{req}
	w.ensureErr = errors.New("no rules")
	m.Sweep(t.Context())
	expect(t, "status", problems(m), o.reports...)
	if len(o.reports) != 1 {
		t.Errorf("reports: %q", o.reports)
	}
	w.ensureErr = nil
	m.Sweep(t.Context())
	expect(t, "status after a sweep", problems(m))
}

// What is wrong with a pod is beside it in the status, several things at one time, each
// until it was mended; none is told again by what else is wrong.
func TestProblemsOfAttached(t *testing.T) {
	_, o, m := serving(t, 8080, 9090)
	say := func(annotations map[string]string) {
		for range 2 {
			m.Observe(t.Context(), o.set(workload(annotations)))
			m.Sweep(t.Context())
		}
	}
	const (
		invalid = `default/payments-1 InvalidAnnotation: the pod keeps the ports it has: endpoint.aether.io/ports="8080,99999": `
		unknown = "default/payments-1 UnknownAnnotation: nothing reads the annotation endpoint.aether.io/prots: look for a slip in its name"
	)
	say(map[string]string{annotation.KeyPorts: "8080,99999"})
	if got := problems(m); len(got) != 1 || !strings.HasPrefix(got[0], invalid) {
		t.Errorf("invalid: %q", got)
	}
	say(map[string]string{annotation.KeyPorts: "8080,99999", "endpoint.aether.io/prots": "1"})
	got := problems(m)
	if len(got) != 2 || !strings.HasPrefix(got[0], invalid) || got[1] != unknown {
		t.Errorf("both: %q", got)
	}
	expect(t, "events", o.reports, got...)
	bad := multiPort()
	bad["endpoint.aether.io/prots"] = "1"
	say(bad)
	expect(t, "one mended", problems(m), unknown)
	expect(t, "outside", outsiders(m))
	say(multiPort())
	expect(t, "all mended", problems(m))
	expect(t, "events in the end", o.reports, got...)

	say(bad)
	ended := workload(bad)
	ended.Ready, ended.Ending = false, model.Finished
	m.Observe(t.Context(), o.set(ended))
	expect(t, "ended", problems(m))
}

// A text that is longer than an event holds is cut between two characters, and the status
// shows what the event does.
func TestProblemIsBounded(t *testing.T) {
	_, o, m := orchestrated(t)
	m.judge(workload(nil), sideWish, Problem{reasonInvalid, "x" + strings.Repeat("ä", maxMessage)})
	want := "default/payments-1 InvalidAnnotation: x" + strings.Repeat("ä", (maxMessage-1)/2)
	expect(t, "status", outsiders(m), want)
	expect(t, "event", o.reports, want)
}
