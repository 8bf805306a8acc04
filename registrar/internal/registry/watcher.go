package registry

import "container/list"

// watcher is what one Watch has still to deliver. Only UIDs wait in it, never
// records: when one is taken, the table says what there is now. So it delivers
// nothing outdated, and it is bounded by the records that there are and those that
// its sink was told of, however long the sink blocks (XDS-R12).
//
// The table's mutex guards everything but wake.
type watcher struct {
	// wake has a token when there may be something to take.
	wake chan struct{}
	// queue holds *change values in the order in which their UIDs first changed
	// since they were last taken.
	queue *list.List
	// waiting finds the queued change of a UID.
	waiting map[string]*list.Element
	// known are the UIDs that the sink has a record of, once it has got what was
	// taken so far.
	known map[string]struct{}
}

// change is one entry of a queue; an empty uid is the marker of Complete.
type change struct {
	uid string
	// generation of the last withdrawal; it counts only while there is no record.
	generation uint64
}

func newWatcher() *watcher {
	return &watcher{
		wake:    make(chan struct{}, 1),
		queue:   list.New(),
		waiting: make(map[string]*list.Element),
		known:   make(map[string]struct{}),
	}
}

// upserted notes that there is a new record of uid.
func (w *watcher) upserted(uid string) {
	if w.waiting[uid] == nil {
		w.push(&change{uid: uid})
	}
}

// deleted notes that the record of uid is gone. A sink that was never told of it
// is spared both, which is what bounds the queue.
func (w *watcher) deleted(uid string, generation uint64) {
	element := w.waiting[uid]
	_, known := w.known[uid]
	switch {
	case !known && element != nil:
		w.queue.Remove(element)
		delete(w.waiting, uid)
	case !known:
	case element != nil:
		element.Value.(*change).generation = generation
	default:
		w.push(&change{uid: uid, generation: generation})
	}
}

// replayed puts the marker of Complete behind everything that waits now.
func (w *watcher) replayed() { w.push(&change{}) }

func (w *watcher) push(c *change) {
	element := w.queue.PushBack(c)
	if c.uid != "" {
		w.waiting[c.uid] = element
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// take removes the first change, if there is one.
func (w *watcher) take() (change, bool) {
	front := w.queue.Front()
	if front == nil {
		return change{}, false
	}
	c := *w.queue.Remove(front).(*change)
	delete(w.waiting, c.uid)
	return c, true
}
