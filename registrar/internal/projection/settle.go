package projection

import (
	"maps"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// settle brings every service with unread changes up to date, in the order of their
// keys, so that the order in which the changes came does not matter (I5). Settling
// one service can unsettle another that wants the same flat name.
func (e *Engine) settle() {
	if !e.synced {
		return
	}
	for len(e.unsettled) > 0 {
		batch := slices.SortedFunc(maps.Keys(e.unsettled), func(a, b *service) int { return a.key.Compare(b.key) })
		clear(e.unsettled)
		for _, s := range batch {
			e.refresh(s)
		}
		for _, name := range slices.Sorted(maps.Keys(flatNamesOf(batch))) {
			e.settleFlat(name)
		}
		for _, s := range batch {
			if s.known {
				e.stepDefault(s)
				s.virgin = false
			}
			if s.known && s.overdue && s.step == Settled {
				e.begin(s, Leaving)
				e.unsettle(s) // whoever inherits the flat name
			}
		}
	}
}

// refresh brings one service's table and its place in the catalogue up to date.
func (e *Engine) refresh(s *service) {
	if s.known && s.step == Leaving && len(s.records) > 0 {
		e.begin(s, Settled) // it is back; what it was is still what Envoy has
	}
	shape, clusters := s.refresh()
	switch {
	case s.known:
		if _, homeless := e.homeless[s]; homeless && e.house(s) {
			shape = true
		}
	case len(s.records) > 0:
		e.know(s)
		shape, clusters = true, true
	case s.naming == 0:
		delete(e.services, s.key) // records came and went between two reads
		return
	default:
		return
	}
	c := e.note(s)
	if shape {
		e.unretire(s) // a port that is back
		c.Shape, c.Entry = true, true
	}
	c.Clusters = c.Clusters || clusters
	if c.empty() && len(s.touched) == 0 {
		delete(e.changes, s.key)
	}
}

// know takes a service into the catalogue.
func (e *Engine) know(s *service) {
	s.known, s.virgin = true, true
	s.step, s.token = Settled, 0
	s.bare, s.flat, s.retired = port.Port{}, false, nil
	e.order = nil
	e.house(s)
	e.setIdle(s)
	c := e.note(s)
	c.Gone, c.Entry = false, true
}

// house gives a service its address and reports whether it has one now.
func (e *Engine) house(s *service) bool {
	evicted, ok := e.vips.take(s.key)
	if !ok {
		e.homeless[s] = struct{}{}
		return false
	}
	delete(e.homeless, s)
	if evicted != (model.ServiceKey{}) {
		e.noteKey(evicted).Entry = true
	}
	return true
}

// Reusable says that no living pod can have resolved a name before the given time:
// the start of the oldest local attachment, or now if there is none. Addresses of
// services forgotten before it may be given to others when no fresh one is left.
func (e *Engine) Reusable(before time.Time) {
	e.vips.reusable = before
	for s := range e.homeless {
		e.unsettle(s)
	}
}

// forget is the end of a service: the route table is without it.
func (e *Engine) forget(s *service) {
	s.known, s.flat = false, false
	if f := e.flats[s.key.Name]; f != nil && f.holder == s {
		f.holder = nil
		e.settleFlat(s.key.Name)
	}
	s.ports, s.def, s.bare, s.retired, s.touched = nil, port.Port{}, port.Port{}, nil, nil
	s.idleSince, s.overdue = time.Time{}, false
	e.order = nil
	e.vips.release(s.key, e.now)
	delete(e.idle, s)
	delete(e.homeless, s)
	if s.naming == 0 {
		delete(e.services, s.key)
	} else {
		e.unsettle(s)
	}
	*e.note(s) = Change{Service: s.key, Shape: true, Gone: true, Entry: true}
	for h := range e.homeless {
		e.unsettle(h)
	}
}
