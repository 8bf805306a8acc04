package attach

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// knownWait is how long an ADD waits for its pod to be seen in the orchestrator's
	// stream: a pod that asks for the mesh fails after it and comes again, any other
	// starts and is adopted when its labels turn out to ask for it.
	knownWait = 2 * time.Second
	// provePorts bounds the proof of ports that a running pod got.
	provePorts = 5 * time.Second
)

// Reasons of reports to a pod's owner.
const (
	reasonInvalid  = "InvalidAnnotation"
	reasonUnknown  = "UnknownAnnotation"
	reasonUnmeshed = "NotMeshed"
)

// decide is Decide with what the orchestrator knows of the pod.
func (m *Manager) decide(ctx context.Context, req *cniv1.AddRequest) (Decision, error) {
	facts := Facts{TrustDomain: m.cfg.TrustDomain, Now: m.cfg.Now()}
	own := annotation.Unset
	if req.GetAnnotationsKnown() {
		own = annotation.OptIn(req.GetAnnotations())
	}
	if m.cfg.Workloads == nil || own == annotation.Out {
		return Decide(req, facts)
	}
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	args := req.GetCniArgs()
	w, err := m.cfg.Workloads.Lookup(ctx, args[argNamespace], args[argName], args[argUID])
	switch {
	case err == nil:
		facts.Workload = &w
		return Decide(req, facts)
	case own == annotation.Joined:
		return Decision{}, &Error{Kind: NotReady, Err: fmt.Errorf("the pod's account is not known: %w", err)}
	}
	return Decision{Reason: fmt.Sprintf("it does not ask for the mesh by annotation, and its labels are not known (%v); it is adopted if they ask for it", err)}, nil
}

