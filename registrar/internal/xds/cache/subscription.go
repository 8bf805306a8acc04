package cache

import (
	"slices"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	gcpcache "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
)

// wildcardName subscribes to all resources of a type.
const wildcardName = "*"

// subscription is what one stream asked for of one kind, and how far it is.
// Guarded by Cache.mu.
type subscription struct {
	st   *Stream
	kind Kind
	// started: the first request was seen; only that one carries versions.
	started  bool
	wildcard bool
	// resumed: the client came with resources of an earlier stream.
	resumed bool
	// owed: a new wildcard is answered, though there may be nothing (XDS-32).
	owed  bool
	views map[string]*view
	named int
	// dirty are the views to be looked at; a view is in it at most once.
	dirty []*view
	// suspects are parts of rejected responses that are sent again, apart.
	suspects []suspects
	// retry are rejected views that had been sent before their gate opened.
	retry []*view
	// isolated: the last response was a part of a rejected one, so dirty views
	// have the next turn.
	isolated bool
	// flight is the one unacknowledged response (XDS-R11).
	flight *flight

	// out takes the next response; nil while the client has not asked since the
	// last one. watch numbers the requests, so that a late cancel does not close
	// its successor.
	out   chan gcpcache.DeltaResponse
	watch uint64
	// request stands for the client's in responses.
	request *discoveryv3.DeltaDiscoveryRequest

	rejections map[string]*Rejection
	// removed are the names that the client had of an earlier stream and that this one
	// took away. It may say on its other stream that it has them still.
	removed map[string]struct{}
}

// view is what one stream knows of one entry.
type view struct {
	sub *subscription
	e   *entry
	pos int // in e.views

	// named: subscribed by name, not by the wildcard alone.
	named bool
	// gone: not looked at any more; whoever still has a pointer ignores it.
	gone bool
	// dirty: in sub.dirty. flying: in sub.flight. suspect: in sub.suspects.
	dirty, flying, suspect bool
	// forced: to be sent although the client has it.
	forced bool
	// inherited: the client has it from an earlier stream, and it is gone. Of kinds whose
	// set is whole alone.
	inherited bool
	// pushed: content was sent on this stream.
	pushed bool
	// early: sent when its gate timed out.
	early bool

	// sent is the version last sent, acked the one last acknowledged.
	sent, acked string
	// rejected is the version last rejected.
	rejected string
	// ackedSeq and rejectedSeq: all changes up to there are in what was
	// acknowledged or rejected. needSeq is the least that settles the view.
	ackedSeq, rejectedSeq, needSeq uint64
	// heldSince is when a gate began to hold the view; zero if none does.
	heldSince time.Time
}

func newSubscription(st *Stream, kind Kind) *subscription {
	return &subscription{
		st:         st,
		kind:       kind,
		views:      make(map[string]*view),
		request:    &discoveryv3.DeltaDiscoveryRequest{TypeUrl: kind.TypeURL()},
		rejections: make(map[string]*Rejection),
		removed:    make(map[string]struct{}),
	}
}

// cancel withdraws the permission to send that a request gave.
func (s *subscription) cancel(watch uint64) {
	s.st.cache.mu.Lock()
	defer s.st.cache.mu.Unlock()
	if s.watch == watch {
		s.out = nil
	}
}

// changeLocked takes in the subscription changes of a request. They count
// whatever its nonce is (XDS-R7).
func (s *subscription) changeLocked(req *discoveryv3.DeltaDiscoveryRequest, wildcard bool) {
	var known map[string]string
	if !s.started {
		s.started = true
		known = req.GetInitialResourceVersions()
		s.resumed = len(known) > 0
	}
	was := s.wildcard
	s.wildcard = wildcard
	if wildcard && !was {
		s.joinLocked(known)
	}
	for _, name := range req.GetResourceNamesSubscribe() {
		if name != wildcardName {
			s.subscribeLocked(name, known)
		}
	}
	for _, name := range req.GetResourceNamesUnsubscribe() {
		if name != wildcardName {
			s.unsubscribeLocked(name)
		}
	}
	if was && !wildcard {
		s.leaveLocked()
	}
}

// joinLocked begins a wildcard: everything held, and everything the client says
// it holds, is looked at. Only kinds whose set is whole have members; on the
// others a wildcard is answered and has none, so that an on-demand cluster is
// never given to who did not ask for it.
func (s *subscription) joinLocked(known map[string]string) {
	s.owed = true
	if !s.kind.whole() {
		return
	}
	c := s.st.cache
	c.wildcards[s.kind][s] = struct{}{}
	for name, version := range known {
		e := c.entryLocked(Key{Kind: s.kind, Name: name})
		v := s.viewLocked(e)
		v.inherited = !e.held()
		v.sent, v.acked = version, version
		v.markDirty()
	}
	for _, e := range c.entries[s.kind] {
		if e.held() {
			s.viewLocked(e).markDirty()
		}
	}
}

