package cache

import (
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
		return g.sub.st.clusterBusyLocked(v.e.key.Name)
	case WildcardCluster:
		// What names the cluster goes first; additions wait for nothing.
		if !removal {
			return false
		}
		g.look()
		if v.inherited {
			// It went while nobody was looking: whatever is not settled may name it.
			return min(g.listeners, g.routes) != never
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
	case Secret, OnDemandCluster, numKinds:
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
	// Removals of clusters hold nothing: they themselves wait for the others.
	g.clusters = subs[WildcardCluster].unsettledSince(false)
	g.listeners = subs[Listener].unsettledSince(true)
	if subs[Listener] == nil && g.sub.resumed {
		g.listeners = 0 // it has listeners and will ask for them
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
// on-demand cluster of a load assignment in its current version.
func (st *Stream) clusterBusyLocked(name string) bool {
	for _, od := range st.partnersLocked() {
		sub := od.subs[OnDemandCluster]
		if sub == nil {
			continue
		}
		if v := sub.views[name]; v != nil && v.busy() {
			return true
		}
	}
	return false
}
