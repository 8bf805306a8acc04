package dns

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// session is the writing half of one stream.
type session struct {
	// cancel ends the stream with a reason.
	cancel context.CancelCauseFunc
	// order tells which registrar started later. The stream's reader writes it
	// before it makes the session an owner; nobody does after that.
	order uint64
	// ended sessions own nothing any more; guarded by server.mu.
	ended bool
	// wake has room for one: there is something to send.
	wake chan struct{}

	mu sync.Mutex
	// acked is the last revision that holds, sent the one that was reported.
	acked, sent uint64
	// dirty are the pods to report.
	dirty map[model.AttachmentKey]struct{}
}

func newSession(cancel context.CancelCauseFunc) *session {
	return &session{cancel: cancel, wake: make(chan struct{}, 1), dirty: map[model.AttachmentKey]struct{}{}}
}

// ack reports that a revision holds, and the pods that it set.
func (s *session) ack(revision uint64, change *table.Change) {
	s.mu.Lock()
	s.acked = revision
	for k := range change.SetPods {
		s.dirty[k] = struct{}{}
	}
	s.mu.Unlock()
	s.signal()
}

func (s *session) podChanged(k model.AttachmentKey) {
	s.mu.Lock()
	s.dirty[k] = struct{}{}
	s.mu.Unlock()
	s.signal()
}

func (s *session) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// responses returns what there is to send now. Pods that are gone meanwhile are
// left out. Only the last response carries a revision that was not sent before.
func (s *session) responses(statusOf func(model.AttachmentKey) (pods.Status, bool)) []*dnsv1.SyncResponse {
	s.mu.Lock()
	acked, sent := s.acked, s.sent
	keys := make([]model.AttachmentKey, 0, len(s.dirty))
	for k := range s.dirty {
		keys = append(keys, k)
	}
	clear(s.dirty)
	s.sent = acked
	s.mu.Unlock()
	slices.SortFunc(keys, func(a, b model.AttachmentKey) int { return strings.Compare(a.String(), b.String()) })

	var list []*dnsv1.PodStatus
	for _, k := range keys {
		if st, ok := statusOf(k); ok {
			list = append(list, statusMessage(k, st))
		}
	}
	if len(list) == 0 && acked == sent {
		return nil
	}
	var out []*dnsv1.SyncResponse
	for chunk := range slices.Chunk(list, dnsv1.MaxChunkPods) {
		out = append(out, &dnsv1.SyncResponse{Revision: sent, Pods: chunk})
	}
	if len(out) == 0 {
		out = append(out, &dnsv1.SyncResponse{})
	}
	out[len(out)-1].Revision = acked
	return out
}

func statusMessage(k model.AttachmentKey, st pods.Status) *dnsv1.PodStatus {
	m := &dnsv1.PodStatus{
		Attachment: table.KeyMessage(k), State: dnsv1.PodState_POD_STATE_FAILED,
		Error: cutText(st.Err), Captured: st.Captured, CaptureError: cutText(st.CaptureErr),
	}
	switch st.State {
	case pods.Serving:
		m.State = dnsv1.PodState_POD_STATE_SERVING
	case pods.Disabled:
		m.State = dnsv1.PodState_POD_STATE_DISABLED
	case pods.Failed:
	}
	return m
}

// cutText holds a text to the limit of dns.proto, without half a character.
func cutText(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= dnsv1.MaxError {
		return text
	}
	text = text[:dnsv1.MaxError]
	for !utf8.ValidString(text) {
		text = text[:len(text)-1]
	}
	return text
}

// assembly puts the chunks of a stream's revisions together.
type assembly struct {
	// session is what the first message said.
	session uint64
	// revision of the last chunk.
	revision uint64
	// open is the revision of which chunks are missing; nil between revisions.
	open *table.Change
	full bool
}

// add takes the next message and returns the change when it is complete.
func (a *assembly) add(req *dnsv1.SyncRequest) (*table.Change, error) {
	if err := req.Validate(); err != nil {
		return nil, err
	}
	if a.revision == 0 {
		if req.GetSession() == 0 || !req.GetFull() {
			return nil, errors.New("session: the first message of a stream carries its session and begins a full state")
		}
		a.session = req.GetSession()
	}
	if a.open == nil {
		if req.GetRevision() <= a.revision {
			return nil, fmt.Errorf("revision: %d follows %d", req.GetRevision(), a.revision)
		}
		if req.GetFull() && req.GetSettings() == nil {
			return nil, errors.New("settings: missing from the first chunk of a full state")
		}
		a.open, a.full = &table.Change{}, req.GetFull()
	} else if req.GetRevision() != a.revision || req.GetFull() != a.full {
		return nil, fmt.Errorf("revision: %d follows a chunk of %d, which is not complete", req.GetRevision(), a.revision)
	}
	a.revision = req.GetRevision()
	if err := a.open.Merge(req); err != nil {
		return nil, err
	}
	if req.GetMore() {
		return nil, nil
	}
	change := a.open
	a.open = nil
	return change, nil
}
