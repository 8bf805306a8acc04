package attach

import (
	"context"
	"fmt"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// keyLocks serialises the work on one attachment.
type keyLocks struct {
	mu    sync.Mutex
	locks map[model.AttachmentKey]*keyLock
}

type keyLock struct {
	ch    chan struct{}
	users int
}

// lock waits for the key or for ctx.
func (l *keyLocks) lock(ctx context.Context, key model.AttachmentKey) (unlock func(), err error) {
	l.mu.Lock()
	if l.locks == nil {
		l.locks = map[model.AttachmentKey]*keyLock{}
	}
	k, ok := l.locks[key]
	if !ok {
		k = &keyLock{ch: make(chan struct{}, 1)}
		l.locks[key] = k
	}
	k.users++
	l.mu.Unlock()

	done := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(l.locks, key)
		}
	}
	select {
	case k.ch <- struct{}{}:
		return func() { <-k.ch; done() }, nil
	case <-ctx.Done():
		done()
		return nil, &Error{Kind: NotReady, Err: fmt.Errorf("another request for attachment %s is still at work: %w", key, ctx.Err())}
	}
}
