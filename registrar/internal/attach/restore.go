package attach

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// runMarker lies beside the pin folder, where a reboot wipes it: without it every
// stored pin is void, and that many ghosts at once are no surprise.
const runMarker = "registrar.started"

// Restore replays the DELs that were spooled while nobody listened, finds pods
// whose record was lost by what the plugin left beside their pins, and tells
// everybody what is attached. Call it once, after the other parts run and before
// Envoy is answered and the CNI socket opens (CNI-29, XDS-43).
func (m *Manager) Restore(ctx context.Context) error {
	wiped, err := m.markRun()
	if err != nil {
		return err
	}
	m.replayDeleted(ctx)
	m.takeOver()
	m.recover(ctx)
	pods := m.Pods()
	var void []model.AttachmentKey
	for _, p := range pods {
		switch {
		case !m.cfg.Capture.Gone(p):
			if err := m.restorePod(ctx, p); err != nil {
				return err
			}
		case wiped:
			void = append(void, p.Key)
		default:
			m.log.Warn("network namespace of a stored attachment is not there", "attachment", p.Key.String(), "netns", p.Netns)
		}
	}
	m.dropStored(ctx, void, "the node was restarted")
	m.log.Info("attachments restored", "stored", len(pods), "running", len(m.provenPods()), "rebooted", wiped)
	return nil
}

// takeOver gives pods that were attached under another trust domain an identity of this
// mesh's: they run, and nobody signs for the former one any more.
func (m *Manager) takeOver() {
	var former []model.Pod
	m.mu.Lock()
	for _, a := range m.pods {
		if a.pod.Identity.TrustDomain != m.cfg.TrustDomain {
			a.pod.Identity.TrustDomain = m.cfg.TrustDomain
			former = append(former, a.pod)
		}
	}
	m.mu.Unlock()
	if len(former) == 0 {
		return
	}
	m.log.Warn("stored attachments are of another trust domain and get identities of this one", "attachments", len(former), "trust_domain", m.cfg.TrustDomain)
	if err := m.store.put(former...); err != nil {
		m.log.Error("new identities of attachments are not stored; the next start gives them again", "attachments", len(former), "error", err)
	}
}

// recover takes the pods that have a note and a pin but no record: the state file
// was lost, or their ADD was in a crash (MESH-41). They were proven, or their ADD
// failed and its DEL follows. Not those of an ADD that is under way, which comes once the
// socket is open: if there are records, that of a young note was not lost.
func (m *Manager) recover(ctx context.Context) {
	kept := len(m.Pods()) > 0
	// As long as for one ADD, for all of them: who is there when the list is complete is
	// found without waiting, and who is not is gone.
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	for _, e := range m.scan(m.cfg.NetnsDir) {
		if e.Kind != spool.Attached {
			continue
		}
		req := e.Note.GetAttached()
		key, noted := model.KeyOf(req.GetAttachment()), time.Unix(0, e.Note.GetUnixNanos())
		if _, err := m.Check(key); err == nil || kept && m.cfg.Now().Sub(noted) <= adoptAge {
			continue
		}
		d, err := m.decide(req, m.coming(ctx))
		if err != nil {
			m.log.Error("attachment has no record and cannot be recovered from the plugin's note yet", "attachment", key.String(), "error", err)
			continue
		}
		if !d.Meshed || m.cfg.Capture.Gone(d.Pod) {
			continue
		}
		d.Pod.Since = noted
		if err := m.store.put(d.Pod); err != nil {
			m.log.Error("cannot store a recovered attachment; the next start recovers it again", "attachment", key.String(), "error", err)
		}
		m.mu.Lock()
		m.pods[key] = stored(d.Pod)
		m.mu.Unlock()
		m.refresh(d.Pod) // the orchestrator may have spoken of it already
		m.count.recovered.Inc()
		m.log.Warn("attachment had no record and is recovered from the plugin's note", "attachment", key.String(), "pod", d.Pod.Name, "service", d.Pod.Service.String())
	}
}

// marker is the path of the marker of a run.
func (m *Manager) marker() string { return filepath.Join(filepath.Dir(m.cfg.NetnsDir), runMarker) }

