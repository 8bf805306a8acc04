package spire

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// answer is the last that the agent said about one thing. It is safe for concurrent
// use; its zero value has nothing.
type answer[T any] struct {
	mu    sync.Mutex
	value T
	ok    bool
	// err is why there is nothing, or nothing new.
	err error
	// changed is closed when something is said; nil while nobody waits.
	changed chan struct{}
}

// set takes what the agent has.
func (a *answer[T]) set(v T) { a.say(func() { a.value, a.ok, a.err = v, true, nil }) }

// fail keeps what there is: the agent is away.
func (a *answer[T]) fail(err error) { a.say(func() { a.err = err }) }

// refuse drops what there is: the agent has nothing of the kind.
func (a *answer[T]) refuse(err error) {
	a.say(func() {
		var none T
		a.value, a.ok, a.err = none, false, err
	})
}

func (a *answer[T]) say(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// get returns the value, or why there is none, and what is closed when that changes.
func (a *answer[T]) get() (value T, ok bool, changed <-chan struct{}, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.changed == nil {
		a.changed = make(chan struct{})
	}
	return a.value, a.ok, a.changed, a.err
}

// await returns the value, waiting for the first one. A refusal counts from the time
// patient on; any other failure counts at once.
func (a *answer[T]) await(ctx context.Context, patient time.Time) (T, error) {
	timer := time.NewTimer(max(time.Until(patient), 0))
	defer timer.Stop()
	for {
		value, ok, changed, err := a.get()
		if ok {
			return value, nil
		}
		if err != nil && (!errors.Is(err, identity.ErrRefused) || !time.Now().Before(patient)) {
			return value, err
		}
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return value, errors.Join(err, ctx.Err())
		}
	}
}
