package attach

import (
	"context"
	"errors"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Del detaches a pod: out of every load assignment first, its listeners after
// (contract 4.4, 4.6). An unknown attachment is success (CNI-27).
func (m *Manager) Del(ctx context.Context, key model.AttachmentKey) error {
	unlock, err := m.keys.lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	return m.forget(ctx, key, "DEL")
}

// forget tears one attachment down and removes its record. The caller holds the
// key's lock, or is sure that nobody works on the key.
func (m *Manager) forget(ctx context.Context, key model.AttachmentKey, why string) error {
	m.mu.Lock()
	a, ok := m.pods[key]
	if !ok || a.leaving {
		m.mu.Unlock()
		return nil
	}
	a.leaving = true
	pod := a.pod
	m.mu.Unlock()

	m.withdraw(ctx, pod)
	m.teardown(pod, why)
	err := m.store.remove(key)
	m.drop(key)
	return err
}

// withdraw takes the endpoint out and waits, within bounds, until this node's
// Envoy no longer uses it, so that requests in flight can finish.
func (m *Manager) withdraw(ctx context.Context, pod model.Pod) {
	if len(pod.Ports) == 0 {
		return
	}
	m.mu.Lock()
	var gen uint64
	if a, ok := m.pods[pod.Key]; ok {
		gen = a.generation
	}
	m.mu.Unlock()
	uid := pod.Key.String()
	if err := m.cfg.Registry.Withdraw(ctx, uid, m.nextGeneration(gen)); err != nil {
		m.log.Error("cannot withdraw endpoint", "uid", uid, "error", err)
		return
	}
	wait, cancel := context.WithTimeout(ctx, m.cfg.DrainWait)
	defer cancel()
	if err := m.cfg.Mesh.AwaitWithdrawn(wait, pod.Service, uid); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		m.log.Debug("endpoint withdrawn without Envoy's word", "uid", uid, "error", err)
	}
}

// teardown takes the pod from everybody that tell told.
func (m *Manager) teardown(pod model.Pod, why string) {
	m.mu.Lock()
	a, ok := m.pods[pod.Key]
	published := false
	var gen uint64
	if ok {
		published = !a.leaving && a.generation > 0
		gen = a.generation
		a.leaving = true
	}
	m.mu.Unlock()
	m.cfg.Readiness.Forget(pod.Key)
	if published {
		ctx, cancel := context.WithTimeout(context.Background(), publishTimeout)
		defer cancel()
		if err := m.cfg.Registry.Withdraw(ctx, pod.Key.String(), m.nextGeneration(gen)); err != nil {
			m.log.Error("cannot withdraw endpoint", "uid", pod.Key.String(), "error", err)
		}
	}
	m.cfg.Names.RemovePod(pod.Key)
	m.cfg.Mesh.RemovePod(pod.Key)
	m.cfg.Identities.Release(pod.Identity)
	m.log.Info("detached", "attachment", pod.Key.String(), "pod", pod.Name, "service", pod.Service.String(), "why", why)
}
