package cache

import (
	"slices"
	"strings"

	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
)

const (
	// maxReason bounds the part of a rejection's text that is kept and logged.
	maxReason = 1024
	// maxLoggedNames bounds the names in one log record.
	maxLoggedNames = 8
)

// suspects is a part of a rejected response that is sent again by itself, to
// find out what of it was good and to have that acknowledged (XDS-R10): Envoy
// does not report what it kept of a response that it rejected, and would come
// back without it after a reconnect (MESH-20).
type suspects struct {
	views []*view
	since uint64
}

// verdictLocked takes in the acknowledgement or rejection of the response with
// the nonce. An unknown nonce says nothing (XDS-R7).
func (s *subscription) verdictLocked(nonce string, detail *rpcstatus.Status) {
	f := s.flight
	if f == nil || f.nonce != nonce {
		return
	}
	s.flight = nil
	s.st.answered = true
	for i := range f.views {
		f.views[i].v.flying = false
	}
	if detail == nil {
		s.acknowledgeLocked(f)
	} else {
		s.rejectLocked(f, detail.GetMessage())
	}
}

func (s *subscription) acknowledgeLocked(f *flight) {
	c := s.st.cache
	c.counters[s.kind].Acknowledged++
	delete(s.rejections, "")
	for i := range f.views {
		v := f.views[i].v
		if v.gone {
			continue
		}
		v.acked = f.views[i].version
		v.ackedSeq = f.seq
		v.rejected = versionUnknown
		v.early = false
		delete(s.rejections, v.e.key.Name)
		c.waits.recheck(v.e.key)
		if v.acked == versionGone && !v.named && !v.dirty {
			s.forgetLocked(v)
		}
	}
}

func (s *subscription) rejectLocked(f *flight, reason string) {
	c := s.st.cache
	c.counters[s.kind].Rejected++
	guilty, rest := s.blame(f, reason)
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "") + "…"
	}
	names := make([]string, 0, len(guilty))
	for _, v := range guilty {
		names = append(names, v.e.key.Name)
		s.condemnLocked(v, f, reason)
	}
	if len(guilty) == 0 {
		s.rememberLocked("", versionUnknown, reason)
		half := (len(rest) + 1) / 2
		s.suspectLocked(rest[:half], f)
		s.suspectLocked(rest[half:], f)
	} else {
		s.suspectLocked(rest, f)
	}
	kind, id, node := s.kind.String(), s.st.id, s.st.node.GetId()
	c.logs.add(func() {
		c.log.Warn("envoy rejected configuration", "type", kind, "stream", id, "node", node,
			"resources", names[:min(len(names), maxLoggedNames)], "reason", reason, "suspects", len(rest))
	})
}

// blame divides the views of a rejected response: a single one is guilty, so are
// those that the reason names.
func (s *subscription) blame(f *flight, reason string) (guilty, rest []*view) {
	alive := make([]*view, 0, len(f.views))
	names := make([]string, 0, len(f.views))
	for i := range f.views {
		if v := f.views[i].v; !v.gone {
			v.sent = versionUnsure
			alive = append(alive, v)
			names = append(names, v.e.key.Name)
		}
	}
	if len(f.views) == 1 {
		return alive, nil
	}
	named := namesIn(reason, names)
	for i, v := range alive {
		if named[i] {
			guilty = append(guilty, v)
		} else {
			rest = append(rest, v)
		}
	}
	return guilty, rest
}

// condemnLocked remembers that the client rejected what f carried of v.
func (s *subscription) condemnLocked(v *view, f *flight, reason string) {
	at, _ := slices.BinarySearchFunc(f.views, v.e.key.Name,
		func(sent sentView, name string) int { return strings.Compare(sent.v.e.key.Name, name) })
	v.rejected = f.views[at].version
	v.rejectedSeq = f.seq
	if v.early {
		v.early = false
		s.retry = append(s.retry, v)
	}
	s.rememberLocked(v.e.key.Name, v.rejected, reason)
	s.st.cache.waits.recheck(v.e.key)
}

func (s *subscription) rememberLocked(name, version, reason string) {
	r := s.rejections[name]
	if r == nil {
		r = &Rejection{Key: Key{Kind: s.kind, Name: name}, Stream: s.st.id, Node: s.st.node.GetId()}
		s.rejections[name] = r
	}
	r.Version, r.Reason = version, reason
	r.At = s.st.cache.clock.Now()
	r.Count++
}

func (s *subscription) suspectLocked(views []*view, f *flight) {
	if len(views) == 0 {
		return
	}
	for _, v := range views {
		v.suspect = true
	}
	s.suspects = append(s.suspects, suspects{views: views, since: f.since})
}

// nextSuspects takes the next part of a rejected response, without those views
// that were sent otherwise in the meantime, or will be, when their gates let them.
func (s *subscription) nextSuspects() []*view {
	next := s.suspects[0]
	s.suspects = slices.Delete(s.suspects, 0, 1)
	return slices.DeleteFunc(next.views, func(v *view) bool {
		if v.dirty {
			v.suspect = false
		}
		return v.gone || !v.suspect
	})
}

// retryLocked sends again what was rejected after its gate had timed out, now
// that the gate is open: it may have been rejected for what it came before.
func (s *subscription) retryLocked() {
	if len(s.retry) == 0 {
		return
	}
	g := gate{sub: s, now: s.st.cache.clock.Now()}
	s.retry = slices.DeleteFunc(s.retry, func(v *view) bool {
		if v.gone || v.e.want() != v.rejected {
			return true
		}
		if g.closed(v, v.e.want()) {
			return false
		}
		v.force()
		v.markDirty()
		return true
	})
}

// namesIn tells which of names the text mentions. A name inside a longer one
// that is mentioned does not count.
func namesIn(text string, names []string) []bool {
	found := make([]bool, len(names))
	order := make([]int, len(names))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return len(names[b]) - len(names[a]) })
	taken := make([]bool, len(text))
	for _, i := range order {
		name := names[i]
		for from := 0; name != ""; {
			at := strings.Index(text[from:], name)
			if at < 0 {
				break
			}
			at += from
			end := at + len(name)
			if !taken[at] && standsAlone(text, at, end) {
				found[i] = true
				for j := at; j < end; j++ {
					taken[j] = true
				}
			}
			from = at + 1
		}
	}
	return found
}

// standsAlone reports whether text[at:end] is not part of a longer name.
func standsAlone(text string, at, end int) bool {
	if at > 0 && (nameByte(text[at-1]) || strings.IndexByte("./|", text[at-1]) >= 0) {
		return false
	}
	if end == len(text) {
		return true
	}
	if strings.IndexByte(".:/|", text[end]) >= 0 { // joins parts of a name, or ends it
		return end+1 == len(text) || !nameByte(text[end+1])
	}
	return !nameByte(text[end])
}

func nameByte(b byte) bool {
	return b == '_' || b == '-' || (b >= '0' && b <= '9') || (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z')
}
