package cache

import (
	"maps"
	"slices"
)

// Demand is what streams began and ceased to ask for since it was last taken.
type Demand struct {
	// Wanted are names that a stream subscribes to and that the cache does not
	// hold, each reported once. The consumer answers every one, with Batch.Set or
	// with Batch.Absent. WildcardCluster and Listener are never in it: what is not
	// held of them does not exist.
	Wanted []Key
	// Dropped are names that no stream subscribes to any more, held or not. A
	// consumer that keeps a resource only while it is asked for gives it to Evict.
	Dropped []Key
}

// demand collects Demand without bound but for the number of names: every name
// is in at most one of the sets. Guarded by Cache.mu.
type demand struct {
	wanted, dropped map[Key]struct{}
	ready           chan struct{}
}

func newDemand() demand {
	return demand{
		wanted:  make(map[Key]struct{}),
		dropped: make(map[Key]struct{}),
		ready:   make(chan struct{}, 1),
	}
}

func (d *demand) want(key Key) {
	d.wanted[key] = struct{}{}
	d.signal()
}

func (d *demand) drop(key Key) {
	delete(d.wanted, key)
	d.dropped[key] = struct{}{}
	d.signal()
}

// keep takes back a drop: somebody subscribes again.
func (d *demand) keep(key Key) { delete(d.dropped, key) }

// settle takes back a want that was answered before anybody took it.
func (d *demand) settle(key Key) { delete(d.wanted, key) }

func (d *demand) signal() {
	select {
	case d.ready <- struct{}{}:
	default:
	}
}

// DemandReady delivers a value when there may be something for TakeDemand, and
// when a stream opens or closes. It is for one consumer.
func (c *Cache) DemandReady() <-chan struct{} { return c.demand.ready }

// TakeDemand returns what was demanded and dropped since the last call, sorted.
// A name that was dropped and subscribed again in between is reported only if it
// needs an answer.
func (c *Cache) TakeDemand() Demand {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := Demand{
		Wanted:  slices.SortedFunc(maps.Keys(c.demand.wanted), Key.Compare),
		Dropped: slices.SortedFunc(maps.Keys(c.demand.dropped), Key.Compare),
	}
	clear(c.demand.wanted)
	clear(c.demand.dropped)
	return out
}

// Demanded returns the names of a kind that streams subscribe to, held or not,
// sorted.
func (c *Cache) Demanded(kind Kind) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for name, e := range c.entries[kind] {
		if e.named > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Evict forgets those of keys that no stream subscribes to by name, and returns
// them. Others stay: a stream may have asked again since Demand was taken, and
// must not lose what it was just given (XDS-D4). So do WildcardCluster and
// Listener, which are given unasked.
func (c *Cache) Evict(keys ...Key) (evicted []Key) {
	c.mu.Lock()
	defer c.unlock()
	c.seq++
	for _, key := range keys {
		if e := c.entries[key.Kind][key.Name]; key.Kind.whole() || (e != nil && e.named > 0) {
			continue
		}
		c.removeLocked(key)
		evicted = append(evicted, key)
	}
	return evicted
}

// Subscribed reports whether a stream subscribes to the key by name.
func (c *Cache) Subscribed(key Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[key.Kind][key.Name]
	return e != nil && e.named > 0
}