// refresh takes what the orchestrator said of a pod while its ADD was not known
// here yet.
func (m *Manager) refresh(ctx context.Context, pod model.Pod) {
	if m.cfg.Workloads == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	w, err := m.cfg.Workloads.Lookup(ctx, pod.Namespace, pod.Name, cmp.Or(pod.RuntimeUID, pod.UID))
	if err != nil {
		w = finished(pod)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.pods[pod.Key]; ok {
		a.hear(w)
	}
}

// finished is the word on a pod that the orchestrator does not have any more.
func finished(p model.Pod) model.Workload {
	return model.Workload{Namespace: p.Namespace, Name: p.Name, UID: p.RuntimeUID, ObjectUID: p.UID, Ending: model.Finished}
}

// isOf reports whether w is the pod. Its API object is not always the one that it began
// with: that of a static pod is only its mirror, and is made anew when somebody deletes
// it. A UID that the runtime is told proves nothing of itself, as objects name any.
func isOf(w model.Workload, p model.Pod) bool {
	if p.UID != "" && p.UID == w.ObjectUID {
		return true
	}
	return p.RuntimeUID != "" && p.RuntimeUID == w.UID && p.Namespace == w.Namespace && p.Name == w.Name
}

// hear takes the orchestrator's word on the pod, and reports whether its record has to
// say another thing for it. The pod belongs to the API object that it has now: what
// belongs to a former one is removed with it. The caller holds mu.
func (a *attachment) hear(w model.Workload) bool {
	old := a.workload
	moved := a.pod.UID != w.ObjectUID
	a.workload, a.pod.UID, a.pod.RuntimeUID = &w, w.ObjectUID, cmp.Or(w.UID, a.pod.RuntimeUID)
	return moved || old == nil || old.Ready != w.Ready || old.Ending != w.Ending
}

// Observe takes what the orchestrator says of a pod now: its readiness, its end and
// its ports. Calls for one pod come one at a time; it does not wait for Envoy.
func (m *Manager) Observe(ctx context.Context, w model.Workload) {
	for _, key := range m.attachmentsOf(w) {
		m.mu.Lock()
		a, ok := m.pods[key]
		if !ok || a.leaving {
			m.mu.Unlock()
			continue
		}
		turned := w.Ready && (a.workload == nil || !a.workload.Ready)
		changed := a.hear(w)
		m.mu.Unlock()
		if turned {
			// What made it Ready has just begun to listen, or has long done so.
			m.cfg.Readiness.Kick(key)
		}
		if changed {
			m.publish(ctx, key)
		}
		if w.Ending == model.Living {
			m.reconsider(ctx, key, w)
		}
	}
}

// attachmentsOf returns the keys of a pod's attachments, in order.
func (m *Manager) attachmentsOf(w model.Workload) []model.AttachmentKey {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []model.AttachmentKey
	for key, a := range m.pods {
		if isOf(w, a.pod) {
			out = append(out, key)
		}
	}
	slices.SortFunc(out, model.AttachmentKey.Compare)
	return out
}

// reconsider gives a running pod the ports that its annotations say now, and only
// those: what else they say counts at its next start. A mistake keeps the old ones
// and is reported once (contract 1).
func (m *Manager) reconsider(ctx context.Context, key model.AttachmentKey, w model.Workload) {
	cfg, err := annotation.Parse(w.Annotations)
	if err != nil {
		m.complain(w, reasonInvalid, "the pod keeps the ports it has: "+err.Error())
		return
	}
	m.mu.Lock()
	a, ok := m.pods[key]
	differs := ok && !a.leaving && a.differs(cfg)
	m.mu.Unlock()
	if !differs {
		return
	}
	if meshed, why := joins(cfg, &w); !meshed {
		m.complain(w, reasonInvalid, "the pod keeps the ports it has, as a running pod does not leave the mesh: "+why+"; make it anew")
		return
	}
	go m.changePorts(ctx, key)
}

// differs reports whether the pod's ports are others than its annotations say. The caller
// holds mu.
func (a *attachment) differs(cfg annotation.Config) bool {
	return a.pod.Default != cfg.Default || !slices.Equal(a.pod.Ports, cfg.Ports)
}

// changePorts makes the ports of a running pod those that its annotations say when its
// turn comes, and goes on until they say no others.
func (m *Manager) changePorts(ctx context.Context, key model.AttachmentKey) {
	unlock, err := m.keys.lock(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.setInterrupt(key, cancel)
	defer m.setInterrupt(key, nil)
	for m.followPorts(ctx, key) {
		continue
	}
}

func (m *Manager) setInterrupt(key model.AttachmentKey, cancel context.CancelFunc) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.pods[key]; ok {
		a.interrupt = cancel
	}
}

// interruptPorts ends a change of a pod's ports that is under way, for its DEL.
func (m *Manager) interruptPorts(key model.AttachmentKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.pods[key]
	if !ok {
		return
	}
	a.deleting = true
	if a.interrupt != nil {
		a.interrupt()
	}
}

// followPorts makes one change of ports and reports whether there was one: what goes
// leaves the load assignments first and its chain after the drain, what comes is
// published once its chain is acknowledged (contract 4.4). Until then the default port is
// what it was, even if it is one that goes: nobody declared another one yet.
func (m *Manager) followPorts(ctx context.Context, key model.AttachmentKey) bool {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving || a.deleting || a.workload == nil {
		m.mu.Unlock()
		return false
	}
	cfg, err := annotation.Parse(a.workload.Annotations)
	pod, change := a.pod, false
	if err == nil {
		meshed, _ := joins(cfg, a.workload)
		change = meshed && a.differs(cfg)
	}
	m.mu.Unlock()
	if !change {
		return false
	}
	if going := missingPorts(cfg.Ports, pod.Ports); len(going) > 0 {
		m.setPorts(key, pod.Ports, pod.Default, going)
		if len(cfg.Ports) > 0 {
			m.publish(ctx, key)
		} else {
			m.withdraw(ctx, pod)
		}
		t := time.NewTimer(m.cfg.DrainWait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return false
		}
	}
	now, ok := m.setPorts(key, cfg.Ports, cfg.Default, missingPorts(pod.Ports, cfg.Ports))
	if !ok {
		return false
	}
	if err := m.store.put(now); err != nil {
		m.log.Error("new ports of a pod are not stored; the next start reads them from its annotations", "attachment", key.String(), "error", err)
	}
	m.tell(now)
	if err := m.cfg.Readiness.Watch(now, func(s PortState) { m.observe(ctx, key, s) }); err != nil {
		m.log.Warn("cannot read the listen table of a pod", "attachment", key.String(), "error", err)
	}
	m.log.Info("ports of a running pod changed", "attachment", key.String(), "pod", now.Name, "ports", fmt.Sprint(now.Ports))
	m.provePorts(ctx, now)
	return true
}

// setPorts changes the ports in memory, of which some are not to be called; ok is false
// when the pod is leaving.
func (m *Manager) setPorts(key model.AttachmentKey, ports []port.Port, def uint16, unproven []uint16) (model.Pod, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.pods[key]
	if !ok || a.leaving {
		return model.Pod{}, false
	}
	a.pod.Ports, a.pod.Default, a.unproven = ports, def, unproven
	return a.pod, true
}

// provePorts publishes the pod's new ports once Envoy has their chains.
func (m *Manager) provePorts(ctx context.Context, pod model.Pod) {
	ctx, cancel := context.WithTimeout(ctx, provePorts)
	defer cancel()
	err := m.cfg.Mesh.AwaitListeners(ctx, pod.Key)
	if err == nil {
		err = m.cfg.Mesh.AwaitSecrets(ctx, pod.Key)
	}
	if err != nil {
		m.log.Warn("new ports of a pod are not proven yet; the next sweep tries again", "attachment", pod.Key.String(), "pod", pod.Name, "error", err)
		return
	}
	m.mu.Lock()
	if a, ok := m.pods[pod.Key]; ok {
		a.unproven = nil
	}
	m.mu.Unlock()
	m.publish(ctx, pod.Key)
}

// settlePorts proves what could not be proven when it came.
func (m *Manager) settlePorts(ctx context.Context) {
	for _, pod := range m.provenPods() {
		m.mu.Lock()
		a, ok := m.pods[pod.Key]
		waits := ok && len(a.unproven) > 0
		m.mu.Unlock()
		if !waits {
			continue
		}
		unlock, err := m.keys.lock(ctx, pod.Key)
		if err != nil {
			return
		}
		m.provePorts(ctx, pod)
		unlock()
	}
}

// missingPorts returns the numbers of those ports that have does not serve. One that
// changes between protocols of one class is served all the while.
func missingPorts(have, ports []port.Port) []uint16 {
	var out []uint16
	for _, p := range ports {
		if !slices.ContainsFunc(have, func(o port.Port) bool { return o.Number == p.Number && o.Protocol.Class() == p.Protocol.Class() }) {
			out = append(out, p.Number)
		}
	}
	return out
}

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
	known := make(map[string]model.Workload, len(workloads))
	for _, w := range workloads {
		known[w.ObjectUID] = w
	}
	m.forgetComplaints(known)
	attached := map[string]bool{}
	for _, p := range pods {
		i := slices.IndexFunc(workloads, func(w model.Workload) bool { return isOf(w, p) })
		switch {
		case i >= 0:
			attached[workloads[i].ObjectUID] = true
			if workloads[i].ObjectUID != p.UID {
				m.Observe(ctx, workloads[i])
			}
		case p.UID != "":
			m.Observe(ctx, finished(p))
		}
	}
	m.adoptMissed(ctx, slices.DeleteFunc(workloads, func(w model.Workload) bool { return attached[w.ObjectUID] || !m.wantsMesh(w) }))
}

