package attach

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// knownWait is how long an ADD waits for its pod to be seen in the orchestrator's
// stream: a pod that asks for the mesh fails after it and comes again, any other
// starts and is adopted when its labels turn out to ask for it.
const knownWait = 2 * time.Second

// Reasons of reports to a pod's owner.
const (
	reasonInvalid  = "InvalidAnnotation"
	reasonPending  = "PendingAnnotation"
	reasonUnknown  = "UnknownAnnotation"
	reasonUnmeshed = "NotMeshed"
	reasonSilent   = "NotListening"
)

// lookup finds a pod in what the orchestrator has told.
type lookup func(namespace, name, uid string) (model.Workload, error)

// coming waits for a pod that is not known yet, as long as an ADD can.
func (m *Manager) coming(ctx context.Context) lookup {
	return func(namespace, name, uid string) (model.Workload, error) {
		ctx, cancel := context.WithTimeout(ctx, knownWait)
		defer cancel()
		return m.cfg.Workloads.Lookup(ctx, namespace, name, uid)
	}
}

// present is for sweeps, once the list of pods is complete: who is not there is gone, or
// is found by the next one.
func (m *Manager) present(namespace, name, uid string) (model.Workload, error) {
	if w, ok := m.cfg.Workloads.Known(namespace, name, uid); ok {
		return w, nil
	}
	return model.Workload{}, fmt.Errorf("pod %s/%s (UID %q) is not among the pods of this node", namespace, name, uid)
}

// listed reports whether all pods of the node are known; of a node without an
// orchestrator there is nothing to know.
func (m *Manager) listed() bool {
	if m.cfg.Workloads == nil {
		return true
	}
	_, ok := m.cfg.Workloads.Pods()
	return ok
}

// decide is Decide with what the orchestrator knows of the pod.
func (m *Manager) decide(req *cniv1.AddRequest, find lookup) (Decision, error) {
	facts := Facts{TrustDomain: m.cfg.TrustDomain, Now: m.cfg.Now(), ServiceRanges: m.cfg.ServiceRanges}
	own := annotation.Unset
	if req.GetAnnotationsKnown() {
		own = annotation.OptIn(req.GetAnnotations())
	}
	if m.cfg.Workloads == nil || own == annotation.Out {
		return Decide(req, facts)
	}
	args := req.GetCniArgs()
	w, err := find(args[argNamespace], args[argName], args[argUID])
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
// here yet. It was known when its ADD was decided: who is not now has gone.
func (m *Manager) refresh(pod model.Pod) {
	if m.cfg.Workloads == nil {
		return
	}
	w, ok := m.cfg.Workloads.Known(pod.Namespace, pod.Name, cmp.Or(pod.RuntimeUID, pod.UID))
	if !ok {
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
// say another thing for it. The caller holds mu.
func (a *attachment) hear(w model.Workload) bool {
	old := a.workload
	a.workload, a.pod.UID, a.pod.RuntimeUID = &w, w.ObjectUID, cmp.Or(w.UID, a.pod.RuntimeUID)
	return old == nil || old.Ready != w.Ready || old.Ending != w.Ending
}

// Observe takes what the orchestrator says of a pod now: its readiness, its end, its
// ports, and whether it asks for the mesh. Calls for one pod come one at a time; it does
// not wait for Envoy.
func (m *Manager) Observe(ctx context.Context, w model.Workload) {
	keys := m.attachmentsOf(w)
	if w.Ending == model.Finished {
		m.clear(w)
	}
	if len(keys) == 0 {
		m.seeMissed(w)
	}
	for _, key := range keys {
		m.mu.Lock()
		a, ok := m.pods[key]
		if !ok || a.leaving {
			m.mu.Unlock()
			continue
		}
		turned := w.Ready && (a.workload == nil || !a.workload.Ready)
		edited := a.workload != nil && !maps.Equal(a.workload.Annotations, w.Annotations)
		unnamed := a.pod.RuntimeUID == ""
		changed := a.hear(w)
		unnamed = unnamed && a.pod.Static()
		m.mu.Unlock()
		if unnamed {
			go m.storeName(ctx, key)
		}
		if turned {
			// What made it Ready has just begun to listen, or has long done so.
			m.cfg.Readiness.Kick(key)
		}
		if changed {
			m.publish(ctx, key)
		}
		if edited {
			m.wakeSilence() // it names what advertises a port
		}
		if w.Ending == model.Living {
			m.reconsider(ctx, key)
		}
	}
}

// storeName stores what the runtime calls a static pod, which an older version did not:
// by nothing else would the next start know the pod again once its mirror is made anew.
func (m *Manager) storeName(ctx context.Context, key model.AttachmentKey) {
	ctx, unlock, err := m.keys.lockYielding(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	pod, gone := m.Check(key)
	if gone != nil || ctx.Err() != nil {
		return
	}
	if err := m.storeAgain(pod); err != nil {
		m.log.Error("what the runtime calls a static pod is not stored; the next start hears it again", "attachment", key.String(), "error", err)
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