// leaveLocked ends a wildcard: what is not subscribed by name is forgotten.
func (s *subscription) leaveLocked() {
	s.owed = false
	delete(s.st.cache.wildcards[s.kind], s)
	for _, v := range s.views {
		if !v.named {
			s.forgetLocked(v)
		}
	}
}

// subscribeLocked adds a name. It is answered in any case (XDS-R3), unless the
// first request of the stream says that the client has it (XDS-R22).
func (s *subscription) subscribeLocked(name string, known map[string]string) {
	c := s.st.cache
	e := c.entryLocked(Key{Kind: s.kind, Name: name})
	v := s.viewLocked(e)
	if !v.named {
		v.named = true
		s.named++
		e.named++
		c.demand.keep(e.key)
	}
	version, has := known[name]
	if has {
		v.sent, v.acked = version, version
	}
	switch {
	case !has, s.kind == Endpoints && s.clusterPushedLocked(name), s.kind == OnDemandCluster && s.st.removedLocked(name):
		v.force()
	default:
		v.proveLocked()
	}
	v.markDirty()
	if e.want() == versionUnknown && !e.asked {
		e.asked = true
		c.demand.want(e.key)
	}
	c.waits.recheck(e.key)
}

// removedLocked reports whether this Envoy was told that a name, which it had of an
// earlier stream, is no cluster that every Envoy holds: then it lost what it had on
// demand.
func (st *Stream) removedLocked(name string) bool {
	for _, ads := range st.partnersLocked() {
		if sub := ads.subs[WildcardCluster]; sub != nil && ads.pairsLocked(st) {
			if _, ok := sub.removed[name]; ok {
				return true
			}
		}
	}
	return false
}

// clusterPushedLocked reports whether the cluster of a load assignment was sent
// to this Envoy since it connected: then its assignment must follow, even if the
// client says that it has it (XDS-R23).
func (s *subscription) clusterPushedLocked(name string) bool {
	if sub := s.st.subs[WildcardCluster]; sub != nil {
		if v := sub.views[name]; v != nil && v.pushed {
			return true
		}
	}
	for v := range s.st.onDemandLocked(name) {
		if v.pushed {
			return true
		}
	}
	return false
}

// unsubscribeLocked takes a name away. A name that was never subscribed is
// ignored (XDS-R6); one that the wildcard still covers is answered (XDS-R5).
func (s *subscription) unsubscribeLocked(name string) {
	v := s.views[name]
	if v == nil || !v.named {
		return
	}
	s.unnameLocked(v)
	if s.wildcard && s.kind.whole() {
		v.force()
		v.markDirty()
		return
	}
	s.forgetLocked(v)
}

func (s *subscription) unnameLocked(v *view) {
	v.named = false
	s.named--
	v.e.named--
	if v.e.named == 0 && !s.kind.whole() {
		v.e.asked = false
		s.st.cache.demand.drop(v.e.key)
	}
}

// viewLocked returns the stream's view of e, made if there is none.
func (s *subscription) viewLocked(e *entry) *view {
	v := s.views[e.key.Name]
	if v == nil {
		v = &view{sub: s, e: e, pos: len(e.views)}
		e.views = append(e.views, v)
		s.views[e.key.Name] = v
	}
	return v
}

// forgetLocked ends a view: the client is taken not to have the resource.
func (s *subscription) forgetLocked(v *view) {
	v.gone = true
	delete(s.views, v.e.key.Name)
	delete(s.rejections, v.e.key.Name)
	last := len(v.e.views) - 1
	moved := v.e.views[last]
	v.e.views[v.pos] = moved
	moved.pos = v.pos
	v.e.views = slices.Delete(v.e.views, last, last+1)
	s.st.cache.waits.recheck(v.e.key)
	s.st.cache.reapLocked(v.e)
}

// closeLocked ends all views of a stream that is gone.
func (s *subscription) closeLocked() {
	delete(s.st.cache.wildcards[s.kind], s)
	s.out, s.flight = nil, nil
	for _, v := range s.views {
		if v.named {
			s.unnameLocked(v)
		}
		s.forgetLocked(v)
	}
}

// force makes the view be sent though the client may have it.
func (v *view) force() {
	c := v.sub.st.cache
	c.seq++ // later than everything in flight
	v.forced = true
	v.needSeq = c.seq
}

// markDirty makes the view be looked at, and wakes its stream.
func (v *view) markDirty() {
	if !v.dirty {
		v.dirty = true
		v.sub.dirty = append(v.sub.dirty, v)
	}
	v.sub.st.touch()
}

// busy reports whether something that the client was or is to be sent is not
// settled.
func (v *view) busy() bool { return v.dirty || v.flying || v.suspect }

// proveLocked sends a load assignment again that the client says to have and somebody
// waits for: it may be the old cluster's, and the one that the client got last still
// warms. The acknowledgement of what follows on this stream proves that it does not.
func (v *view) proveLocked() {
	if c := v.sub.st.cache; v.e.key.Kind == Endpoints && v.sub.resumed && !v.pushed && len(c.waits.byKey[v.e.key]) > 0 {
		v.force()
		v.markDirty()
	}
}
