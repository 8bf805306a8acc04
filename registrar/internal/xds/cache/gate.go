package cache

import (
	"iter"
	"math"
	"time"
)

// never is later than every change.
const never uint64 = math.MaxUint64

// gate decides for one subscription and one look at it what must wait for the
// acknowledgement of something else (XDS-R14, dataplane decision 5).
//
// Changes are compared by number: a listener waits for the clusters that changed
// with it or before it, and not for later ones, so a busy type cannot starve
// another.
type gate struct {
	sub *subscription
	now time.Time
	// settled tells which changes of other kinds were looked up; the numbers are
	// the oldest change of theirs that is not settled.
	settled                     bool
	clusters, listeners, routes uint64
	// holders is that of clusters with their removals, for which only secrets wait.
	holders uint64
	// timedOut counts views that were let through because they waited too long.
	timedOut int
}

// holds reports whether v, whose content is to become want, has to wait.
func (g *gate) holds(v *view, want string) bool {
	if !g.closed(v, want) {
		v.heldSince = time.Time{}
		return false
	}
	if v.heldSince.IsZero() {
		v.heldSince = g.now
	}
	st := g.sub.st
	end := v.heldSince.Add(st.cache.gateTimeout)
	if !end.After(g.now) {
		g.timedOut++
		v.early = true
		return false
	}
	if st.deadline.IsZero() || end.Before(st.deadline) {
		st.deadline = end
	}
	return true
}

func (g *gate) closed(v *view, want string) bool {
	removal := want == versionGone
	switch g.sub.kind {
	case Endpoints:
		return g.sub.st.clusterBusyLocked(v.e.key.Name) || g.sub.st.clusterUnsentLocked(v)
	case WildcardCluster:
		// What names the cluster goes first; additions wait for nothing.
		if !removal {
			return false
		}
		g.look()
		if v.inherited {
			// It went while nobody was looking: whatever is not settled may name it.
			return min(g.listeners, g.routes) != never || g.sub.st.onDemandUnsaidLocked(v.e.key.Name)
		}
		return v.e.seq >= min(g.listeners, g.routes)
	case Listener:
		if removal {
			return false
		}
		g.look()
		return v.e.seq >= g.clusters
	case Route:
		g.look()
		return v.e.seq >= min(g.clusters, g.listeners)
	case OnDemandCluster:
		return g.sub.st.removingLocked(v.e.key.Name)
	case Secret:
		// What is to stay after all keeps what it refers to: Envoy asks once.
		if !removal || v.sent == versionUnknown {
			return false
		}
		g.look()
		return v.e.seq >= min(g.holders, g.listeners)
	case numKinds:
	}
	return false
}

// look finds how far the other kinds are, once.
func (g *gate) look() {
	if g.settled {
		return
	}
	g.settled = true
	subs := &g.sub.st.subs
	// Removals of clusters hold neither listeners nor routes: they wait for those.
	g.clusters = subs[WildcardCluster].unsettledSince(false)
	g.holders = subs[WildcardCluster].unsettledSince(true)
	g.listeners = subs[Listener].unsettledSince(true)
	if g.sub.resumed { // it has some, and will ask for them
		if subs[WildcardCluster] == nil {
			g.holders = 0
		}
		if subs[Listener] == nil {
			g.listeners = 0
		}
	}
	g.routes = subs[Route].unsettledSince(true)
}

// report counts and logs the views that were let through.
func (g *gate) report() {
	if g.timedOut == 0 {
		return
	}
	s := g.sub
	c := s.st.cache
	c.counters[s.kind].GateTimeouts++
	kind, id, n, timeout := s.kind.String(), s.st.id, g.timedOut, c.gateTimeout
	c.logs.add(func() {
		c.log.Warn("sent before what must come first was acknowledged",
			"type", kind, "stream", id, "resources", n, "waited", timeout)
	})
}

