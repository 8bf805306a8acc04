package attach

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// ghostPasses is how many sweeps must find a netns gone before its attachment
	// is forgotten: a runtime between unmount and DEL is no ghost.
	ghostPasses = 3
	// breakerShare and breakerFloor: when more than this share of the attachments,
	// and more than the floor, would go at once, nothing goes: then our own view is
	// what is broken (MESH-41, CNI-26).
	breakerShare = 0.3
	breakerFloor = 2
)

// breaker reports whether losing n of total at once is too much to believe.
func breaker(n, total int) bool {
	return n > breakerFloor && float64(n) > breakerShare*float64(total)
}

// firstLook is how often a start looks whether it can take in the pods that run
// outside the mesh.
const firstLook = 200 * time.Millisecond

// lateLook is how long those that ask for the mesh while they run wait for others, so
// that a label of a namespace is one look for all its pods. The runtime is asked about
// every sandbox then, and no more often than this.
const lateLook = 500 * time.Millisecond

// Run sweeps until ctx ends: ghosts, the spool, captures that somebody flushed, and
// pods that started without the plugin. For these it does not wait an interval: a
// fresh install and a node's boot have them at once, and so has a label that comes late.
func (m *Manager) Run(ctx context.Context) error {
	t := time.NewTicker(m.cfg.SweepInterval)
	defer t.Stop()
	first := time.NewTicker(firstLook)
	defer first.Stop()
	var late <-chan time.Time // nil while nobody waits
	// Beside the rest: a sweep can wait for Envoy.
	var wg sync.WaitGroup
	wg.Go(func() { m.watchSilence(ctx) })
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-first.C:
			if m.canAdopt() {
				first.Stop()
				m.sweepWorkloads(ctx)
			}
		case <-m.late:
			if late == nil {
				late = time.NewTimer(lateLook).C
			}
		case <-late:
			late = nil
			if m.canAdopt() {
				m.sweepWorkloads(ctx)
			}
		case <-t.C:
			m.Sweep(ctx)
		}
	}
}

// canAdopt reports whether it is known which pods should be meshed, and nothing
// that an ADD needs is missing.
func (m *Manager) canAdopt() bool {
	return m.cfg.Workloads == nil || m.listed() && m.Missing() == ""
}

// Sweep is one pass of Run.
func (m *Manager) Sweep(ctx context.Context) {
	m.Replay(ctx)
	m.sweepGhosts(ctx)
	m.settlePorts(ctx)
	m.sweepWorkloads(ctx)
	m.repair()
}

// sweepGhosts forgets attachments whose netns is gone without a DEL (CNI-26). Those of
// which the orchestrator says as well that they ended are no matter of belief: on a
// drained node they are many, and they serve nobody any more.
func (m *Manager) sweepGhosts(ctx context.Context) {
	pods := m.Pods()
	var ended, doubtful []model.Pod
	for _, p := range pods {
		gone := m.cfg.Capture.Gone(p)
		m.mu.Lock()
		if a, ok := m.pods[p.Key]; ok {
			if gone {
				a.misses++
			} else {
				a.misses = 0
			}
			switch {
			case a.misses < ghostPasses:
			case a.ending() == model.Finished:
				ended = append(ended, p)
			default:
				doubtful = append(doubtful, p)
			}
		}
		m.mu.Unlock()
	}
	for _, p := range ended {
		m.sweep(ctx, p, "it ended and its network namespace is gone")
	}
	if breaker(len(doubtful), len(pods)-len(ended)) {
		m.log.Error("too many attachments look gone at once, none is swept: is the pin folder visible to the registrar?",
			"gone", len(doubtful), "attached", len(pods)-len(ended), "folder", m.cfg.NetnsDir)
		return
	}
	for _, p := range doubtful {
		m.sweep(ctx, p, "its network namespace is gone")
	}
}

