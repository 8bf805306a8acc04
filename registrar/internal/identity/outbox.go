package identity

import (
	"context"
	"errors"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// errStopped is what waiting for a delivery ends with when Run has ended.
var errStopped = errors.New("the identity manager has stopped")

// outbox delivers notices one at a time: the bundle before anything else, then
// SVIDs and releases in the order of their first mention. A notice that is still
// waiting is replaced by a newer one of the same identity, so that its length is
// bounded by the number of identities. Its users may hold their own locks while
// they put.
type outbox struct {
	// wake holds at most one token: there is something to deliver.
	wake chan struct{}

	// mu guards the rest.
	mu     sync.Mutex
	bundle func()   // waiting, or nil
	order  []notice // waiting; order[i] has ticket taken+i+1
	// tickets of the identities in order.
	tickets map[model.Identity]uint64
	// taken is the number of notices taken out of order so far, done of those that
	// were delivered.
	taken, done uint64
	// progress is closed and replaced when done grows or run ends.
	progress chan struct{}
	stopped  bool
}

// notice is one callback about an identity.
type notice struct {
	id   model.Identity
	call func()
}

func newOutbox() *outbox {
	return &outbox{wake: make(chan struct{}, 1), tickets: map[model.Identity]uint64{}, progress: make(chan struct{})}
}

// putBundle queues a call ahead of all others.
func (o *outbox) putBundle(call func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.bundle = call
	o.signal()
}

// put queues a call about id and returns the ticket to wait for.
func (o *outbox) put(id model.Identity, call func()) uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.signal()
	if t, ok := o.tickets[id]; ok {
		o.order[t-o.taken-1].call = call
		return t
	}
	o.order = append(o.order, notice{id, call})
	t := o.taken + uint64(len(o.order))
	o.tickets[id] = t
	return t
}

func (o *outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take removes what is to be delivered next.
func (o *outbox) take() (call func(), ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if call = o.bundle; call != nil {
		o.bundle = nil
		return call, true
	}
	if len(o.order) == 0 {
		o.order = nil // let the array of a burst go
		return nil, false
	}
	n := o.order[0]
	o.order[0] = notice{}
	o.order = o.order[1:]
	delete(o.tickets, n.id)
	o.taken++
	return n.call, true
}

// report tells those who wait that everything taken was delivered, or that
// nothing will be any more.
func (o *outbox) report(stopped bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = stopped
	if !stopped {
		o.done = o.taken
	}
	close(o.progress)
	o.progress = make(chan struct{})
}

// run delivers until ctx ends.
func (o *outbox) run(ctx context.Context) {
	defer o.report(true)
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		}
		for ctx.Err() == nil {
			call, ok := o.take()
			if !ok {
				break
			}
			call()
			o.report(false)
		}
	}
}

// wait returns once the notice of ticket, or the one that replaced it, was
// delivered.
func (o *outbox) wait(ctx context.Context, ticket uint64) error {
	for {
		o.mu.Lock()
		done, stopped, progress := o.done >= ticket, o.stopped, o.progress
		o.mu.Unlock()
		if done {
			return nil
		}
		if stopped {
			return errStopped
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
