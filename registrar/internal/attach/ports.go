package attach

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// provePorts bounds the proof of ports that a running pod got.
const provePorts = 5 * time.Second

// reconsider gives a running pod the ports that its annotations say now, and only
// those: what else they say counts when it is made anew. A mistake keeps the old ones
// and is reported once (contract 1).
func (m *Manager) reconsider(ctx context.Context, key model.AttachmentKey) {
	if m.review(key) {
		go m.changePorts(ctx, key)
	}
}

// review says what is wrong with what an attached pod asks for now. It reports whether it
// asks for other ports than it has.
func (m *Manager) review(key model.AttachmentKey) (change bool) {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving || a.workload == nil || a.ending() != model.Living {
		m.mu.Unlock()
		return false
	}
	w, pod, proven, superseded := *a.workload, a.pod, a.proven, m.superseded(a)
	cfg, err := annotation.Parse(w.Annotations)
	meshed, why := joins(cfg, &w)
	change = err == nil && meshed && a.differs(cfg)
	m.mu.Unlock()
	if superseded {
		return change
	}
	var wrong []Problem
	if err != nil {
		wrong = append(wrong, Problem{reasonInvalid, "the pod keeps the ports it has: " + err.Error()})
	}
	switch {
	case !meshed:
		wrong = append(wrong, staysIn(why))
	case err == nil:
		wrong = append(wrong, m.pending(pod, cfg, w)...)
	}
	if len(cfg.Unknown) > 0 {
		wrong = append(wrong, Problem{reasonUnknown, unknownKeys(cfg.Unknown)})
	}
	m.judge(w, sideWish, wrong...)
	if proven {
		m.judge(w, sideAdoption)
	}
	return change
}

// differs reports whether the pod's ports are others than its annotations say. The caller
// holds mu.
func (a *attachment) differs(cfg annotation.Config) bool {
	return a.pod.Default != cfg.Default || !slices.Equal(a.pod.Ports, cfg.Ports)
}

// changePorts makes the ports of a running pod those that its annotations say when its
// turn comes, and goes on until they say no others.
func (m *Manager) changePorts(ctx context.Context, key model.AttachmentKey) {
	ctx, unlock, err := m.keys.lockYielding(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	for m.followPorts(ctx, key) {
		continue
	}
}

// followPorts makes one change of ports and reports whether there was one: what goes
// leaves the load assignments first and its chain after the drain, what comes is
// published once its chain is acknowledged (contract 4.4). Until then the default port is
// what it was, even if it is one that goes: nobody declared another one yet.
func (m *Manager) followPorts(ctx context.Context, key model.AttachmentKey) bool {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving || a.workload == nil || ctx.Err() != nil {
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
	if len(now.Ports) == 0 {
		m.withdraw(ctx, now) // again, if its listen table or its readiness changed while it drained
	}
	if err := m.storeAgain(now); err != nil {
		m.log.Error("new ports of a pod are not stored; the next start reads them from its annotations", "attachment", key.String(), "error", err)
	}
	m.tell(now)
	if err := m.cfg.Readiness.Watch(now, func(s PortState) { m.observe(ctx, key, s) }); err != nil {
		m.log.Warn("cannot read the listen table of a pod", "attachment", key.String(), "error", err)
	}
	if _, evicted := m.Check(key); evicted != nil { // who does it from here on finds all of it
		m.hide(key)
		return false
	}
	m.log.Info("ports of a running pod changed", "attachment", key.String(), "pod", now.Name, "ports", fmt.Sprint(now.Ports))
	m.provePorts(ctx, now)
	return true
}

// storeAgain stores what changed of an attachment whose lock is held, and nothing of one that
// was removed meanwhile as its address was given on: who does that does not wait for the
// lock. What is told of it after this is the caller's to take back.
func (m *Manager) storeAgain(pod model.Pod) error {
	if err := m.store.put(pod); err != nil {
		return err
	}
	if _, evicted := m.Check(pod.Key); evicted == nil {
		return nil // who evicts it from here on removes the record
	}
	if err := m.store.remove(pod.Key); err != nil {
		m.log.Error("cannot remove the record of an evicted attachment; it is swept when its netns is gone", "attachment", pod.Key.String(), "error", err)
	}
	return nil
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
func (m *Manager) provePorts(work context.Context, pod model.Pod) {
	ctx, cancel := context.WithTimeout(work, provePorts)
	defer cancel()
	err := m.cfg.Mesh.AwaitListeners(ctx, pod.Key)
	if err == nil {
		err = m.cfg.Mesh.AwaitSecrets(ctx, pod.Key)
	}
	if removed(work) {
		return
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

// settlePorts proves what could not be proven when it came. It does not wait for ports that
// are just being changed.
func (m *Manager) settlePorts(ctx context.Context) {
	for _, pod := range m.provenPods() {
		m.mu.Lock()
		a, ok := m.pods[pod.Key]
		waits := ok && len(a.unproven) > 0
		m.mu.Unlock()
		if !waits || m.keys.busy(pod.Key) {
			continue
		}
		work, unlock, err := m.keys.lockYielding(ctx, pod.Key)
		if err != nil {
			return
		}
		m.provePorts(work, pod)
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
