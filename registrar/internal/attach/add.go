package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Add attaches a pod (contract 8, first walk). decided is called once with the
// decision, before the proof is awaited, so that the caller can program the
// capture meanwhile. Add returns nil once the listeners are proven, or at once
// for a pod that stays out. After an error nothing of the attachment is left.
// ctx bounds the whole call.
func (m *Manager) Add(ctx context.Context, req *cniv1.AddRequest, decided func(Decision) error) error {
	d, err := m.decide(req, m.coming(ctx))
	if err == nil {
		err = m.add(ctx, req, d, decided)
	}
	m.count.adds.WithLabelValues(outcome(d.Meshed, err)).Inc()
	return err
}

func (m *Manager) add(ctx context.Context, req *cniv1.AddRequest, d Decision, decided func(Decision) error) error {
	m.warnUnknown(d, req)
	if !d.Meshed {
		return decided(d)
	}
	unlock, err := m.keys.lock(ctx, d.Pod.Key)
	if err != nil {
		return err
	}
	defer unlock()
	return m.attach(ctx, d, decided)
}

// warnUnknown tells of annotations that nothing reads, in log, metric and to the pod's
// owner (contract 1).
func (m *Manager) warnUnknown(d Decision, req *cniv1.AddRequest) {
	m.count.unknown.Add(float64(len(d.Unknown)))
	for _, k := range d.Unknown {
		m.log.Warn("unknown annotation ignored", "key", k, "attachment", model.KeyOf(req.GetAttachment()).String(), "pod", req.GetCniArgs()[argName])
	}
	if len(d.Unknown) > 0 && d.Workload != nil {
		m.judge(*d.Workload, sideWish, Problem{reasonUnknown, unknownKeys(d.Unknown)})
	}
}

// attach makes the attachment that was decided. The caller holds the key's lock.
func (m *Manager) attach(ctx context.Context, d Decision, decided func(Decision) error) error {
	if m.cfg.Unsupported != nil {
		return m.cfg.Unsupported
	}
	if err := m.awaitReady(ctx); err != nil {
		return err
	}
	if err := m.evictAddresses(ctx, d.Pod); err != nil {
		return err
	}
	if err := m.begin(ctx, &d); err != nil {
		return err
	}
	captured := m.cfg.Mesh.TCPPorts()
	if err := decided(d); err != nil {
		m.undo(ctx, d.Pod)
		return err
	}
	begin := m.cfg.Now()
	if err := m.prove(ctx, d.Pod); err != nil {
		m.undo(ctx, d.Pod)
		return err
	}
	m.count.proof.Observe(m.cfg.Now().Sub(begin).Seconds())
	if err := m.finish(ctx, d.Pod, captured); err != nil {
		m.undo(ctx, d.Pod)
		return err
	}
	return nil
}

func (m *Manager) awaitReady(ctx context.Context) error {
	if err := m.cfg.Mesh.AwaitReady(ctx); err != nil {
		return &Error{Kind: NotReady, Err: err}
	}
	if s := m.cfg.Names.Missing(); s != "" {
		return &Error{Kind: NotReady, Err: errors.New(s)}
	}
	return nil
}