// markRun reports whether the run folder was wiped since the last start.
func (m *Manager) markRun() (wiped bool, err error) {
	path := m.marker()
	_, err = os.Stat(path)
	wiped = errors.Is(err, fs.ErrNotExist)
	if !wiped {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return wiped, fmt.Errorf("make the run folder: %w", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return wiped, fmt.Errorf("mark the run folder: %w", err)
	}
	return wiped, nil
}

// firstState bounds how long a start waits for a pod's listen table.
const firstState = 2 * time.Second

// restorePod tells everybody of a stored pod. Its ports stay published as they
// were until the listen table speaks (contract 4.8), and for that it waits: a pod
// that nobody published yet must be in the registry before Envoy is answered.
// The caller holds the key's lock, or is sure that nobody works on the key.
func (m *Manager) restorePod(ctx context.Context, p model.Pod) error {
	m.mu.Lock()
	a, ok := m.pods[p.Key]
	m.mu.Unlock()
	if !ok {
		return nil
	}
	if err := m.cfg.Identities.Ensure(ctx, p.Identity); err != nil {
		return fmt.Errorf("no certificate for %s of attachment %s: %w", p.Identity.SPIFFE(), p.Key, err)
	}
	m.tell(p)
	if !m.markTold(a, true) {
		m.untell(p)
		return nil
	}
	seen := make(chan struct{})
	var once sync.Once
	err := m.cfg.Readiness.Watch(p, func(s PortState) {
		m.observe(ctx, p.Key, s)
		once.Do(func() { close(seen) })
	})
	if err != nil {
		// The netns went between the check and here: a ghost for the sweep.
		m.log.Warn("cannot read the listen table of a stored attachment", "attachment", p.Key.String(), "error", err)
		return nil
	}
	t := time.NewTimer(firstState)
	defer t.Stop()
	select {
	case <-seen:
	case <-t.C:
	case <-ctx.Done():
	}
	return nil
}

// dropStored forgets attachments that nobody was told of in this process, with one
// write for all of them.
func (m *Manager) dropStored(ctx context.Context, keys []model.AttachmentKey, why string) {
	var stored []model.AttachmentKey
	for _, key := range keys {
		if err := m.cfg.Registry.Withdraw(ctx, key.String(), m.nextGeneration(0)); err != nil {
			m.log.Error("cannot withdraw endpoint", "uid", key.String(), "error", err)
		}
		if err := m.cfg.Capture.Unpin(key); err != nil {
			m.log.Warn("cannot remove the pin of an attachment", "attachment", key.String(), "error", err)
		}
		m.mu.Lock()
		if _, ok := m.pods[key]; ok {
			stored = append(stored, key)
			delete(m.pods, key)
		}
		m.mu.Unlock()
	}
	if len(stored) == 0 {
		return
	}
	if err := m.store.remove(stored...); err != nil {
		m.log.Error("cannot remove the records of attachments", "attachments", len(stored), "error", err)
	}
	m.count.detached.Add(float64(len(stored)))
	m.log.Info("stored attachments dropped", "attachments", fmt.Sprint(stored), "why", why)
}

// replayDeleted carries out the DELs of the spool.
func (m *Manager) replayDeleted(ctx context.Context) {
	var dropped []model.AttachmentKey
	notes := slices.DeleteFunc(m.scan(m.cfg.SpoolDir), func(e spool.Entry) bool { return e.Kind != spool.Deleted })
	for _, e := range notes {
		key, at := model.KeyOf(e.Note.GetDeleted().GetAttachment()), time.Unix(0, e.Note.GetUnixNanos())
		m.mu.Lock()
		a, known := m.pods[key]
		told := known && a.told
		// The same sandbox was added again after that DEL: the note is void.
		void := known && a.pod.Since.After(at)
		m.mu.Unlock()
		if !void && !m.startedSince(e.Note.GetDeleted().GetAttachment(), at) {
			m.depart(key)
		}
		switch {
		case void:
		case told:
			m.sweep(ctx, model.Pod{Key: key}, "spooled DEL")
		default:
			dropped = append(dropped, key)
		}
	}
	m.dropStored(ctx, dropped, "spooled DEL")
	for _, e := range notes {
		m.removeNote(m.cfg.SpoolDir, e.Name)
	}
}

// Replay takes what the plugin left on disk since the last pass: spooled DELs,
// pods that run unmeshed although they should not, and pins whose ADD was lost.
func (m *Manager) Replay(ctx context.Context) {
	m.forgetDeparted()
	m.replayDeleted(ctx)
	for _, p := range m.Pods() {
		if m.isLate(p.Key) {
			m.restoreLate(ctx, p.Key)
		}
	}
	known := m.listed() // else nobody can say who should be meshed
	for _, e := range m.scan(m.cfg.SpoolDir) {
		if e.Kind == spool.Unmeshed && known {
			req := e.Note.GetUnmeshed()
			// Its pin was not kept: the runtime's own path serves.
			req.Netns = req.GetRuntimeNetns()
			if m.adoptAs(ctx, m.noted(m.cfg.SpoolDir, e, req)) {
				m.removeNote(m.cfg.SpoolDir, e.Name)
			}
		}
	}
	for _, e := range m.scan(m.cfg.NetnsDir) {
		age := m.cfg.Now().Sub(time.Unix(0, e.Note.GetUnixNanos()))
		if e.Kind == spool.Attached && age > adoptAge {
			c := m.noted(m.cfg.NetnsDir, e, e.Note.GetAttached())
			if known {
				m.adoptAs(ctx, c)
			}
			m.abandon(ctx, c)
		}
	}
}

// isLate reports whether an attachment is stored and nobody was told of it.
func (m *Manager) isLate(key model.AttachmentKey) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.pods[key]
	return ok && a.proven && !a.told && !a.leaving
}

// restoreLate is restorePod for what could not be told at the start: its netns was not
// there, or it had no certificate. An ADD or a DEL of it may be at work.
func (m *Manager) restoreLate(ctx context.Context, key model.AttachmentKey) {
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	ctx, unlock, err := m.keys.lockYielding(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	p, gone := m.Check(key)
	if gone != nil || !m.isLate(key) || m.cfg.Capture.Gone(p) {
		return
	}
	if err := m.restorePod(ctx, p); err != nil && !removed(ctx) {
		m.log.Warn("stored attachment is still not served", "attachment", key.String(), "error", err)
	}
}

func (m *Manager) scan(dir string) []spool.Entry {
	entries, err := spool.Scan(dir)
	if err != nil {
		m.log.Error("notes of the plugin cannot be read", "folder", dir, "error", err)
	}
	return entries
}

func (m *Manager) removeNote(dir, name string) {
	if err := spool.Remove(dir, name); err != nil {
		m.log.Error("cannot remove a note that was carried out", "folder", dir, "note", name, "error", err)
	}
}
