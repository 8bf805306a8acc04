package readiness

import "time"

const (
	// A pod that was just added is polled every eagerInterval for eagerTime: ADD waits for
	// the mesh's listeners, which come within about 10 ms, and many ADDs at once must not
	// take the processor for it from what they wait for. A look takes 20-50 us.
	eagerInterval = 2 * time.Millisecond
	eagerTime     = 100 * time.Millisecond
	// Then every fastInterval for fastTime: apps start.
	fastInterval = 10 * time.Millisecond
	fastTime     = 2 * time.Second
	// Then, and for as long after each change, every warmInterval: apps start and
	// restart within seconds.
	warmInterval = 100 * time.Millisecond
	warmTime     = 30 * time.Second
	// A quiet pod every slowInterval: the time for which callers may meet an app
	// that crashed. 200 quiet pods cost less than 1 % of a core.
	slowInterval = 500 * time.Millisecond

	// restFactor is how many times as long as it worked the poller then rests: it
	// never takes more than a quarter of a core, however many pods are fast.
	restFactor = 3
	// costFactor bounds the share of one pod whose table is expensive to read: 5 %
	// of a core, whatever it listens on.
	costFactor = 20
)

// schedule says when a pod is polled next.
type schedule struct {
	eagerUntil, fastUntil, warmUntil time.Time
}

func newSchedule(now time.Time) schedule {
	return schedule{eagerUntil: now.Add(eagerTime), fastUntil: now.Add(fastTime), warmUntil: now.Add(warmTime)}
}

// changed keeps the pod warm for a while.
func (s *schedule) changed(now time.Time) { s.warmUntil = now.Add(warmTime) }

// next is the time of the next poll after one at now that took cost.
func (s *schedule) next(now time.Time, cost time.Duration) time.Time {
	interval := slowInterval
	switch {
	case now.Before(s.eagerUntil):
		interval = eagerInterval
	case now.Before(s.fastUntil):
		interval = fastInterval
	case now.Before(s.warmUntil):
		interval = warmInterval
	}
	return now.Add(max(interval, costFactor*cost))
}

// queue is a heap of pods, the one due first on top (container/heap). Guarded by
// Watcher.mu.
type queue []*pod

// Len implements heap.Interface.
func (q queue) Len() int { return len(q) }

// Less implements heap.Interface.
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }

// Swap implements heap.Interface.
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	p := x.(*pod)
	p.index = len(*q)
	*q = append(*q, p)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	p := old[len(old)-1]
	old[len(old)-1] = nil
	p.index = notQueued
	*q = old[:len(old)-1]
	return p
}
