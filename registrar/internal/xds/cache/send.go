package cache

import (
	"cmp"
	"slices"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	gcpcache "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
)

// flight is a response that is not acknowledged.
type flight struct {
	// nonce is known once the response is written.
	nonce string
	// seq: all changes up to there are in it, as far as its views go.
	seq uint64
	// since is the oldest change in it; sinceSet the oldest that is no removal.
	since, sinceSet uint64
	views           []sentView
	at              time.Time
}

// sentView is one view with the version that a response carries.
type sentView struct {
	v       *view
	version string
}

// decision is what to do with a dirty view.
type decision uint8

const (
	// settle: the client has what it should have, or it rejected just that.
	settle decision = iota
	// wait: nobody knows yet whether the name exists; it was demanded.
	wait
	// hold: a gate is closed.
	hold
	// push: send it, or its removal.
	push
)

// sendLocked sends one response if the client asked for one, none is
// unacknowledged and there is something to say.
func (s *subscription) sendLocked() {
	if s.out == nil || s.flight != nil || len(s.out) == cap(s.out) {
		return
	}
	s.retryLocked()
	// Parts of a rejected response and new state take turns.
	if s.isolated {
		_ = s.sendDirtyLocked() || s.sendSuspectsLocked()
	} else {
		_ = s.sendSuspectsLocked() || s.sendDirtyLocked()
	}
}

func (s *subscription) sendSuspectsLocked() bool {
	for len(s.suspects) > 0 {
		if list := s.nextSuspects(); len(list) > 0 {
			s.isolated = true
			s.respondLocked(list)
			return true
		}
	}
	return false
}

func (s *subscription) sendDirtyLocked() bool {
	list, complete := s.pickLocked()
	if len(list) == 0 && (!s.owed || !complete) {
		return false
	}
	s.isolated = false
	s.respondLocked(list)
	clear(s.st.cache.scratch)
	return true
}

// pickLocked takes what is to be sent out of the dirty views and leaves what a
// gate holds. The first answer to a wildcard is given whole or not at all, since
// Envoy takes it for the full state; complete is false if it is not whole yet.
// Removals of clusters may come after it.
func (s *subscription) pickLocked() (list []*view, complete bool) {
	c := s.st.cache
	if len(s.dirty) == 0 {
		return nil, true
	}
	gate := gate{sub: s, now: c.clock.Now()}
	list = c.scratch[:0]
	kept := 0
	for _, v := range s.dirty {
		if v.gone {
			continue
		}
		switch s.decide(v, &gate) {
		case settle:
			s.settleLocked(v)
		case wait:
			v.dirty = false
		case hold:
			s.dirty[kept] = v
			kept++
		case push:
			list = append(list, v)
		}
	}
	c.scratch = list
	clear(s.dirty[kept:])
	s.dirty = s.dirty[:kept]
	if kept > 0 && s.owed && s.kind != WildcardCluster {
		s.dirty = append(s.dirty, list...)
		return nil, false
	}
	gate.report()
	return list, true
}

func (s *subscription) decide(v *view, g *gate) decision {
	want := v.e.want()
	switch {
	case want == versionUnknown:
		return wait
	case v.forced:
	case want == v.sent, want == v.rejected:
		return settle
	case want == versionGone && v.sent == versionUnknown:
		return settle
	case want == versionGone && s.kind == WildcardCluster && s.st.keepOnDemandLocked(v):
		return settle
	}
	if g.holds(v, want) {
		return hold
	}
	return push
}

// settleLocked records that there is nothing to send for v.
func (s *subscription) settleLocked(v *view) {
	v.dirty = false
	v.heldSince = time.Time{}
	c := s.st.cache
	want := v.e.want()
	if want == v.rejected {
		v.rejectedSeq = c.seq
	} else {
		v.ackedSeq = c.seq
	}
	c.waits.recheck(v.e.key)
	if want == versionGone && !v.named {
		s.forgetLocked(v)
	}
}

// respondLocked sends views, which are not empty but for an owed answer, as one
// response. Each name is in it once (XDS-R8), in order.
func (s *subscription) respondLocked(list []*view) {
	c := s.st.cache
	slices.SortFunc(list, func(a, b *view) int { return cmp.Compare(a.e.key.Name, b.e.key.Name) })
	f := &flight{
		seq: c.seq, since: never, sinceSet: never,
		views: make([]sentView, 0, len(list)), at: c.clock.Now(),
	}
	resp := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: s.kind.TypeURL()}
	for _, v := range list {
		want := v.e.want()
		if want == versionGone {
			resp.RemovedResources = append(resp.RemovedResources, v.e.key.Name)
			if v.inherited {
				s.removed[v.e.key.Name] = struct{}{}
			}
			if s.kind == WildcardCluster {
				s.st.lostOnDemandLocked(v.e.key.Name)
			}
		} else {
			resp.Resources = append(resp.Resources, v.e.wire)
			f.sinceSet = min(f.sinceSet, v.e.seq)
			v.pushed, v.inherited = true, false
		}
		f.since = min(f.since, v.e.seq)
		f.views = append(f.views, sentView{v: v, version: want})
		v.sent = want
		v.dirty, v.suspect, v.forced, v.flying = false, false, false, true
		v.heldSince = time.Time{}
	}
	s.flight = f
	s.owed = false
	s.out <- &gcpcache.DeltaPassthroughResponse{
		DeltaRequest:           s.request,
		NextVersionMap:         map[string]string{}, // the delta server writes to it
		DeltaDiscoveryResponse: resp,
	}
	s.out = nil
	c.counters[s.kind].Responses++
	c.counters[s.kind].Resources += uint64(len(list))
	if s.kind == WildcardCluster || s.kind == OnDemandCluster {
		s.followLocked(f)
	}
}

// followLocked makes the load assignments of clusters that were just sent be
// sent as well, even if they are unchanged: a changed cluster is a new object to
// Envoy and stays warming without (XDS-D7).
func (s *subscription) followLocked(f *flight) {
	if s.kind == WildcardCluster {
		s.st.resendAssignmentsLocked(f)
		return
	}
	for _, ads := range s.st.partnersLocked() {
		ads.resendAssignmentsLocked(f)
	}
}

func (st *Stream) resendAssignmentsLocked(f *flight) {
	sub := st.subs[Endpoints]
	if sub == nil {
		return
	}
	for i := range f.views {
		if f.views[i].version == versionGone {
			continue
		}
		if v := sub.views[f.views[i].v.e.key.Name]; v != nil {
			v.force()
			v.markDirty()
			v.heldSince = time.Time{} // waits for this cluster, not for an earlier one
		}
	}
}
