package attach

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// adoptAge keeps notes of an ADD that is under way out of adoption.
	adoptAge = 10 * time.Second
	// adoptTimeout bounds what a sweep does for one pod; the next one tries again.
	adoptTimeout = 5 * time.Second
	// departedFor is how long an attachment that was taken away is not adopted. Its
	// note, its pin and the runtime's netns outlive the answer to its DEL by moments, a
	// sweep's list by as long as the sweep takes, and a plugin that was killed by as
	// long as the runtime takes to call it again.
	departedFor = 10 * time.Minute
)

// candidate is a pod that may be running without an attachment.
type candidate struct {
	req *cniv1.AddRequest
	// note is the path of the plugin's note that tells of it, and since when that was
	// written; both are zero when the runtime told.
	note  string
	since time.Time
}

// noted is the candidate that a note tells of.
func (m *Manager) noted(dir string, e spool.Entry, req *cniv1.AddRequest) candidate {
	return candidate{req: req, note: filepath.Join(dir, e.Name), since: time.Unix(0, e.Note.GetUnixNanos())}
}

func (c candidate) key() model.AttachmentKey { return model.KeyOf(c.req.GetAttachment()) }

// pod is what its network namespace is found by.
func (c candidate) pod() model.Pod {
	return model.Pod{Key: c.key(), Netns: c.req.GetNetns(), RuntimeNetns: c.req.GetRuntimeNetns()}
}

// withdrawn reports whether the plugin has taken back what it told: its DEL does so.
func (c candidate) withdrawn() bool {
	return c.note != "" && !exists(c.note)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// adopt takes a running pod that the runtime told of into the mesh without an ADD.
func (m *Manager) adopt(ctx context.Context, req *cniv1.AddRequest) bool {
	return m.adoptAs(ctx, candidate{req: req})
}

// adoptAs takes a running pod into the mesh without an ADD. It reports whether the
// candidate needs no further attention: adopted, known already, not to be meshed, on
// its way out, or gone.
func (m *Manager) adoptAs(ctx context.Context, c candidate) bool {
	key := c.key()
	// Before anything is waited for: the list that named it may be old by now.
	if m.settled(c) {
		return true
	}
	d, err := m.decide(c.req, m.present)
	switch {
	case err == nil:
	case KindOf(err) == BadInput && d.Workload != nil:
		m.judge(*d.Workload, sideAdoption, Problem{reasonInvalid, "the pod is not in the mesh: " + err.Error()})
		return true
	case KindOf(err) != BadInput && m.cfg.Capture.Gone(c.pod()):
		return true
	default:
		m.log.Warn("running pod cannot be adopted", "attachment", key.String(), "error", err)
		return KindOf(err) == BadInput
	}
	if !d.Meshed || endingOf(d.Workload) != model.Living {
		return true
	}
	if why := m.Missing(); why != "" { // each would wait for it, and none is the first to
		m.log.Warn("running pod is not adopted yet", "attachment", key.String(), "pod", d.Pod.Name, "missing", why)
		return false
	}
	if !c.since.IsZero() {
		// It is as old as its note: a DEL, or a new owner of its address, that came
		// between the two is the later one.
		d.Pod.Since = c.since
	}
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	ctx, unlock, err := m.keys.lockYielding(ctx, key)
	if err != nil {
		m.log.Warn("running pod is not adopted yet", "attachment", key.String(), "pod", d.Pod.Name, "error", err)
		return false
	}
	defer unlock()
	// And again, now that no DEL of it can be at work.
	if m.settled(c) || m.cfg.Capture.Gone(d.Pod) {
		return true
	}
	m.warnUnknown(d, c.req)
	err = m.attach(ctx, d, func(Decision) error { return nil })
	m.count.adds.WithLabelValues(outcome(true, err)).Inc()
	if err == nil {
		_, err = m.cfg.Capture.Ensure(d.Pod, m.cfg.Mesh.TCPPorts())
	}
	if removed(ctx) {
		return true
	}
	if err != nil {
		m.log.Warn("running pod is not adopted yet", "attachment", key.String(), "pod", d.Pod.Name, "error", err)
		return false
	}
	m.count.recovered.Inc()
	m.log.Info("running pod adopted", "attachment", key.String(), "pod", d.Pod.Name, "service", d.Pod.Service.String())
	return true
}

// settled reports whether a candidate is none any more: it is attached, or was taken
// away since somebody told of it (XDS-47).
func (m *Manager) settled(c candidate) bool {
	key := c.key()
	m.mu.Lock()
	_, known := m.pods[key]
	at, left := m.departed[key]
	m.mu.Unlock()
	return known || left && !m.startedSince(c.req.GetAttachment(), at) || c.withdrawn() || m.delSpooled(c.req.GetAttachment())
}

// startedSince reports whether a note says that the pod started unmeshed after that time. A
// plugin that takes back an ADD which came to nothing does so by a DEL like any other, and
// leaves the note after it.
func (m *Manager) startedSince(key *cniv1.Attachment, at time.Time) bool {
	name, err := spool.Name(key, spool.Unmeshed)
	if err != nil {
		return false
	}
	note, err := spool.Read(m.cfg.SpoolDir, name)
	return err == nil && time.Unix(0, note.GetUnixNanos()).After(at)
}

// delSpooled reports whether a DEL waits in the spool: the next sweep carries it out.
func (m *Manager) delSpooled(key *cniv1.Attachment) bool {
	name, err := spool.Name(key, spool.Deleted)
	return err == nil && exists(filepath.Join(m.cfg.SpoolDir, name))
}

// depart notes that an attachment was taken away for good: only an ADD brings it back.
func (m *Manager) depart(key model.AttachmentKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.departed[key] = m.cfg.Now()
}

// forgetDeparted drops what departed long ago.
func (m *Manager) forgetDeparted() {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	for key, at := range m.departed {
		if now.Sub(at) >= departedFor {
			delete(m.departed, key)
		}
	}
}

// abandon removes note and pin of a pod that is not attached and whose network
// namespace the runtime removed: its ADD was killed before it asked, and no DEL
// came. The pin would hold the namespace for good.
func (m *Manager) abandon(ctx context.Context, c candidate) {
	key := c.key()
	unlock, err := m.keys.lock(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	if _, err := m.Check(key); err == nil || c.withdrawn() {
		return // sweepGhosts' affair, or the plugin's, which has seen to it
	}
	if !m.cfg.Capture.Gone(c.pod()) {
		return
	}
	if err := m.cfg.Capture.Unpin(key); err != nil {
		m.log.Warn("cannot remove the pin of a pod that is gone", "attachment", key.String(), "error", err)
		return
	}
	m.log.Info("removed what an unfinished ADD has left", "attachment", key.String())
}
