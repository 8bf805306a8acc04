package attach

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// sweepWorkloads compares what is attached with what the orchestrator has: a pod
// that it no longer knows serves nobody, and one that should be meshed and is not,
// because it started while the plugin was not there, is adopted (CNI-2, CNI-D9).
func (m *Manager) sweepWorkloads(ctx context.Context) {
	if m.cfg.Workloads == nil {
		return
	}
	// First what is attached: so no word on a pod is older than what is known of it.
	pods := m.Pods()
	workloads, ok := m.cfg.Workloads.Pods()
	if !ok {
		return
	}
	known := make(map[string]bool, len(workloads))
	for _, w := range workloads {
		known[w.ObjectUID] = true
	}
	m.forgetComplaints(known)
	attached := map[string]bool{}
	for _, p := range pods {
		i := slices.IndexFunc(workloads, func(w model.Workload) bool { return isOf(w, p) })
		switch {
		case i >= 0:
			attached[workloads[i].ObjectUID] = true
			m.review(p.Key)
		case p.UID != "" && !m.awaitsMirror(p):
			m.Observe(ctx, finished(p))
		}
	}
	m.adoptMissed(ctx, slices.DeleteFunc(workloads, func(w model.Workload) bool { return attached[w.ObjectUID] || !m.wantsMesh(w) }))
}

// awaitsMirror reports whether a pod that the list does not have may be a static one whose
// mirror is to be made anew. Who saw the mirror go waits for that by itself: so this is
// for a registrar that began meanwhile.
func (m *Manager) awaitsMirror(p model.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.pods[p.Key]
	if !ok || a.workload != nil || !p.Static() {
		return false
	}
	if a.unseen.IsZero() {
		a.unseen = m.cfg.Now()
	}
	return m.cfg.Now().Sub(a.unseen) < model.MirrorGrace
}

// seeMissed takes the word on a pod that is not attached: a label or an annotation that
// came late may ask for the mesh only now. Run looks soon, once for all that come so. A
// pod that could not be taken in is the sweeps' affair, whatever is said of it.
func (m *Manager) seeMissed(w model.Workload) {
	if m.cfg.Sandboxes == nil || !w.Running || !m.wantsMesh(w) {
		return
	}
	m.mu.Lock()
	again := m.missed[w.ObjectUID]
	m.mu.Unlock()
	if again {
		return
	}
	select {
	case m.late <- struct{}{}:
	default: // it looks already
	}
}

// wantsMesh reports whether a pod is to be in the mesh; the owner of one that wants to
// and cannot is told. One that does not run yet has a failed ADD, of which the kubelet
// tells.
func (m *Manager) wantsMesh(w model.Workload) bool {
	if w.Ending != model.Living || slices.Contains(m.cfg.Bypass, w.Namespace) {
		m.clear(w)
		return false
	}
	meshed, wrong := outside(w)
	if w.Running || len(wrong) > 0 {
		m.judge(w, sideWish, wrong...)
	}
	if !meshed {
		m.judge(w, sideAdoption)
	}
	return meshed
}

// outside looks at a pod that is not attached: whether it is to be, and what is wrong with
// what it asks for.
func outside(w model.Workload) (meshed bool, wrong []Problem) {
	cfg, err := annotation.Parse(w.Annotations)
	meshed, why := joins(cfg, &w)
	switch {
	case meshed && err != nil:
		if w.Running {
			wrong = append(wrong, Problem{reasonInvalid, "the pod is not in the mesh: " + err.Error()})
		}
		return false, wrong
	case meshed && len(cfg.Unknown) > 0: // as its ADD says
		wrong = append(wrong, Problem{reasonUnknown, unknownKeys(cfg.Unknown)})
	case meshed:
	case cfg.Meshed: // a pod of the node's network (CNI-74)
		wrong = append(wrong, Problem{reasonUnmeshed, why})
	case w.Running && w.WordProblem != "" && why == w.WordProblem: // a label, which no ADD refuses
		wrong = append(wrong, Problem{reasonInvalid, "the pod is not in the mesh: " + why})
	case w.Running && len(cfg.Unknown) > 0: // its ADD may never have come here
		wrong = append(wrong, Problem{reasonUnknown, unknownKeys(cfg.Unknown) + "; the pod is not in the mesh: " + why})
	case w.Running && len(w.Annotations) > 0 && cfg.Managed == annotation.Unset && w.Word == annotation.Unset:
		// They say what a pod of the mesh should be like, and none that it should be one.
		if !w.HostNetwork { // which has a remedy of its own
			why += "; add " + annotation.KeyPorts
		}
		wrong = append(wrong, Problem{reasonUnmeshed, fmt.Sprintf("the pod is not in the mesh, for which it has the annotation %s: %s",
			strings.Join(slices.Sorted(maps.Keys(w.Annotations)), " and "), why)})
	}
	return meshed, wrong
}

// unknownKeys says that nothing reads these annotations.
func unknownKeys(keys []string) string {
	return "nothing reads the annotation " + strings.Join(keys, " or ") + ": look for a slip in its name"
}

// adoptMissed takes running pods into the mesh that no ADD told of. A pod without
// a running sandbox is still to get its ADD.
func (m *Manager) adoptMissed(ctx context.Context, missed []model.Workload) {
	if len(missed) == 0 || m.cfg.Sandboxes == nil {
		m.noteMissed(missed, "the registrar asks no container runtime for it (--cri-socket is empty); make the pod anew")
		m.setMissed(nil)
		return
	}
	if why := m.Missing(); why != "" {
		// Each would wait for the same thing in vain, and it is no fault of theirs.
		m.log.Warn("pods that should be meshed are not, and cannot be taken in yet", "pods", len(missed), "missing", why)
		m.noteMissed(missed, why)
		m.setMissed(missed)
		return
	}
	sandboxes, err := m.listSandboxes(ctx)
	if err != nil {
		m.log.Warn("pods that should be meshed are not, and the runtime does not say where they run", "pods", len(missed), "error", err)
		m.noteMissed(missed, "the container runtime does not say where it runs: "+err.Error())
		m.setMissed(missed)
		return
	}
	var left []model.Workload
	for _, w := range missed {
		i := slices.IndexFunc(sandboxes, func(req *cniv1.AddRequest) bool { return req.GetCniArgs()[argUID] == w.UID })
		switch {
		case i < 0:
			m.note(w, sideAdoption)
		case !m.adopt(ctx, sandboxes[i]):
			left = append(left, w)
			m.judge(w, sideAdoption, cannotAdopt())
		}
	}
	m.setMissed(left)
}

// cannotAdopt is what is wrong with a pod that was tried in vain.
func cannotAdopt() Problem {
	return Problem{reasonUnmeshed, "the pod runs outside the mesh and could not be taken in yet; the registrar's log says why"}
}

// listTimeout bounds a look at the runtime: what else a sweep does must not wait for one
// that hangs.
const listTimeout = 10 * time.Second

func (m *Manager) listSandboxes(ctx context.Context) ([]*cniv1.AddRequest, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return m.cfg.Sandboxes.List(ctx)
}

// setMissed notes which pods run outside the mesh that should be in it.
func (m *Manager) setMissed(left []model.Workload) {
	missed := make(map[string]bool, len(left))
	for _, w := range left {
		missed[w.ObjectUID] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.missed = missed
}