// begin stores the pod and tells everybody. A second ADD of the same attachment
// keeps its first Since, so that it changes nothing that is already there (C11).
func (m *Manager) begin(ctx context.Context, d *Decision) error {
	pod := d.Pod
	m.mu.Lock()
	old, again := m.pods[pod.Key]
	if again && old.leaving {
		m.mu.Unlock()
		return evicted(pod)
	}
	now := &attachment{}
	if again {
		pod.Since = old.pod.Since
		d.Pod = pod
		// What the first ADD published is this one's to withdraw.
		now.generation = old.generation
	}
	counted := again && old.told
	now.pod = pod
	m.pods[pod.Key] = now
	delete(m.departed, pod.Key)
	m.mu.Unlock()
	m.refresh(pod)

	if again {
		m.cfg.Readiness.Forget(pod.Key)
	}
	err := m.cfg.Identities.Ensure(ctx, pod.Identity)
	told := pod
	switch {
	case err == nil:
		m.tell(pod)
		if counted {
			m.cfg.Identities.Release(old.pod.Identity)
		}
	case counted:
		told = old.pod
	}
	// Who evicts the attachment meanwhile does not wait for its lock, and found nothing
	// told: then this takes back what it told.
	if !m.markTold(now, err == nil || counted) {
		if err == nil || counted {
			m.untell(told)
		}
		return evicted(pod)
	}
	switch {
	case err == nil:
	case again:
		m.undo(ctx, old.pod)
	default:
		m.drop(pod.Key)
	}
	if err != nil {
		return &Error{Kind: NotReady, Err: fmt.Errorf("no certificate for %s: %w", pod.Identity.SPIFFE(), err)}
	}
	if again && len(pod.Ports) == 0 {
		m.withdraw(ctx, old.pod) // it served and is a client now
	}
	// Known to everybody as UNHEALTHY from here on, so that its service has a
	// name, an address and a route when the first port turns HEALTHY.
	m.publish(ctx, pod.Key)
	return nil
}

// tell hands a pod whose identity is ensured to the mesh and to DNS.
func (m *Manager) tell(pod model.Pod) {
	m.cfg.Mesh.AddPod(pod)
	m.cfg.Names.SetPod(pod)
}

// untell is the reverse of tell, of the identity and of what reads the listen table.
func (m *Manager) untell(pod model.Pod) {
	m.hide(pod.Key)
	m.cfg.Identities.Release(pod.Identity)
}

// hide is untell of a pod whose identity is released already.
func (m *Manager) hide(key model.AttachmentKey) {
	m.cfg.Readiness.Forget(key)
	m.cfg.Names.RemovePod(key)
	m.cfg.Mesh.RemovePod(key)
}

// markTold notes whether everybody was told of a. It reports false, and notes
// nothing, if a was removed meanwhile.
func (m *Manager) markTold(a *attachment, told bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.leaving || m.pods[a.pod.Key] != a {
		return false
	}
	a.told = told
	return true
}

// evicted is the error of an ADD whose attachment was removed while it was at work.
func evicted(pod model.Pod) error {
	return &Error{Kind: NotReady, Err: fmt.Errorf("attachment %s was removed meanwhile, as a DEL of it was spooled or its address was given to a later one: delete this one", pod.Key)}
}

// prove waits for everything that contract 4.2 asks of a pod before it may
// start, while the record is made durable.
func (m *Manager) prove(ctx context.Context, pod model.Pod) error {
	stored := make(chan error, 1)
	go func() { stored <- m.store.put(pod) }()
	err := m.proveListeners(ctx, pod)
	if err == nil {
		if e := m.cfg.Names.AwaitPod(ctx, pod.Key); e != nil {
			err = &Error{Kind: NotReady, Err: fmt.Errorf("mesh DNS of the pod: %w", e)}
		}
	}
	// The write is awaited in any case: undo must come after it.
	if e := <-stored; e != nil && err == nil {
		err = &Error{Kind: NotReady, Err: e}
	}
	return err
}

func (m *Manager) proveListeners(ctx context.Context, pod model.Pod) error {
	if err := m.cfg.Mesh.AwaitListeners(ctx, pod.Key); err != nil {
		return &Error{Kind: NotReady, Err: fmt.Errorf("envoy has not accepted the pod's listeners: %w", err)}
	}
	listening := make(chan struct{})
	var closed bool // only fn touches it; Watch never calls fn twice at once
	var last PortState
	err := m.cfg.Readiness.Watch(pod, func(s PortState) {
		m.observe(ctx, pod.Key, s)
		last = s
		if !closed && s.listeners(pod) {
			closed = true
			close(listening)
		}
	})
	if err != nil {
		return &Error{Kind: NotReady, Err: fmt.Errorf("read the listen table of %s: %w", pod.Netns, err)}
	}
	select {
	case <-listening:
	case <-ctx.Done():
		m.cfg.Readiness.Forget(pod.Key) // after it fn is not running, so last may be read
		return &Error{Kind: NotReady, Err: fmt.Errorf("the pod's listeners are acknowledged but not listening yet (%s): %w", last.missing(pod), ctx.Err())}
	}
	if err := m.cfg.Mesh.AwaitSecrets(ctx, pod.Key); err != nil {
		return &Error{Kind: NotReady, Err: fmt.Errorf("envoy has not accepted the pod's certificates: %w", err)}
	}
	return nil
}

