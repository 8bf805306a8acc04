package projection

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"
	"unique"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Engine projects the pods' records onto services. It is owned by one goroutine; its
// methods are not safe for concurrent use. What it returns shares the strings and maps
// of the records, which nobody may change.
type Engine struct {
	cfg      Config
	services map[model.ServiceKey]*service
	records  map[string]*record
	addrs    addressTable
	graves   graveyard
	flats    map[string]*flatName // by service name
	vips     *vipPool
	asked    askedNames

	// order has the known services sorted; nil when it must be made anew.
	order []*service
	// unsettled services have changes that no read has seen.
	unsettled map[*service]struct{}
	// homeless services are known but got no address, because the pool was empty.
	homeless map[*service]struct{}
	// idle services are known and have no endpoint.
	idle map[*service]struct{}
	// changes is what TakeDirty will return.
	changes map[model.ServiceKey]*Change

	// sync counts the registry's syncs; synced is false until the first is complete.
	sync   uint32
	synced bool
	// tokens is the last token given to a step.
	tokens uint64
	// now is the latest time that a caller told.
	now     time.Time
	scratch []byte
}

// New returns an Engine that knows the saved services: what earlier Changes with Entry
// set asked to keep. now is when the time of services begins that have no LastSeen.
// The error says which setting is wrong, or is an *EntryError for the first entry that is
// unusable or contradicts an earlier one.
func New(cfg Config, saved []Entry, now time.Time) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("projection: %w", err)
	}
	e := &Engine{
		cfg:       cfg,
		services:  map[model.ServiceKey]*service{},
		records:   map[string]*record{},
		addrs:     addressTable{owner: map[netip.Addr]*record{}, shadow: map[netip.Addr][]*record{}, contested: map[netip.Addr]struct{}{}, changed: map[netip.Addr]struct{}{}},
		graves:    graveyard{generation: map[string]uint64{}},
		flats:     map[string]*flatName{},
		vips:      newVIPPool(cfg.VIP4, cfg.VIP6),
		asked:     newAskedNames(),
		unsettled: map[*service]struct{}{},
		homeless:  map[*service]struct{}{},
		idle:      map[*service]struct{}{},
		changes:   map[model.ServiceKey]*Change{},
		sync:      1,
		now:       now,
	}
	for _, entry := range saved {
		if err := e.load(entry); err != nil {
			return nil, &EntryError{Service: entry.Service, Err: err}
		}
	}
	e.heatFlats()
	return e, nil
}

// Upsert takes a pod's record. One that is not newer than the known one is ignored, as
// is one that was deleted. The error is about a record that cannot be projected; it is
// ignored too, and what was known of the pod stays. ep must not be changed afterwards.
func (e *Engine) Upsert(ep model.Endpoint, now time.Time) error {
	e.tick(now)
	if err := validateEndpoint(ep); err != nil {
		return fmt.Errorf("endpoint %q of %s: %w", ep.UID, ep.Service, err)
	}
	if e.graves.dead(ep.UID, ep.Generation) {
		return nil
	}
	old := e.records[ep.UID]
	if old != nil && ep.Generation <= old.generation {
		old.sync = e.sync
		return nil
	}
	r := e.newRecord(ep)
	if r.profile != nil && r.service.pin(ep.Identity) && r.service.known {
		e.note(r.service).Clusters = true
		e.note(r.service).Entry = true
	}
	switch {
	case old == nil:
		r.service.naming++
		e.records[ep.UID] = r
		e.link(r)
	case old.attached && r.profile != nil && old.service == r.service && old.addr == r.addr && old.since == r.since && old.node == r.node:
		e.replace(old, r)
	default:
		r.service.naming++
		e.records[ep.UID] = r
		e.unlink(old)
		e.link(r)
	}
	return nil
}

// newRecord returns ep's record, not attached yet.
func (e *Engine) newRecord(ep model.Endpoint) *record {
	s := e.service(ep.Service)
	r := &record{
		uid: ep.UID, generation: ep.Generation, service: s, addr: ep.Addresses[0].Unmap(),
		locality: unique.Make(ep.Locality), weight: ep.Weight, sync: e.sync,
		node: unique.Make(ep.Node), local: ep.Node == e.cfg.Node,
	}
	if !ep.Since.IsZero() {
		r.since = ep.Since.UnixNano()
	}
	if len(ep.Metadata) > 0 {
		r.metadata = ep.Metadata
	}
	if len(ep.Ports) > 0 {
		e.scratch = profileKey(e.scratch, ep.Default, ep.Ports)
		r.profile = s.intern(e.scratch, ep.Default, ep.Ports)
	}
	return r
}

// replace updates an attached record in place: the common case, a change of health.
func (e *Engine) replace(old, r *record) {
	s := old.service
	before := old.profile
	r.profile = s.hold(r.profile)
	if old.weight != r.weight || old.locality != r.locality || !equalMetadata(old.metadata, r.metadata) {
		s.touched.addAll(before)
		s.touched.addAll(r.profile)
	} else {
		s.touched.addChanged(before, r.profile)
	}
	s.drop(before)
	r.attached = true
	*old = *r
	e.unsettle(s)
}

