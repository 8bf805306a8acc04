package readiness

import "time"

const (
	// firstHold is how long a port must stay after its second loss in a row before
	// it is told again; it doubles with each further loss, up to lastHold.
	firstHold = time.Second
	lastHold  = 8 * time.Second
	// forgiveAfter is how long a port must have stayed for its losses to be
	// forgotten.
	forgiveAfter = 30 * time.Second
)

// damper turns what is seen of one port into what is told. A loss is told at once,
// a return after the hold: a port that flaps stays away until it has calmed down,
// and the number of changes told is bounded (XDS-55).
type damper struct {
	seen  bool
	since time.Time // when seen last turned true
	told  bool
	// losses in a row, none of them followed by a calm time.
	losses int
}

// update takes what is seen now and returns what to tell.
func (d *damper) update(there bool, now time.Time) bool {
	switch {
	case there && !d.seen:
		d.since = now
	case !there && d.seen:
		if now.Sub(d.since) >= forgiveAfter {
			d.losses = 0
		}
		d.losses++
	}
	d.seen = there
	switch {
	case !there:
		d.told = false
	case now.Sub(d.since) >= d.hold():
		d.told = true
	}
	return d.told
}

// hold is how long the port must stay to be told. The first return is free: an app
// that was restarted once is not made to wait.
func (d *damper) hold() time.Duration {
	if d.losses < 2 {
		return 0
	}
	return min(firstHold<<min(d.losses-2, 10), lastHold)
}