// unsettledSince returns the oldest change that the client has not acknowledged
// or rejected, or never. A nil subscription has none.
func (s *subscription) unsettledSince(removals bool) uint64 {
	since := never
	if s == nil {
		return since
	}
	for _, v := range s.dirty {
		if v.gone || (!removals && v.e.want() == versionGone) {
			continue
		}
		since = min(since, v.e.seq)
	}
	for i := range s.suspects {
		since = min(since, s.suspects[i].since)
	}
	if s.flight != nil {
		if removals {
			since = min(since, s.flight.since)
		} else {
			since = min(since, s.flight.sinceSet)
		}
	}
	return since
}

// clusterBusyLocked reports whether this Envoy has yet to acknowledge the
// on-demand cluster of a load assignment in its current version, which it may hold of
// an earlier stream while the consumer has not said yet what it is.
func (st *Stream) clusterBusyLocked(name string) bool {
	for v := range st.onDemandLocked(name) {
		if v.busy() || v.e.want() == versionUnknown {
			return true
		}
	}
	return false
}

// clusterUnsentLocked reports whether the cluster of a load assignment is still to be
// sent to this Envoy in its current version: what the assignment means may be another
// port or service than what the cluster means that Envoy has. One that every Envoy
// holds need not be acknowledged: Envoy does that only when the assignment came.
func (st *Stream) clusterUnsentLocked(v *view) bool {
	clusters := st.subs[WildcardCluster]
	if clusters != nil {
		if c := clusters.views[v.e.key.Name]; c != nil && c.e.want() != versionGone {
			return c.dirty || c.suspect
		}
	}
	if !v.sub.resumed || !st.envoyLocked() {
		return false
	}
	if v.sent == versionUnknown {
		// It has no assignment that this one could be taken for. The cluster warms, and
		// as long as one does Envoy asks for no others on this stream.
		return false
	}
	// It came back with clusters, and will ask for them on either stream.
	if clusters == nil {
		return true
	}
	for _, od := range st.partnersLocked() {
		if od.subs[OnDemandCluster] != nil && od.pairsLocked(st) {
			return false
		}
	}
	return true
}

// removingLocked reports whether this Envoy has yet to acknowledge that a name is no
// cluster that every Envoy holds. Envoy has one cluster of a name, whoever gave it: what
// is given on demand before that would go with it.
func (st *Stream) removingLocked(name string) bool {
	for _, ads := range st.partnersLocked() {
		if sub := ads.subs[WildcardCluster]; sub != nil && ads.pairsLocked(st) {
			if v := sub.views[name]; v != nil && v.flying && v.sent == versionGone {
				return true
			}
		}
	}
	return false
}

// keepOnDemandLocked reports whether this Envoy has a cluster of the name on demand, too,
// so that its removal from those that every Envoy holds must not be sent: it would take
// the one cluster that there is, and nobody would ask for it again (dataplane decision 5).
// What Envoy has is made that of the on-demand stream.
func (st *Stream) keepOnDemandLocked(v *view) bool {
	keep := false
	for c := range st.onDemandLocked(v.e.key.Name) {
		if c.e.wire == nil {
			continue
		}
		keep = true
		if v.sent != c.e.want() {
			c.force()
			c.markDirty()
		}
	}
	return keep
}

// lostOnDemandLocked is told that a name's removal is sent, which takes what this Envoy has
// of it on demand, too: that is sent again, though it may be what the Envoy had.
func (st *Stream) lostOnDemandLocked(name string) {
	for v := range st.onDemandLocked(name) {
		v.force()
		v.markDirty()
	}
}

// onDemandUnsaidLocked reports whether nobody has said yet what a name is that this Envoy
// has asked for on demand: if it is given so, its removal must not be sent.
func (st *Stream) onDemandUnsaidLocked(name string) bool {
	for v := range st.onDemandLocked(name) {
		if v.e.want() == versionUnknown {
			return true
		}
	}
	return false
}

// onDemandLocked goes over the views of a name that this Envoy has asked for on demand.
func (st *Stream) onDemandLocked(name string) iter.Seq[*view] {
	return func(yield func(*view) bool) {
		for _, od := range st.partnersLocked() {
			sub := od.subs[OnDemandCluster]
			if sub == nil || !od.pairsLocked(st) {
				continue
			}
			if v := sub.views[name]; v != nil && !yield(v) {
				return
			}
		}
	}
}
