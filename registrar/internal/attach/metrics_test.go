package attach

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// Contract 1, XDS-76: every ADD is counted by its outcome, an unknown annotation
// key is counted, and nothing is labelled with a pod.
func TestMetrics(t *testing.T) {
	w, m := setup(t)
	m, counted := metered(t, m)
	typo := multiPort()
	typo["endpoint.aether.io/prots"] = "1"
	add := func(req *cniv1.AddRequest) { _ = m.Add(t.Context(), req, func(Decision) error { return nil }) }
	add(addRequest("c1", "a", "10.1.0.2", typo))
	add(addRequest("c2", "b", "10.1.0.3", map[string]string{"app": "x"}))
	add(addRequest("c3", "c", "10.1.0.4", map[string]string{"endpoint.aether.io/port": "0"}))
	w.signErr = errors.New("away")
	add(addRequest("c4", "d", "10.1.0.5", multiPort()))
	if _, err := m.Del(t.Context(), key("c1")); err != nil {
		t.Fatal(err)
	}
	got := counted()
	want := map[string]float64{
		"portolan_attach_adds_total outcome=meshed": 1, "portolan_attach_adds_total outcome=unmeshed": 1,
		"portolan_attach_adds_total outcome=refused": 1, "portolan_attach_adds_total outcome=not_ready": 1,
		"portolan_attach_unknown_annotations_total": 1, "portolan_attach_proof_seconds": 1,
		"portolan_attach_detached_total": 1,
		"portolan_attach_missed":         0, "portolan_attach_recovered_total": 0, "portolan_attach_attachments": 0,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("metrics (-want +got):\n%s", d)
	}
}
