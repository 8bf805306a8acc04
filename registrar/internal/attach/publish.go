package attach

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// publishTimeout bounds one write to the registry; a backend that is away keeps
// the last record and takes the next change (MESH-34).
const publishTimeout = 5 * time.Second

// observe takes a new listen-table state of a pod and publishes the change.
// Readiness calls it, one call at a time for one pod.
func (m *Manager) observe(ctx context.Context, key model.AttachmentKey, s PortState) {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving {
		m.mu.Unlock()
		return
	}
	reported := slices.Equal(a.state.Misbound, s.Misbound)
	if a.ending() == model.Terminating && !a.unread {
		// What it served drains until its DEL (contract 4.6), also when the application
		// closes first: that would be one more write, and one more change for every node.
		all := slices.Concat(a.state.Listening, s.Listening)
		slices.Sort(all)
		s.Listening = slices.Compact(all)
	}
	a.state, a.unread = s, false
	pod := a.pod
	m.mu.Unlock()
	if !reported && len(s.Misbound) > 0 {
		m.log.Warn("port listens only where the mesh cannot reach it: bind 127.0.0.1, 0.0.0.0 or ::", "pod", pod.Name, "attachment", key.String(), "ports", fmt.Sprint(s.Misbound))
	}
	m.publish(ctx, key)
}

// publish writes the pod's record as it is now, whatever becomes of the request
// that led to it. A pure client has none.
func (m *Manager) publish(ctx context.Context, key model.AttachmentKey) {
	m.wakeSilence() // every change of what is told of a pod comes by here
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving || len(a.pod.Ports) == 0 || a.silent(m.cfg.Workloads != nil) {
		m.mu.Unlock()
		return
	}
	if a.ending() == model.Finished {
		pod, published := a.pod, a.generation > 0
		m.mu.Unlock()
		if published {
			m.withdraw(ctx, pod)
		}
		return
	}
	a.generation = m.nextGeneration(a.generation)
	ep := m.endpoint(a)
	m.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishTimeout)
	defer cancel()
	if err := m.cfg.Registry.Publish(ctx, ep); err != nil && !m.overtaken(key, ep.Generation) {
		m.log.Error("cannot publish endpoint", "uid", ep.UID, "generation", ep.Generation, "error", err)
	}
}

// overtaken reports whether a newer record of the pod was made meanwhile: that of this
// generation may come after it, and counts for nothing then.
func (m *Manager) overtaken(key model.AttachmentKey, generation uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.pods[key]
	return ok && a.generation > generation
}

// SetLocality says where this node is, if that was learned or changed after the start.
// What is published follows.
func (m *Manager) SetLocality(ctx context.Context, l model.Locality) {
	m.mu.Lock()
	if l == m.locality {
		m.mu.Unlock()
		return
	}
	m.locality = l
	var published []model.AttachmentKey
	for key, a := range m.pods {
		if a.generation > 0 {
			published = append(published, key)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(published, model.AttachmentKey.Compare)
	for _, key := range published {
		m.publish(ctx, key)
	}
}

// nextGeneration grows over restarts without being stored: it follows the clock,
// and never goes back within a process, whatever becomes of the clock and of records.
func (m *Manager) nextGeneration(last uint64) uint64 {
	for {
		newest := m.newest.Load()
		next := max(last+1, newest+1, uint64(m.cfg.Now().UnixNano()))
		if m.newest.CompareAndSwap(newest, next) {
			return next
		}
	}
}

// silent reports that a stored pod's record stands as it is, because the orchestrator
// has not spoken of the pod or its listen table has not been read yet in this process
// (contract 4.8). A pod that has ended needs no listen table.
func (a *attachment) silent(orchestrated bool) bool {
	return orchestrated && a.workload == nil || a.unread && a.ending() != model.Finished
}

func (a *attachment) ending() model.Ending { return endingOf(a.workload) }

// endingOf is how far a pod is on its way out, as far as the orchestrator has said.
func endingOf(w *model.Workload) model.Ending {
	if w == nil {
		return model.Living
	}
	return w.Ending
}

// health returns what a port that can be served is: a pod is Ready standalone, and
// DRAINING from its deletion time on, whatever its probes say (XDS-10).
func (a *attachment) health() model.Health {
	switch {
	case a.ending() == model.Terminating:
		return model.Draining
	case a.workload != nil && !a.workload.Ready:
		return model.Unhealthy
	}
	return model.Healthy
}

// lastingUID is what a pod's record calls it: the UID of its API object, which owns the
// record. The object of a static pod is but a mirror, which can be gone for minutes while
// the pod goes on; its record has what the runtime calls it, without the hyphens that
// would make that look like an object's.
func lastingUID(p model.Pod) string {
	if p.Static() {
		return strings.ReplaceAll(p.RuntimeUID, "-", "")
	}
	return p.UID
}

// endpoint builds the record of an attachment. A port is HEALTHY only when the
// pod is Ready, the listeners are proven, 15008 listens and the app listens
// (contract 4.3, 4.4). The caller holds mu.
func (m *Manager) endpoint(a *attachment) model.Endpoint {
	p := a.pod
	ep := model.Endpoint{
		UID:         p.Key.String(),
		Since:       p.Since,
		Generation:  a.generation,
		Service:     p.Service,
		Identity:    p.Identity,
		Addresses:   slices.Clone(p.Addresses),
		Default:     p.Default,
		Weight:      p.Weight,
		Locality:    m.locality,
		Metadata:    p.Metadata,
		PodName:     p.Name,
		PodUID:      lastingUID(p),
		Node:        m.cfg.Node,
		ContainerID: p.Key.ContainerID,
	}
	for _, pt := range p.Ports {
		st := model.PortStatus{Port: pt}
		if a.proven && a.state.Inbound && slices.Contains(a.state.Listening, pt.Number) && !slices.Contains(a.unproven, pt.Number) {
			st.Health = a.health()
		}
		ep.Ports = append(ep.Ports, st)
	}
	return ep
}
