package cache

import (
	"log/slog"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
)

// defaultGateTimeout is how long a gate holds a resource at most.
const defaultGateTimeout = 2 * time.Second

// maxLogs bounds the log records that wait for a slow handler.
const maxLogs = 256

// firstSeq is the number of the state before the first change. What a view has
// acknowledged is smaller until it has acknowledged something.
const firstSeq = 1

// Clock tells the time and calls back; tests own it.
type Clock interface {
	// Now returns the present time.
	Now() time.Time
	// AfterFunc calls f in a goroutine of its own after d, unless stop is called
	// before.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

// Config is what a Cache needs.
type Config struct {
	// Logger gets rejections and gates that timed out. Nil discards them.
	Logger *slog.Logger
	// Clock; nil is the wall clock.
	Clock Clock
	// GateTimeout bounds how long a resource waits for the acknowledgement of what
	// must come before it; 0 is two seconds.
	GateTimeout time.Duration
	// NodeID is what this node's Envoys call their node, from their bootstrap; empty
	// takes every Envoy for the node's.
	NodeID string
}

// Batch is a set of changes that streams see together or not at all. Removals and
// absences are made before sets, so that a key in both ends up set.
type Batch struct {
	// Set holds resources to add or to replace. Equal content is no change.
	Set map[Kind][]Resource
	// Remove says of keys that they do not exist: streams that hold or asked for
	// one are told so.
	Remove []Key
	// Absent is the answer to demanded keys that there is nothing for. One that was
	// given since the demand was taken stays.
	Absent []Key
	// Resend names held resources to be sent again though unchanged, also after a
	// rejection (XDS-D7, XDS-R9).
	Resend []Key
}

// Cache holds the resources and the views of all streams. It starts held: no
// stream is answered before Release. Its methods are safe for concurrent use,
// never block on a peer, and call nothing of the caller's synchronously.
type Cache struct {
	log         *slog.Logger
	clock       Clock
	gateTimeout time.Duration
	nodeID      string

	// mu guards everything below and the state of every Stream of this cache. No
	// call that can block is made while it is held.
	mu sync.Mutex
	// seq counts changes. It orders a resource's content against acknowledgements.
	seq     uint64
	held    bool
	entries [numKinds]map[string]*entry
	// count is how many entries of a kind are held.
	count [numKinds]int
	// wildcards are the subscriptions to all resources of a kind.
	wildcards [numKinds]map[*subscription]struct{}
	streams   [numServices]map[*Stream]struct{}
	// lastStream is the number of the newest stream.
	lastStream uint64
	// pairing changes whenever a stream opens, is identified or closes.
	pairing uint64
	// touched are the streams that may have something to send.
	touched [numServices][]*Stream

	demand   demand
	waits    waits
	counters [numKinds]Counters
	// results are the awaits that are done; logs are log records, whose handler may
	// block on a file.
	results calls
	logs    calls
	scratch []*view
}

// entry is what the cache knows of one key. It exists while the key is held or
// while a stream has a view of it.
type entry struct {
	key Key
	// wire is what is sent: nil if the key is not held and has no stand-in.
	wire *discoveryv3.Resource
	// absent: the consumer said that the key does not exist.
	absent bool
	// asked: reported as wanted, and neither answered nor dropped since.
	asked bool
	// seq is when the content last changed or was touched.
	seq uint64
	// named counts the views that subscribe by name.
	named int
	// views are all streams' views, in no order; each knows its position.
	views []*view
}

// held reports whether the consumer gave a resource for the key.
func (e *entry) held() bool { return e.wire != nil && !e.absent }

// Versions that no resource has.
const (
	// versionUnknown: nothing is known or said yet.
	versionUnknown = ""
	// versionGone: does not exist.
	versionGone = "-"
	// versionUnsure: sent and rejected together with others; the client may or may
	// not have it (XDS-R10).
	versionUnsure = "?"
)

// want returns the version that every subscriber should have.
func (e *entry) want() string {
	switch {
	case e.wire != nil:
		return e.wire.GetVersion()
	case e.absent || e.key.Kind.whole():
		return versionGone
	default:
		return versionUnknown
	}
}

// New returns an empty, held cache.
func New(cfg Config) *Cache {
	c := &Cache{
		log:         cfg.Logger,
		clock:       cfg.Clock,
		gateTimeout: cfg.GateTimeout,
		nodeID:      cfg.NodeID,
		seq:         firstSeq,
		held:        true,
		demand:      newDemand(),
		waits:       newWaits(),
		logs:        calls{limit: maxLogs},
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.clock == nil {
		c.clock = wallClock{}
	}
	if c.gateTimeout == 0 {
		c.gateTimeout = defaultGateTimeout
	}
	for k := range numKinds {
		c.entries[k] = make(map[string]*entry)
		c.wildcards[k] = make(map[*subscription]struct{})
	}
	for s := range numServices {
		c.streams[s] = make(map[*Stream]struct{})
	}
	return c
}

// Hold stops all answers until Release: what is known is not complete any more
// (XDS-R21). Requests and acknowledgements are still taken.
func (c *Cache) Hold() {
	c.mu.Lock()
	defer c.unlock()
	c.held = true
}

// Release lets streams be answered: the content is complete.
func (c *Cache) Release() {
	c.mu.Lock()
	defer c.unlock()
	c.held = false
	for s := range numServices {
		for st := range c.streams[s] {
			st.touch()
		}
	}
}

// Apply makes the changes of b and wakes the streams that are concerned. It
// costs what changed and who subscribes to it.
func (c *Cache) Apply(b Batch) {
	c.mu.Lock()
	defer c.unlock()
	c.seq++
	for _, key := range b.Remove {
		c.removeLocked(key)
	}
	for _, key := range b.Absent {
		if e := c.entries[key.Kind][key.Name]; e != nil && !e.held() {
			c.removeLocked(key)
		}
	}
	for kind, list := range b.Set {
		for i := range list {
			c.setLocked(Key{Kind: kind, Name: list[i].Name}, &list[i])
		}
	}
	for _, key := range b.Resend {
		c.resendLocked(key)
	}
}

func (c *Cache) setLocked(key Key, r *Resource) {
	e := c.entryLocked(key)
	if !e.held() {
		c.count[key.Kind]++
	}
	e.absent = false
	if e.wire != nil && e.wire.GetVersion() == r.Version {
		return // unchanged, or the stand-in became the real thing
	}
	e.wire = &discoveryv3.Resource{Name: r.Name, Version: r.Version, Resource: r.Body}
	c.changedLocked(e)
}

func (c *Cache) removeLocked(key Key) {
	e := c.entries[key.Kind][key.Name]
	if e == nil || e.absent {
		return
	}
	if e.held() {
		c.count[key.Kind]--
	}
	e.wire = nil
	if key.Kind == Endpoints && len(e.views) > 0 {
		if r, ok := emptyAssignment(key.Name); ok {
			e.wire = &discoveryv3.Resource{Name: r.Name, Version: r.Version, Resource: r.Body}
		}
	}
	e.absent = true
	c.changedLocked(e)
	c.reapLocked(e)
}

func (c *Cache) resendLocked(key Key) {
	e := c.entries[key.Kind][key.Name]
	if e == nil || e.wire == nil {
		return
	}
	for _, v := range e.views {
		v.force()
	}
	c.changedLocked(e)
}

// changedLocked records that e has new content and wakes who is concerned.
func (c *Cache) changedLocked(e *entry) {
	e.seq = c.seq
	c.demand.settle(e.key)
	if e.wire != nil {
		for sub := range c.wildcards[e.key.Kind] {
			sub.viewLocked(e)
		}
	}
	for _, v := range e.views {
		v.markDirty()
	}
}

// entryLocked returns the entry of key, made if there is none.
func (c *Cache) entryLocked(key Key) *entry {
	e := c.entries[key.Kind][key.Name]
	if e == nil {
		e = &entry{key: key}
		c.entries[key.Kind][key.Name] = e
	}
	return e
}

// reapLocked forgets an entry that is neither held nor looked at, so that names
// which nobody has any more cost nothing (I9).
func (c *Cache) reapLocked(e *entry) {
	if !e.held() && len(e.views) == 0 {
		delete(c.entries[e.key.Kind], e.key.Name)
	}
}

// unlock sends what can be sent, resolves what was awaited and ends the critical
// section. It pairs with mu.Lock in every method that changes something.
func (c *Cache) unlock() {
	c.flushLocked()
	c.resolveLocked()
	c.startLocked(&c.results)
	c.startLocked(&c.logs)
	c.mu.Unlock()
}

// flushLocked gives every touched stream the chance to send. On-demand streams
// come first: what they find settled opens gates of the others.
func (c *Cache) flushLocked() {
	if c.held {
		return
	}
	for len(c.touched[OnDemand])+len(c.touched[ADS]) > 0 {
		list := &c.touched[OnDemand]
		if len(*list) == 0 {
			list = &c.touched[ADS]
		}
		n := len(*list)
		st := (*list)[n-1]
		(*list)[n-1] = nil
		*list = (*list)[:n-1]
		st.flushLocked()
		st.touched = false // a stream's flush takes in what it touches itself
	}
}

// wallClock is the Clock of production.
type wallClock struct{}

// Now implements Clock.
func (wallClock) Now() time.Time { return time.Now() }

// AfterFunc implements Clock.
func (wallClock) AfterFunc(d time.Duration, f func()) func() bool {
	return time.AfterFunc(d, f).Stop
}
