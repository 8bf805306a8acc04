package installer

import "time"

const (
	// calmAfter is how long nobody must have undone our writes before they are
	// immediate again.
	calmAfter = time.Minute
	// freeStrikes are undone writes that are repaired at once, the last of them by an
	// owned list; each further write waits twice as long as the one before.
	freeStrikes = 3
	firstDelay  = time.Second
	maxDelay    = 30 * time.Second
	// maxLost is how often an owned list may be taken away before our entry goes
	// into the foreign file again: somebody allows no file but its own.
	maxLost = 2
)

// pace holds back repairs of what somebody else keeps undoing.
type pace struct {
	// strikes counts the undone writes since it was calm, last is the latest one.
	strikes int
	last    time.Time
	// lost counts the owned lists that somebody else took away.
	lost int
}

// delay is how long the next repair has to wait at now.
func (p *pace) delay(now time.Time) time.Duration {
	if p.strikes > 0 && now.Sub(p.last) >= calmAfter+p.backoff() {
		*p = pace{}
	}
	if p.strikes == 0 {
		return 0
	}
	return max(0, p.backoff()-now.Sub(p.last))
}

func (p *pace) backoff() time.Duration {
	over := p.strikes - freeStrikes
	switch {
	case over < 0:
		return 0
	case over >= 5: // 1 s << 5 is above the most
		return maxDelay
	default:
		return firstDelay << over
	}
}

// strike counts a repair that is made at now.
func (p *pace) strike(now time.Time) { p.strikes, p.last = p.strikes+1, now }

// contended reports whether an owned list should stand for a foreign one.
func (p *pace) contended() bool { return p.strikes >= freeStrikes-1 }

// refused reports whether owned lists are taken away again and again.
func (p *pace) refused() bool { return p.lost >= maxLost }