// wantsMesh reports whether a pod is to be in the mesh; the owner of one that wants to
// and cannot is told. One that does not run yet has a failed ADD, of which the kubelet
// tells.
func (m *Manager) wantsMesh(w model.Workload) bool {
	if w.Ending != model.Living || slices.Contains(m.cfg.Bypass, w.Namespace) {
		return false
	}
	cfg, err := annotation.Parse(w.Annotations)
	meshed, why := joins(cfg, &w)
	switch {
	case meshed && err != nil:
		if w.Running {
			m.complain(w, reasonInvalid, "the pod is not in the mesh: "+err.Error())
		}
		return false
	case !meshed && cfg.Meshed: // a pod of the node's network (CNI-74)
		m.complain(w, reasonUnmeshed, why)
	case !meshed && w.Running && w.WordProblem != "" && why == w.WordProblem: // a label, which no ADD refuses
		m.complain(w, reasonInvalid, "the pod is not in the mesh: "+why)
	case !meshed && w.Running && len(cfg.Unknown) > 0: // its ADD may never have come here
		m.complain(w, reasonUnknown, unknownKeys(cfg.Unknown)+"; the pod is not in the mesh: "+why)
	}
	return meshed
}

// unknownKeys says that nothing reads these annotations.
func unknownKeys(keys []string) string {
	return "nothing reads the annotation " + strings.Join(keys, " or ") + ": look for a slip in its name"
}

// adoptMissed takes running pods into the mesh that no ADD told of. A pod without
// a running sandbox is still to get its ADD.
func (m *Manager) adoptMissed(ctx context.Context, missed []model.Workload) {
	if len(missed) == 0 || m.cfg.Sandboxes == nil {
		m.setMissed(0)
		return
	}
	if why := m.Missing(); why != "" {
		// Each would wait for the same thing in vain, and it is no fault of theirs.
		m.log.Warn("pods that should be meshed are not, and cannot be taken in yet", "pods", len(missed), "missing", why)
		m.setMissed(len(missed))
		return
	}
	sandboxes, err := m.cfg.Sandboxes.List(ctx)
	if err != nil {
		m.log.Warn("pods that should be meshed are not, and the runtime does not say where they run", "pods", len(missed), "error", err)
		m.setMissed(len(missed))
		return
	}
	left := 0
	for _, w := range missed {
		i := slices.IndexFunc(sandboxes, func(req *cniv1.AddRequest) bool { return req.GetCniArgs()[argUID] == w.UID })
		if i >= 0 && !m.adopt(ctx, sandboxes[i]) {
			left++
			m.complain(w, reasonUnmeshed, "the pod runs outside the mesh and could not be taken in yet; the registrar's log says why")
		}
	}
	m.setMissed(left)
}
