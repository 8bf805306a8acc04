package forward

import "sync"

const (
	// DefaultOwn is how many look-ups of a pod may wait for a resolver at once
	// whatever the others do.
	DefaultOwn = 16
	// DefaultMost is how many of one pod may wait at once.
	DefaultMost = 256
	// DefaultShared is how many of all pods may wait beyond their own.
	DefaultShared = 2048
)

// Limits bound the look-ups that wait for a resolver at the same time.
type Limits struct {
	// Own belongs to each pod and is never lent: a flood elsewhere cannot starve it (I9).
	Own int
	// Most bounds one pod.
	Most int
	// Shared bounds what all pods use beyond Own.
	Shared int
}

// DefaultLimits returns the limits of production.
func DefaultLimits() Limits {
	return Limits{Own: DefaultOwn, Most: DefaultMost, Shared: DefaultShared}
}

// Limiter shares out the right to wait for a resolver.
type Limiter struct {
	limits Limits
	mu     sync.Mutex
	// shared is what is used beyond each pod's own.
	shared int
	// inFlight is what is used in all.
	inFlight int
}

// NewLimiter returns a limiter of which nothing is used.
func NewLimiter(limits Limits) *Limiter { return &Limiter{limits: limits} }

// InFlight returns how many look-ups wait now.
func (l *Limiter) InFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inFlight
}

// Share is the part of one pod. Create one with Limiter.Share.
type Share struct {
	limiter *Limiter
	// used is guarded by limiter.mu.
	used int
}

// Share returns a part of which nothing is used.
func (l *Limiter) Share() *Share { return &Share{limiter: l} }

// TryAcquire takes the right for one look-up, or says false at once. A look-up
// that may run calls Release when it is done.
func (s *Share) TryAcquire() bool {
	l := s.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.used >= l.limits.Own {
		if s.used >= l.limits.Most || l.shared >= l.limits.Shared {
			return false
		}
		l.shared++
	}
	s.used++
	l.inFlight++
	return true
}

// Release gives back what TryAcquire took.
func (s *Share) Release() {
	l := s.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	s.used--
	l.inFlight--
	if s.used >= l.limits.Own {
		l.shared--
	}
}

// InUse returns how many look-ups of this pod wait now.
func (s *Share) InUse() int {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	return s.used
}
