package readiness

import "sync"

// mailbox hands the newest state to one callback, one call at a time, on a
// goroutine that lives only while there is something to hand over. A state that
// waits is replaced by a newer one, and one that equals what was told last is not
// told.
type mailbox struct {
	fn func(State)

	// mu guards the rest.
	mu      sync.Mutex
	waiting *State
	told    *State
	// idle is closed while no goroutine delivers.
	idle   chan struct{}
	closed bool
}

func newMailbox(fn func(State)) *mailbox {
	idle := make(chan struct{})
	close(idle)
	return &mailbox{fn: fn, idle: idle}
}

// put tells s unless it is old news. It never waits.
func (b *mailbox) put(s State, wg *sync.WaitGroup) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	b.waiting = &s
	select {
	case <-b.idle:
		b.idle = make(chan struct{})
		wg.Go(b.deliver)
	default: // the goroutine that delivers takes it
	}
}

func (b *mailbox) deliver() {
	for {
		s, ok := b.take()
		if !ok {
			return
		}
		b.fn(s)
	}
}

// take returns what to tell next; without anything it marks the mailbox as idle.
func (b *mailbox) take() (State, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.waiting
	b.waiting = nil
	if b.closed || s == nil || b.told != nil && b.told.Equal(*s) {
		close(b.idle)
		return State{}, false
	}
	b.told = s
	return *s, true
}

// close ends the deliveries: when it returns none is running, and none will.
func (b *mailbox) close() {
	b.mu.Lock()
	b.closed, b.waiting = true, nil
	idle := b.idle
	b.mu.Unlock()
	<-idle
}
