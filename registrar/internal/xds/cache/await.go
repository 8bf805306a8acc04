package cache

import (
	"cmp"
	"slices"
)

// Result is the outcome of an Await.
type Result struct {
	// Disconnected: no Envoy is connected that could acknowledge. Nothing else is
	// set then.
	Disconnected bool
	// Rejections are the awaited versions that a stream rejected.
	Rejections []Rejection
	// Unsubscribed are keys that no Envoy subscribes to, so that nobody had to
	// acknowledge them.
	Unsubscribed []Key
}

// Acknowledged reports that every Envoy that has to do with the keys has
// acknowledged all of them.
func (r *Result) Acknowledged() bool { return !r.Disconnected && len(r.Rejections) == 0 }

// Await calls fn once, when on every Envoy's stream that subscribes to them the keys, in
// the state that they have now or a later one, are acknowledged or rejected. A
// key that does not exist is acknowledged when its removal is. The acknowledgement
// of a load assignment is that of the copy that followed its cluster, so it
// proves the cluster active (dataplane decision 5).
//
// A key of WildcardCluster or Listener is awaited on the ADS stream of every
// Envoy, whether or not it has asked yet; other keys only where they are subscribed
// to. Clients that are no Envoys of this node are not waited for. With no Envoy
// connected, now or later, the result says so.
//
// fn runs in a goroutine of the cache, which calls one function after the other,
// and may call the cache. After cancel returned fn is not started any more,
// though it may be running.
func (c *Cache) Await(keys []Key, fn func(Result)) (cancel func()) {
	return c.await(keys, false, fn)
}

// AwaitSubscribed is Await, but waits on the ADS stream of every Envoy (for an
// OnDemandCluster: the on-demand stream) until it subscribes to all of keys.
// It is for what Envoy asks for by itself a moment later: the secrets of a
// listener that was just acknowledged (contract 4.2).
func (c *Cache) AwaitSubscribed(keys []Key, fn func(Result)) (cancel func()) {
	return c.await(keys, true, fn)
}

func (c *Cache) await(keys []Key, subscribed bool, fn func(Result)) (cancel func()) {
	c.mu.Lock()
	defer c.unlock()
	w := &waiter{fn: fn, subscribed: subscribed, targets: make([]target, 0, len(keys))}
	for _, key := range keys {
		t := target{key: key}
		if e := c.entries[key.Kind][key.Name]; e != nil {
			t.seq = e.seq
		}
		w.targets = append(w.targets, t)
	}
	c.waits.add(w)
	for _, key := range keys {
		if e := c.entries[key.Kind][key.Name]; e != nil {
			for _, v := range e.views {
				v.proveLocked()
			}
		}
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		w.done = true
		c.waits.remove(w)
	}
}

// waiter is one Await.
type waiter struct {
	id         uint64 // grows with every Await
	fn         func(Result)
	subscribed bool
	targets    []target
	queued     bool
	done       bool
}

// target is one key and the change that must be acknowledged at least.
type target struct {
	key Key
	seq uint64
}

// waits finds the waiters that a change concerns. Guarded by Cache.mu.
type waits struct {
	byKey map[Key][]*waiter
	all   map[*waiter]struct{}
	last  uint64 // the id of the newest
	// queue are waiters to be looked at before the critical section ends.
	queue []*waiter
}

func newWaits() waits {
	return waits{byKey: make(map[Key][]*waiter), all: make(map[*waiter]struct{})}
}

func (w *waits) add(x *waiter) {
	w.last++
	x.id = w.last
	w.all[x] = struct{}{}
	for i := range x.targets {
		w.byKey[x.targets[i].key] = append(w.byKey[x.targets[i].key], x)
	}
	w.push(x)
}

func (w *waits) remove(x *waiter) {
	delete(w.all, x)
	for i := range x.targets {
		key := x.targets[i].key
		list := slices.DeleteFunc(w.byKey[key], func(y *waiter) bool { return y == x })
		if len(list) == 0 {
			delete(w.byKey, key)
		} else {
			w.byKey[key] = list
		}
	}
}

func (w *waits) recheck(key Key) {
	if len(w.byKey) == 0 {
		return
	}
	for _, x := range w.byKey[key] {
		w.push(x)
	}
}

func (w *waits) recheckAll() {
	for x := range w.all {
		w.push(x)
	}
}

func (w *waits) push(x *waiter) {
	if !x.queued && !x.done {
		x.queued = true
		w.queue = append(w.queue, x)
	}
}

// resolveLocked looks at the waiters that something happened to and hands over
// those that are done, in the order in which they began to wait.
func (c *Cache) resolveLocked() {
	slices.SortFunc(c.waits.queue, func(a, b *waiter) int { return cmp.Compare(a.id, b.id) })
	for _, w := range c.waits.queue {
		w.queued = false
		if w.done {
			continue
		}
		result, done := c.outcomeLocked(w)
		if !done {
			continue
		}
		w.done = true
		c.waits.remove(w)
		c.results.add(func() { w.fn(result) })
	}
	clear(c.waits.queue)
	c.waits.queue = c.waits.queue[:0]
}

// outcomeLocked returns the result of w if nothing is outstanding.
func (c *Cache) outcomeLocked(w *waiter) (r Result, done bool) {
	if !c.envoyConnectedLocked() {
		return Result{Disconnected: true}, true
	}
	for _, t := range w.targets {
		acknowledging := 0
		for st := range c.streams[t.key.Kind.service()] {
			state, rejection := st.stateLocked(t, w.subscribed)
			switch state {
			case outstanding:
				return Result{}, false
			case rejected:
				r.Rejections = append(r.Rejections, *rejection)
				acknowledging++
			case acknowledged:
				acknowledging++
			case unsubscribed:
			}
		}
		switch {
		case acknowledging > 0:
		case w.subscribed || t.key.Kind.whole():
			return Result{Disconnected: true}, true
		default:
			r.Unsubscribed = append(r.Unsubscribed, t.key)
		}
	}
	slices.SortFunc(r.Rejections, Rejection.compare)
	return r, true
}

// envoyConnectedLocked reports whether there is a stream of an Envoy, or of who has
// not said yet.
func (c *Cache) envoyConnectedLocked() bool {
	for _, streams := range c.streams {
		for st := range streams {
			if st.envoyLocked() {
				return true
			}
		}
	}
	return false
}

// state is how far one stream is with one target.
type state uint8

const (
	outstanding state = iota
	acknowledged
	rejected
	unsubscribed
)

// stateLocked returns how far the stream is with t. An Envoy that has not asked
// for a kind which every Envoy holds will; with must, one that does not subscribe
// to the very key will as well.
func (st *Stream) stateLocked(t target, must bool) (state, *Rejection) {
	if st.silentLocked() || !st.envoyLocked() {
		return unsubscribed, nil
	}
	sub := st.subs[t.key.Kind]
	if sub == nil || !sub.started {
		if must || t.key.Kind.whole() {
			return outstanding, nil
		}
		return unsubscribed, nil
	}
	v := sub.views[t.key.Name]
	if v == nil {
		switch {
		case sub.wildcard && t.key.Kind.whole():
			return acknowledged, nil // it does not exist, and the client knows
		case must:
			return outstanding, nil
		}
		return unsubscribed, nil
	}
	need := max(t.seq, v.needSeq, firstSeq)
	switch {
	case v.ackedSeq >= need:
		return acknowledged, nil
	case v.rejectedSeq >= need && sub.rejections[t.key.Name] != nil:
		return rejected, sub.rejections[t.key.Name]
	}
	return outstanding, nil
}