// listeners reports whether every mesh listener that the pod must have listens.
func (s PortState) listeners(pod model.Pod) bool { return s.missing(pod) == "" }

// missing names the mesh ports that do not listen yet.
func (s PortState) missing(pod model.Pod) string {
	var out []string
	if len(pod.Ports) > 0 && !s.Inbound {
		out = append(out, "15008")
	}
	if !s.OutboundHTTP {
		out = append(out, "15001")
	}
	if !s.OutboundTCP {
		out = append(out, "15002")
	}
	return strings.Join(out, ", ")
}

// finish marks the pod proven and publishes what it serves by now. captured are the raw
// TCP ports that its capture was made with. It fails if the attachment was removed
// meanwhile.
func (m *Manager) finish(ctx context.Context, pod model.Pod, captured []netip.AddrPort) error {
	m.mu.Lock()
	a, ok := m.pods[pod.Key]
	ok = ok && !a.leaving
	if ok {
		a.proven = true
	}
	m.mu.Unlock()
	if !ok {
		m.cfg.Readiness.Forget(pod.Key) // the watch may be younger than the removal
		return evicted(pod)
	}
	m.publish(ctx, pod.Key)
	m.review(pod.Key) // what was wrong outside the mesh is so no more
	// From now on every change reaches the pod; one since the decision did not.
	if !slices.Equal(captured, m.cfg.Mesh.TCPPorts()) {
		m.syncTCPPorts(pod)
	}
	m.log.Info("attached", "attachment", pod.Key.String(), "pod", pod.Name, "service", pod.Service.String())
	return nil
}

// undo takes back a failed ADD: the runtime's DEL has no prevResult then, and
// may never come (CNI-D4).
func (m *Manager) undo(ctx context.Context, pod model.Pod) {
	m.teardown(ctx, pod, "failed ADD")
	if err := m.store.remove(pod.Key); err != nil {
		m.log.Error("cannot remove the record of a failed ADD; it is swept when its netns is gone", "attachment", pod.Key.String(), "error", err)
	}
	m.drop(pod.Key)
}

func (m *Manager) drop(key model.AttachmentKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.pods, key)
	m.wakeSilence()
}

// evictAddresses withdraws every older attachment that holds an address of pod:
// the address has a new owner, whatever became of the old one's DEL (CNI-37). An ADD
// that waited while its address was given on fails: it is the older one.
func (m *Manager) evictAddresses(ctx context.Context, pod model.Pod) error {
	m.mu.Lock()
	var old []model.Pod
	for k, a := range m.pods {
		if k == pod.Key || a.leaving {
			continue
		}
		if slices.ContainsFunc(a.pod.Addresses, func(x netip.Addr) bool { return slices.Contains(pod.Addresses, x) }) {
			old = append(old, a.pod)
		}
	}
	m.mu.Unlock()
	for _, p := range old {
		if p.Since.After(pod.Since) {
			return &Error{Kind: NotReady, Err: fmt.Errorf("the address was given to the later attachment %s meanwhile: delete this one", p.Key)}
		}
	}
	for _, p := range old {
		m.log.Warn("address has a new owner, the older attachment is withdrawn", "attachment", p.Key.String(), "pod", p.Name, "new", pod.Key.String())
		m.depart(p.Key)
		if _, err := m.forget(ctx, p.Key, "address re-used", atOnce); err != nil {
			m.log.Error("cannot remove the record of an older attachment", "attachment", p.Key.String(), "error", err)
		}
	}
	return nil
}
