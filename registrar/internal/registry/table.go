package registry

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// maxWithdrawn is how many withdrawn UIDs have their generation remembered. A
// late update of a record comes within seconds; this many pods do not end on one
// machine in that time.
const maxWithdrawn = 1 << 14

// Table keeps records in memory and feeds watchers: the part of Backend that
// does not depend on storage. No method waits for a watcher or for anything else.
type Table struct {
	mu sync.Mutex // guards everything below and the inside of every watcher
	// records holds the Table's own copies, which nobody changes.
	records   map[string]model.Endpoint
	withdrawn withdrawals
	watchers  map[*watcher]struct{}
}

// NewTable returns an empty Table.
func NewTable() *Table {
	return &Table{
		records:   make(map[string]model.Endpoint),
		withdrawn: withdrawals{limit: maxWithdrawn, generation: make(map[string]uint64)},
		watchers:  make(map[*watcher]struct{}),
	}
}

// Upsert puts a copy of ep, as Backend.Publish says.
func (t *Table) Upsert(ep model.Endpoint) error {
	ep = ep.Clone()
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.records[ep.UID]; ok && old.Generation >= ep.Generation {
		return ErrStale
	}
	if t.withdrawn.cover(ep.UID, ep.Generation) {
		return ErrStale
	}
	t.records[ep.UID] = ep
	for w := range t.watchers {
		w.upserted(ep.UID)
	}
	return nil
}

// Delete takes a record away, as Backend.Withdraw says.
func (t *Table) Delete(uid string, generation uint64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, ok := t.records[uid]
	if ok && old.Generation > generation {
		return ErrStale
	}
	t.withdrawn.add(uid, generation)
	if !ok {
		return nil
	}
	delete(t.records, uid)
	for w := range t.watchers {
		w.deleted(uid, generation)
	}
	return nil
}

// Len returns how many records there are.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.records)
}

// Snapshot returns copies of all records, ordered by UID.
func (t *Table) Snapshot() []model.Endpoint {
	t.mu.Lock()
	list := slices.Collect(maps.Values(t.records))
	t.mu.Unlock()
	for i := range list {
		list[i] = list[i].Clone()
	}
	slices.SortFunc(list, func(a, b model.Endpoint) int { return cmp.Compare(a.UID, b.UID) })
	return list
}

// Watch delivers all records, Complete, and every change, as Backend.Watch says.
func (t *Table) Watch(ctx context.Context, sink func(Event)) error {
	w := t.join()
	defer t.leave(w)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if ev, ok := t.next(w); ok {
			// The table's own record must not get into other hands (MESH-23).
			ev.Endpoint = ev.Endpoint.Clone()
			sink(ev)
			continue
		}
		select {
		case <-ctx.Done():
		case <-w.wake:
		}
	}
}

// join adds a watcher that has every record of this moment before it, in the
// order of their UIDs. Doing both at once is what leaves no gap in which a change
// could be lost (MESH-29).
func (t *Table) join() *watcher {
	w := newWatcher()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(t.records)) {
		w.upserted(uid)
	}
	w.replayed()
	t.watchers[w] = struct{}{}
	return w
}

func (t *Table) leave(w *watcher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.watchers, w)
}

// next takes the next event of w, if there is one. Its Endpoint is the table's own.
func (t *Table) next(w *watcher) (Event, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c, ok := w.take()
	if !ok {
		return Event{}, false
	}
	if c.uid == "" {
		return Event{Kind: Complete}, true
	}
	if ep, ok := t.records[c.uid]; ok {
		w.known[c.uid] = struct{}{}
		return Event{Kind: Upsert, Endpoint: ep, UID: c.uid, Generation: ep.Generation}, true
	}
	delete(w.known, c.uid)
	return Event{Kind: Delete, UID: c.uid, Generation: c.generation}, true
}

// withdrawals remembers up to which generation a UID is withdrawn, for the UIDs
// that were first withdrawn last.
type withdrawals struct {
	limit      int
	generation map[string]uint64
	// order has the keys of generation, the oldest first, from head on.
	order []string
	head  int
}

// add remembers that uid is withdrawn up to generation.
func (s *withdrawals) add(uid string, generation uint64) {
	if old, ok := s.generation[uid]; ok {
		s.generation[uid] = max(old, generation)
		return
	}
	s.generation[uid] = generation
	s.order = append(s.order, uid)
	if len(s.generation) > s.limit {
		delete(s.generation, s.order[s.head])
		s.head++
	}
	if s.head > s.limit {
		s.order = slices.Clone(s.order[s.head:])
		s.head = 0
	}
}

// cover says whether a record of this generation stays withdrawn.
func (s *withdrawals) cover(uid string, generation uint64) bool {
	gone, ok := s.generation[uid]
	return ok && generation <= gone
}
