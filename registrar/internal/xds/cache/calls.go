package cache

// calls are functions to be called without the lock, in order, by a goroutine
// that exists while there are any. Guarded by Cache.mu.
type calls struct {
	// limit bounds how many wait; 0 is no limit. What is too much is dropped.
	limit   int
	queue   []func()
	running bool
}

// add queues f; the end of the critical section starts it.
func (q *calls) add(f func()) {
	if q.limit == 0 || len(q.queue) < q.limit {
		q.queue = append(q.queue, f)
	}
}

func (c *Cache) startLocked(q *calls) {
	if len(q.queue) > 0 && !q.running {
		q.running = true
		go c.call(q)
	}
}

func (c *Cache) call(q *calls) {
	for {
		c.mu.Lock()
		list := q.queue
		q.queue = nil
		q.running = len(list) > 0
		c.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, f := range list {
			f()
		}
	}
}
