package readiness

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// errStopped is the error of Watch after the end of Run.
var errStopped = errors.New("the readiness watcher has stopped")

// Table is the listen table of a network namespace; *listen.Table is one. Its
// methods do not wait. An open one keeps the namespace alive.
type Table interface {
	// Lookup returns the listeners that connections to 127.0.0.1 at the ports reach.
	Lookup(ports []uint16) (listen.Snapshot, error)
	// Read returns the whole table.
	Read() (listen.Snapshot, error)
	// Close lets the namespace go.
	Close() error
}

// Config is what a Watcher needs.
type Config struct {
	// Open opens the listen table of the namespace at a path.
	Open func(netns string) (Table, error)
	// Log takes what nobody is told otherwise.
	Log *slog.Logger
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer
}

// Watcher watches the listen tables of the pods of this node. Its methods are
// safe for concurrent use. Nothing is polled unless Run runs.
type Watcher struct {
	cfg     Config
	log     *slog.Logger
	metrics metrics
	// wake holds a token when the first pod of the queue has changed.
	wake chan struct{}
	// deliveries are the mailboxes' goroutines.
	deliveries sync.WaitGroup

	// mu guards the rest and some fields of the pods; it is never held across a
	// read or a callback. It may be taken before a pod's mu, never after.
	mu      sync.Mutex
	pods    map[model.AttachmentKey]*pod
	queue   queue
	stopped bool
}

// New returns a Watcher of no pods.
func New(cfg Config) (*Watcher, error) {
	if cfg.Open == nil || cfg.Log == nil {
		return nil, errors.New("readiness watcher: Open and Log must be set")
	}
	w := &Watcher{cfg: cfg, log: cfg.Log, wake: make(chan struct{}, 1), pods: map[model.AttachmentKey]*pod{}}
	if err := w.metrics.register(cfg.Metrics, w); err != nil {
		return nil, err
	}
	return w, nil
}

// Watch opens the pod's listen table and calls fn with its first state, at once,
// and then with every change, until Forget. Several changes that wait for fn are
// told as one. fn is never called twice at one time, nor with a lock held; a slow
// fn delays its own pod's notices and nothing else. It must not call Watch or
// Forget for its own key. An attachment that is watched already is watched anew.
// The error is that of opening the namespace.
func (w *Watcher) Watch(key model.AttachmentKey, spec Spec, fn func(State)) error {
	w.Forget(key)
	table, err := w.cfg.Open(spec.Netns)
	if err != nil {
		return fmt.Errorf("watch %s: %w", key, err)
	}
	p := newPod(key, spec, table, fn)
	w.mu.Lock()
	old, stopped := w.pods[key], w.stopped
	if !stopped {
		w.remove(old) // two Watch of one key at one time: the later one stays
		w.pods[key] = p
		heap.Push(&w.queue, p)
	}
	w.mu.Unlock()
	if stopped {
		p.close(w.log)
		return fmt.Errorf("watch %s: %w", key, errStopped)
	}
	w.end(old)
	w.poke()
	return nil
}

// Forget ends the watch and lets the namespace go. When it returns the pod's fn is
// not running and will not be called. A key that is not watched is no error.
func (w *Watcher) Forget(key model.AttachmentKey) {
	w.mu.Lock()
	p := w.pods[key]
	w.remove(p)
	w.mu.Unlock()
	w.end(p)
}

// Kick polls the pod now, and more often for a while: something has changed, or is
// about to. A key that is not watched is no error.
func (w *Watcher) Kick(key model.AttachmentKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, ok := w.pods[key]
	if !ok {
		return
	}
	p.kicked = true
	if p.index != notQueued {
		p.due = time.Now()
		heap.Fix(&w.queue, p.index)
		w.poke()
	}
}

// remove takes p, which may be nil, out of everything. The caller holds mu.
func (w *Watcher) remove(p *pod) {
	if p == nil {
		return
	}
	p.gone = true
	delete(w.pods, p.key)
	if p.index != notQueued {
		heap.Remove(&w.queue, p.index)
	}
}

// end closes a pod that was removed; p may be nil.
func (w *Watcher) end(p *pod) {
	if p == nil {
		return
	}
	p.close(w.log)
	p.box.close()
}

func (w *Watcher) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Run polls until ctx ends; then it forgets all pods and returns nil. It must be
// called once.
func (w *Watcher) Run(ctx context.Context) error {
	defer w.stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var rested time.Time // no poll before
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-w.wake:
		}
		begin := time.Now()
		if !begin.Before(rested) {
			for _, p := range w.takeDue(begin) {
				w.poll(p)
			}
			now := time.Now()
			rested = now.Add(restFactor * now.Sub(begin))
		}
		timer.Reset(time.Until(w.nextPoll(rested)))
	}
}

// takeDue takes the pods that are due out of the queue.
func (w *Watcher) takeDue(now time.Time) []*pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*pod
	for len(w.queue) > 0 && !w.queue[0].due.After(now) {
		out = append(out, heap.Pop(&w.queue).(*pod))
	}
	return out
}

// poll polls a pod that was taken out of the queue and puts it back.
func (w *Watcher) poll(p *pod) {
	w.mu.Lock()
	kicked, gone := p.kicked, p.gone
	p.kicked = false
	w.mu.Unlock()
	if gone {
		return
	}
	now := time.Now()
	if kicked {
		p.mu.Lock()
		p.schedule.changed(now)
		p.mu.Unlock()
	}
	news, next := p.poll(w, now)
	if news != nil {
		w.metrics.notices.Inc()
		p.box.put(*news, &w.deliveries)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.gone {
		return
	}
	p.due = next
	if p.kicked {
		p.due = now
	}
	heap.Push(&w.queue, p)
}

// nextPoll is when the first pod is due, but not before rested.
func (w *Watcher) nextPoll(rested time.Time) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := time.Now().Add(slowInterval)
	if len(w.queue) > 0 {
		next = w.queue[0].due
	}
	if next.Before(rested) {
		return rested
	}
	return next
}

// stop forgets all pods and waits for their callbacks.
func (w *Watcher) stop() {
	w.mu.Lock()
	w.stopped = true
	all := make([]*pod, 0, len(w.pods))
	for _, p := range w.pods {
		all = append(all, p)
	}
	for _, p := range all {
		w.remove(p)
	}
	w.mu.Unlock()
	for _, p := range all {
		w.end(p)
	}
	w.deliveries.Wait()
}
