package attach

import (
	"context"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Del detaches a pod: out of every load assignment first, its capture and its listeners
// after (contract 4.4, 4.6). It reports whether the capture was taken away. An unknown
// attachment is success (CNI-27), without that.
func (m *Manager) Del(ctx context.Context, key model.AttachmentKey) (uncaptured bool, err error) {
	unlock, err := m.keys.lockToRemove(ctx, key)
	if err != nil {
		return false, err
	}
	defer unlock()
	// Also of an unknown one: its note and pin are there until the plugin has our answer.
	m.depart(key)
	return m.forget(ctx, key, "DEL", drained)
}

// leave says whether callers of a pod get time to let go of it.
type leave uint8

const (
	// drained waits, within bounds, until this node's Envoy no longer uses the pod.
	drained leave = iota
	// atOnce is for what is already dead.
	atOnce
)

// forget tears one attachment down and removes its record; of a pod that drains it
// removes the capture as well. The caller holds the key's lock, or is sure that nobody
// works on the key.
func (m *Manager) forget(ctx context.Context, key model.AttachmentKey, why string, how leave) (uncaptured bool, err error) {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving {
		m.mu.Unlock()
		return false, nil
	}
	a.leaving = true
	pod := a.pod
	m.mu.Unlock()

	m.withdraw(ctx, pod)
	if how == drained && len(pod.Ports) > 0 {
		m.drain(ctx, pod)
	}
	// Beside the rest, as it may wait for a disk: who dies before the rest is done leaves it
	// to the plugin, as of a pod that he never knew.
	erased := make(chan error, 1)
	go func() { erased <- m.store.remove(key) }()
	if how == drained {
		// Before the mesh DNS lets go of the namespace, or the two would wait for each
		// other's grace period of the kernel.
		if err := m.cfg.Capture.Remove(pod); err != nil {
			m.log.Warn("the capture of a pod is left to the plugin", "attachment", key.String(), "error", err)
		} else {
			uncaptured = true
		}
	}
	m.teardown(ctx, pod, why)
	err = <-erased
	m.drop(key)
	return uncaptured, err
}

// withdraw takes the pod's record out of the registry, whatever becomes of the
// request that asked for it.
func (m *Manager) withdraw(ctx context.Context, pod model.Pod) {
	m.mu.Lock()
	var gen uint64
	if a, ok := m.pods[pod.Key]; ok {
		gen, a.generation = a.generation, 0
	}
	m.mu.Unlock()
	if gen == 0 && len(pod.Ports) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishTimeout)
	defer cancel()
	if err := m.cfg.Registry.Withdraw(ctx, pod.Key.String(), m.nextGeneration(gen)); err != nil {
		m.log.Error("cannot withdraw endpoint", "uid", pod.Key.String(), "error", err)
	}
}

// idlePoll is how often it is looked whether anybody is still connected to a pod.
const idlePoll = 5 * time.Millisecond

// drain waits, within bounds, until this node's Envoy no longer uses the endpoint, and
// then until what is in flight has finished (contract 4.6): an Envoy that let go of a pod
// closes each connection to it after the last response.
func (m *Manager) drain(ctx context.Context, pod model.Pod) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DrainWait)
	defer cancel()
	if err := m.cfg.Mesh.AwaitWithdrawn(ctx, pod.Service, pod.Key.String()); err != nil {
		m.log.Debug("endpoint withdrawn without Envoy's word", "attachment", pod.Key.String(), "error", err)
		return
	}
	ticker := time.NewTicker(idlePoll)
	defer ticker.Stop()
	for {
		connected, err := m.cfg.Capture.Connected(pod)
		if err != nil {
			m.log.Debug("a pod is taken to be idle", "attachment", pod.Key.String(), "error", err)
		}
		if !connected {
			return
		}
		select {
		case <-ctx.Done():
			m.log.Debug("a pod is detached with connections", "attachment", pod.Key.String())
			return
		case <-ticker.C:
		}
	}
}

// teardown takes the pod from everybody that was told, and from the registry if it
// is still there. Of a stored pod that nobody was told of no identity is released:
// its use was never counted, and another pod may have the same one.
func (m *Manager) teardown(ctx context.Context, pod model.Pod, why string) {
	m.mu.Lock()
	published, told := false, false
	if a, ok := m.pods[pod.Key]; ok {
		a.leaving = true
		published, told = a.generation > 0, a.told
		a.told = false // an ADD that is evicted at work is torn down by two, and counted once
	}
	m.mu.Unlock()
	if told {
		m.cfg.Readiness.Forget(pod.Key)
	}
	if published {
		m.withdraw(ctx, pod)
	}
	if told {
		m.untell(pod)
		// The pod's network goes next, and with it every word to its callers. One that
		// was not told of the end would go on sending into connections that are dead.
		if err := m.cfg.Capture.Disconnect(pod); err != nil {
			m.log.Debug("callers learn by themselves that the pod is gone", "attachment", pod.Key.String(), "error", err)
		}
	}
	m.count.detached.Inc()
	m.log.Info("detached", "attachment", pod.Key.String(), "pod", pod.Name, "service", pod.Service.String(), "why", why)
}
