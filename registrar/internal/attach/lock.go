package attach

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// keyLocks serialises the work on one attachment.
type keyLocks struct {
	mu    sync.Mutex
	locks map[model.AttachmentKey]*keyLock
}

// keyLock is one attachment's. keyLocks.mu guards its fields.
type keyLock struct {
	// ch is held by sending.
	ch    chan struct{}
	users int
	// removals counts who wants the lock to take the attachment away, or has it for that.
	removals int
	// yield ends the work of the holder when such a one comes; nil if it has to wait.
	yield context.CancelCauseFunc
}

// errRemoved is the cause for which work ended that yields.
var errRemoved = errors.New("the attachment is being taken away")

// lock waits for the key or for ctx.
func (l *keyLocks) lock(ctx context.Context, key model.AttachmentKey) (unlock func(), err error) {
	return l.acquire(ctx, key, l.enter(key, 0), 0)
}

// lockToRemove is lock for who takes the attachment away: what yields ends, and nothing of
// that kind begins before unlock.
func (l *keyLocks) lockToRemove(ctx context.Context, key model.AttachmentKey) (unlock func(), err error) {
	return l.acquire(ctx, key, l.enter(key, 1), 1)
}

// lockYielding is lock for work that nobody waits for: the context it gets ends when
// somebody comes to take the attachment away.
func (l *keyLocks) lockYielding(ctx context.Context, key model.AttachmentKey) (work context.Context, unlock func(), err error) {
	k := l.enter(key, 0)
	free, err := l.acquire(ctx, key, k, 0)
	if err != nil {
		return nil, nil, err
	}
	work, cancel := context.WithCancelCause(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.yield = cancel; k.removals > 0 {
		cancel(errRemoved)
	}
	return work, func() {
		l.mu.Lock()
		k.yield = nil
		l.mu.Unlock()
		cancel(nil)
		free()
	}, nil
}

// busy reports whether anybody has the key's lock or waits for it.
func (l *keyLocks) busy(key model.AttachmentKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.locks[key] != nil
}

// removed reports whether work that yields ended for that.
func removed(work context.Context) bool { return errors.Is(context.Cause(work), errRemoved) }

// enter finds the key's lock for one more who wants it.
func (l *keyLocks) enter(key model.AttachmentKey, removals int) *keyLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = map[model.AttachmentKey]*keyLock{}
	}
	k, ok := l.locks[key]
	if !ok {
		k = &keyLock{ch: make(chan struct{}, 1)}
		l.locks[key] = k
	}
	k.users++
	k.removals += removals
	if removals > 0 && k.yield != nil {
		k.yield(errRemoved)
	}
	return k
}

// leave is the reverse of enter.
func (l *keyLocks) leave(key model.AttachmentKey, k *keyLock, removals int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k.removals -= removals
	if k.users--; k.users == 0 {
		delete(l.locks, key)
	}
}

// acquire waits for the lock that was entered, or for ctx.
func (l *keyLocks) acquire(ctx context.Context, key model.AttachmentKey, k *keyLock, removals int) (unlock func(), err error) {
	select {
	case k.ch <- struct{}{}:
		return func() { <-k.ch; l.leave(key, k, removals) }, nil
	case <-ctx.Done():
		l.leave(key, k, removals)
		return nil, &Error{Kind: NotReady, Err: fmt.Errorf("another request for attachment %s is still at work: %w", key, ctx.Err())}
	}
}