func equalMetadata(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// link gives r its address and attaches it, unless the address belongs to a newer record.
func (e *Engine) link(r *record) {
	owns, lost := e.addrs.claim(r)
	if lost != nil {
		e.detach(lost)
	}
	if owns {
		e.attach(r)
	}
}

// unlink is the end of a record: its address goes to whoever else claims it.
func (e *Engine) unlink(r *record) {
	next := e.addrs.release(r)
	e.detach(r)
	r.service.naming--
	e.unsettle(r.service)
	if next != nil {
		e.attach(next)
	}
}

func (e *Engine) attach(r *record) {
	if r.profile == nil {
		return
	}
	r.service.attach(r, e.synced)
	if r.service.known {
		e.setIdle(r.service)
	}
	e.unsettle(r.service)
}

func (e *Engine) detach(r *record) {
	if !r.attached {
		return
	}
	r.service.detach(r, e.now)
	if r.service.known {
		e.setIdle(r.service)
	}
	e.unsettle(r.service)
}

// Delete takes a record away. A delete that is older than the record is ignored; an
// update with no higher generation that comes later is, too (XDS-47).
func (e *Engine) Delete(uid string, generation uint64, now time.Time) {
	e.tick(now)
	r := e.records[uid]
	if r != nil && generation < r.generation {
		return
	}
	e.graves.bury(uid, generation, now)
	if r != nil {
		delete(e.records, uid)
		e.unlink(r)
	}
}

// Has says whether the record of this UID is among those that are projected.
func (e *Engine) Has(uid string) bool {
	_, ok := e.records[uid]
	return ok
}

// TakeContests returns the addresses that pods of several nodes claim, and did not at the
// last call.
func (e *Engine) TakeContests() []Contest { return e.addrs.takeContests() }

// Contested returns how many addresses pods of several nodes claimed at the last
// TakeContests.
func (e *Engine) Contested() int { return len(e.addrs.contested) }

// BeginSync says that the registry starts to tell all its records again, as after a
// lost watch. Nothing is dropped until Synced.
func (e *Engine) BeginSync() { e.sync++ }

// Synced says that the registry has told all its records (its complete marker). Those
// that it did not tell are dropped. Before the first Synced nothing is settled: saved
// services are as they were saved, and TakeDirty is empty (XDS-R21, MESH-14).
func (e *Engine) Synced() {
	for uid, r := range e.records {
		if r.sync != e.sync {
			e.graves.bury(uid, r.generation, e.now)
			delete(e.records, uid)
			e.unlink(r)
		}
	}
	if e.synced {
		return
	}
	e.synced = true
	for _, s := range e.services {
		e.unsettle(s)
		if s.known {
			// All that was saved is to be told; and its LastSeen may have begun at New.
			c := e.note(s)
			c.Shape, c.Clusters, c.Entry = true, true, true
			s.touchAll()
		}
	}
}

// Retention is how long a service stays known after its last endpoint.
func (e *Engine) Retention() time.Duration { return e.cfg.Retention }

// Expire forgets services that have had no endpoint for the retention, and deleted
// records. It returns when to call again, zero if nothing waits for time. A service
// that is forgotten first leaves the route table: it is Leaving until Advance. One in
// the middle of another change ends that first.
func (e *Engine) Expire(now time.Time) (next time.Time) {
	e.tick(now)
	if !e.synced {
		return time.Time{}
	}
	e.settle()
	earlier := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for s := range e.idle {
		if s.step == Leaving {
			continue
		}
		due := s.idleSince.Add(e.cfg.Retention)
		switch {
		case due.After(now):
			earlier(due)
		default:
			s.overdue = true
			e.unsettle(s)
		}
	}
	if died := e.graves.expire(now.Add(-e.cfg.Retention)); !died.IsZero() {
		earlier(died.Add(e.cfg.Retention))
	}
	return next
}

// Services yields the keys of the known services in ascending order: the order of the
// route table and of status. The Engine must not be changed meanwhile.
func (e *Engine) Services() iter.Seq[model.ServiceKey] {
	e.settle()
	if e.order == nil {
		for _, s := range e.services {
			if s.known {
				e.order = append(e.order, s)
			}
		}
		slices.SortFunc(e.order, func(a, b *service) int { return a.key.Compare(b.key) })
	}
	order := e.order
	return func(yield func(model.ServiceKey) bool) {
		for _, s := range order {
			if !yield(s.key) {
				return
			}
		}
	}
}

// tick moves the Engine's idea of now; it never goes back.
func (e *Engine) tick(now time.Time) {
	if now.After(e.now) {
		e.now = now
	}
}

// service returns the state of a service, new if it has none.
func (e *Engine) service(key model.ServiceKey) *service {
	s, ok := e.services[key]
	if !ok {
		s = &service{key: key, longName: key.Name + "." + key.Namespace + "." + e.cfg.Domain}
		if e.cfg.rank(key.Namespace) >= 0 {
			s.flatName = key.Name + "." + e.cfg.Domain
		}
		e.services[key] = s
	}
	return s
}

// setIdle keeps the list of idle services; whether one is, is part of its entry.
func (e *Engine) setIdle(s *service) {
	_, was := e.idle[s]
	is := s.known && len(s.records) == 0
	switch {
	case is && !was:
		e.idle[s] = struct{}{}
	case !is && was:
		delete(e.idle, s)
	default:
		return
	}
	e.note(s).Entry = true
}

func (e *Engine) unsettle(s *service) { e.unsettled[s] = struct{}{} }