func (m *Manager) sweep(ctx context.Context, p model.Pod, why string) {
	unlock, err := m.keys.lockToRemove(ctx, p.Key)
	if err != nil {
		return
	}
	defer unlock()
	if _, err := m.forget(ctx, p.Key, why, atOnce); err != nil {
		m.log.Error("cannot remove the record of a swept attachment", "attachment", p.Key.String(), "error", err)
	}
	if err := m.cfg.Capture.Unpin(p.Key); err != nil {
		m.log.Warn("cannot remove the pin of a swept attachment", "attachment", p.Key.String(), "error", err)
	}
}

// GC forgets the attachments of network that the runtime no longer has (C19) and
// returns them in key order. Two witnesses speak: the runtime's list, when it is
// not empty, and the pod's netns. What both call gone goes; what only one calls
// gone goes unless that would be too much at once; with an empty list the netns
// alone decides (CNI-30).
func (m *Manager) GC(ctx context.Context, network string, valid []model.AttachmentKey) ([]model.AttachmentKey, error) {
	keep := make(map[model.AttachmentKey]bool, len(valid))
	for _, k := range valid {
		keep[k] = true
	}
	var total, single int
	var stale []model.Pod
	for _, p := range m.Pods() {
		if p.Network != network {
			continue
		}
		total++
		unlisted, gone := len(valid) > 0 && !keep[p.Key], m.cfg.Capture.Gone(p)
		switch {
		case keep[p.Key], !unlisted && !gone:
			continue
		case unlisted != gone:
			single++
		}
		stale = append(stale, p)
	}
	if breaker(single, total) {
		return nil, &Error{Kind: Internal, Err: fmt.Errorf("GC of network %q would remove %d of %d attachments on one witness, refused: call DEL for those that are gone", network, len(stale), total)}
	}
	removed := make([]model.AttachmentKey, 0, len(stale))
	for _, p := range stale {
		m.sweep(ctx, p, "GC")
		removed = append(removed, p.Key)
	}
	slices.SortFunc(removed, model.AttachmentKey.Compare)
	return removed, nil
}

// repair programs captures that somebody flushed (CNI-57).
func (m *Manager) repair() {
	ports := m.cfg.Mesh.TCPPorts()
	for _, p := range m.provenPods() {
		repaired, err := m.cfg.Capture.Ensure(p, ports)
		switch {
		case err != nil:
			m.log.Warn("cannot verify the capture of a pod", "attachment", p.Key.String(), "pod", p.Name, "error", err)
		case repaired:
			m.log.Warn("capture was incomplete and is programmed again", "attachment", p.Key.String(), "pod", p.Name)
		}
	}
}

// SyncTCPPorts makes the TCP port sets of every running pod exactly ports. The
// publisher calls it before the mesh DNS answers a new name.
func (m *Manager) SyncTCPPorts() {
	for _, p := range m.provenPods() {
		m.syncTCPPorts(p)
	}
}

// The plugin programs a pod's capture while the proof is awaited, and may come
// after it: then the set is offered again, syncTries times.
const (
	syncRetry = 50 * time.Millisecond
	syncTries = 40
)

func (m *Manager) syncTCPPorts(p model.Pod) { m.trySyncTCPPorts(p, syncTries) }

func (m *Manager) trySyncTCPPorts(p model.Pod, tries int) {
	err := m.cfg.Capture.SetTCPPorts(p, m.cfg.Mesh.TCPPorts())
	if err == nil {
		return
	}
	if _, gone := m.Check(p.Key); gone != nil {
		return
	}
	if tries > 0 {
		time.AfterFunc(syncRetry, func() { m.trySyncTCPPorts(p, tries-1) })
		return
	}
	m.log.Warn("cannot set the TCP ports of a pod's capture; the next sweep tries again", "attachment", p.Key.String(), "pod", p.Name, "error", err)
}

// provenPods returns the pods that run with a proven mesh, in key order.
func (m *Manager) provenPods() []model.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []model.Pod
	for _, a := range m.pods {
		if a.proven && a.told && !a.leaving {
			out = append(out, a.pod)
		}
	}
	slices.SortFunc(out, func(a, b model.Pod) int { return a.Key.Compare(b.Key) })
	return out
}
