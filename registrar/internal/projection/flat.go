package projection

import (
	"slices"
	"strings"
)

// flatName is who owns a one-label name. Its owner is the known service of the first
// listed flat namespace that has a service so called. When that changes, the name goes
// over in steps (see Step), because clusters of that name are with Envoy: between the
// two owners it is refused.
type flatName struct {
	// heir is who should own it, as of the last settling.
	heir *service
	// holder has clusters of the flat name; it is flat.
	holder *service
	// claimant is Claiming.
	claimant *service
	// hot: Envoy may hold clusters of the name that are nobody's now, so a newcomer has
	// to claim it step by step although it has no holder.
	hot bool
}

// flatHeir returns the service that should own a flat name, nil if there is none.
func (e *Engine) flatHeir(name string) *service {
	for _, ns := range e.cfg.FlatNamespaces {
		key := serviceKey(ns, name)
		if s := e.services[key]; s != nil && s.known && s.step != Leaving {
			return s
		}
	}
	return nil
}

// settleFlat moves a flat name towards its heir, as far as that can go now.
func (e *Engine) settleFlat(name string) {
	f := e.flats[name]
	heir := e.flatHeir(name)
	if f == nil {
		if heir == nil {
			return
		}
		f = &flatName{}
		e.flats[name] = f
	}
	if heir != f.heir {
		for _, s := range []*service{f.heir, heir} {
			if s != nil && s.known {
				e.note(s).Shape = true // its spellings
			}
		}
		f.heir = heir
	}
	if f.claimant != nil && f.claimant != heir {
		e.begin(f.claimant, Settled)
		e.unsettle(f.claimant)
		f.claimant = nil
	}
	switch {
	case f.holder != nil && f.holder != heir:
		if f.holder.step == Settled {
			e.begin(f.holder, Releasing)
		}
	case f.holder != nil || f.claimant != nil:
	case heir == nil:
		if !f.hot {
			delete(e.flats, name)
		}
	case heir.virgin && !f.hot:
		heir.flat, f.holder = true, heir
	case heir.step == Settled && !heir.virgin:
		f.claimant, f.hot = heir, true
		e.begin(heir, Claiming)
	case heir.virgin:
		// Its own birth is settled first, under its long name.
		e.unsettle(heir)
	}
}

// released ends Releasing: no route leads to the flat-named clusters. What Envoy holds
// of them becomes tombstones when it is resolved again.
func (e *Engine) released(s *service) {
	f := e.flats[s.key.Name]
	f.holder, f.hot = nil, true
	s.flat = false
	// What the next owner must not keep is for that to say.
	s.retired = slices.DeleteFunc(s.retired, func(name string) bool {
		host, _, _ := strings.Cut(name, ":")
		return host == s.flatName
	})
	s.touchAll()
	e.rested(s)
}

// claimed ends Claiming: all that Envoy has of the flat name are tombstones.
func (e *Engine) claimed(s *service) {
	f := e.flats[s.key.Name]
	f.holder, f.claimant, f.hot = s, nil, false
	s.flat = true
	s.touchAll()
	e.begin(s, Renaming)
}

// renamed ends Renaming: no route leads to the long-named clusters.
func (e *Engine) renamed(s *service) {
	old := e.clustersOf(s, s.longName)
	e.rested(s)
	for _, d := range old {
		e.retire(s, d.name)
	}
}

// touchAll marks all ports: clusters of other names have their endpoints now.
func (s *service) touchAll() {
	for _, p := range s.ports {
		s.touched.add(p.Number)
	}
}

// flatOwner returns the service whose clusters carry the flat name, nil while it is
// refused: who answers for it when Envoy asks.
func (e *Engine) flatOwner(name string) *service {
	if f := e.flats[name]; f != nil {
		return f.holder
	}
	return nil
}

// refusesFlat says whether the service's virtual hosts have to refuse the flat name.
func (s *service) refusesFlat() bool { return s.step == Releasing || s.step == Claiming }

// flatNamesOf returns the flat names that a set of services touches.
func flatNamesOf(services []*service) map[string]struct{} {
	names := map[string]struct{}{}
	for _, s := range services {
		if s.flatName != "" {
			names[s.key.Name] = struct{}{}
		}
	}
	return names
}
