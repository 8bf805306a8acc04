package identity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// bundleInterval is how often the signer's bundle is looked at. It also bounds
	// every sleep: a machine that was suspended, or whose clock was set, must not
	// sleep past half-life.
	bundleInterval = time.Minute
	// renewPause is the least time between two renewals of one SVID, less for an SVID
	// that does not live that long: pauseShare of what it has left, but shortestPause.
	renewPause    = 30 * time.Second
	pauseShare    = 8
	shortestPause = time.Second
	// The pause after a failed renewal doubles from firstRetry to lastRetry.
	firstRetry = time.Second
	lastRetry  = time.Minute
	// With so many failures in a row the signer counts as away: it is then asked for
	// one identity at a time, with a pause, until it answers.
	maxFailuresInRow = 8
)

// renewLoop renews what is due until ctx ends.
func (m *Manager) renewLoop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var bundleAt time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-m.wake:
		}
		now := m.cfg.Clock()
		if m.newRoots.Swap(false) || reached(bundleAt, now, bundleInterval) {
			bundleAt = now.Add(bundleInterval)
			if _, err := m.refreshBundle(ctx); err != nil && ctx.Err() == nil {
				m.cfg.Log.Warn("cannot look at the signer's roots; the known ones stay", "error", err)
				bundleAt = now.Add(firstRetry * 5)
			}
		}
		m.dropLingering()
		if !m.isAway() {
			m.renewDue(ctx)
		}
		timer.Reset(m.sleep(bundleAt))
	}
}

// sleep is the time until something is due, not before the end of a pause.
func (m *Manager) sleep(bundleAt time.Time) time.Duration {
	now := m.cfg.Clock()
	m.mu.Lock()
	defer m.mu.Unlock()
	next := bundleAt
	for _, e := range m.entries {
		var t time.Time
		switch {
		case e.lingers():
			t = e.lingersUntil
		case e.issued():
			t = e.renewAt(now)
		default:
			continue
		}
		if t.Before(next) {
			next = t
		}
	}
	if next.Before(m.away.until) {
		next = m.away.until
	}
	d := min(max(next.Sub(now), 0), bundleInterval)
	m.wakeAt = now.Add(d)
	return d
}

// dropLingering forgets what has lingered.
func (m *Manager) dropLingering() {
	now := m.cfg.Clock()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.entries {
		if e.lingers() && reached(e.lingersUntil, now, m.cfg.Linger) {
			m.dropLocked(e)
		}
	}
}

// outage is what is known about a source that does not answer. Until it is looked for
// again nothing is renewed, and no Ensure waits for it that has a stored SVID.
type outage struct {
	inRow int
	until time.Time // end of the pause
}

// isAway reports whether the source is taken not to answer.
func (m *Manager) isAway() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !reached(m.away.until, m.cfg.Clock(), lastRetry)
}

// noteAnswer takes what came of asking the source. After a failure it counts as away for
// pause, after many in a row for longer; who asked before that has no news.
func (m *Manager) noteAnswer(err error, pause time.Duration) {
	now := m.cfg.Clock()
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case err == nil || errors.Is(err, ErrRefused):
		m.away = outage{}
	case reached(m.away.until, now, lastRetry):
		if m.away.inRow++; m.away.inRow >= maxFailuresInRow {
			pause = max(pause, backOff(m.away.inRow-maxFailuresInRow+1))
		}
		m.away.until = now.Add(pause)
	}
}

// backOff is the pause after so many failures in a row.
func backOff(failures int) time.Duration {
	return min(firstRetry<<min(failures-1, 10), lastRetry)
}

// renewDue renews what is due, the most urgent first, until the signer seems to
// be away.
func (m *Manager) renewDue(ctx context.Context) {
	var failed int
	var last error
	for _, e := range m.due() {
		err := m.renew(ctx, e)
		if stopping(ctx) {
			return
		}
		if err != nil {
			failed, last = failed+1, err
		}
		if m.noteAnswer(err, 0); m.isAway() {
			break
		}
	}
	if failed > 0 {
		m.cfg.Log.Warn("certificates cannot be renewed; the old ones stay in use until they expire", "failed", failed, "soonest_expiry", m.soonestExpiry(), "error", last)
	}
}

// pauseAfter is how long no other SVID is asked for after this one. A signer whose
// clock is far from ours must not be asked without a pause, and one whose SVIDs
// live shortly must be asked in time.
func pauseAfter(s SVID, now time.Time) time.Duration {
	return min(renewPause, max(shortestPause, s.NotAfter.Sub(now)/pauseShare))
}

// stopping reports whether Run is about to end.
func stopping(ctx context.Context) bool { return ctx.Err() != nil }

// due returns the entries to renew by now, the soonest expiry first.
func (m *Manager) due() []*entry {
	now := m.cfg.Clock()
	type item struct {
		e        *entry
		notAfter time.Time
	}
	var list []item
	m.mu.Lock()
	for _, e := range m.entries {
		if e.issued() && !e.lingers() && !now.Before(e.renewAt(now)) {
			list = append(list, item{e, e.svid.NotAfter})
		}
	}
	m.mu.Unlock()
	slices.SortFunc(list, func(a, b item) int { return a.notAfter.Compare(b.notAfter) })
	out := make([]*entry, len(list))
	for i, it := range list {
		out[i] = it.e
	}
	return out
}

// renew replaces the SVID of an entry; when it fails the old one stays.
func (m *Manager) renew(ctx context.Context, e *entry) error {
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	default:
		return nil // somebody else is at it
	}
	if !m.inUse(e.id, e) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	s, err := m.issue(ctx, e)
	if err != nil {
		now := m.cfg.Clock()
		m.mu.Lock()
		e.failures++
		if !e.fresh {
			e.retryAt = now.Add(backOff(e.failures))
		}
		e.fresh = e.pushed // not taken yet
		m.mu.Unlock()
		return fmt.Errorf("renew %s: %w", e.id.SPIFFE(), err)
	}
	if m.holds(e, s) {
		return nil // nothing new after all
	}
	m.persist(e, s)
	m.install(e, s)
	return nil
}

// holds reports whether s, which is sound, is what the entry has.
func (m *Manager) holds(e *entry, s SVID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !bytes.Equal(e.svid.ChainPEM, s.ChainPEM) {
		return false
	}
	e.untrusted, e.failures, e.retryAt = !m.bundle.contains(s.verifiedBy), 0, m.cfg.Clock().Add(shortestPause)
	return true
}

// soonestExpiry is the earliest NotAfter of all SVIDs in use, zero when there is none.
func (m *Manager) soonestExpiry() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out time.Time
	for _, e := range m.entries {
		if t := e.svid.NotAfter; !e.lingers() && !t.IsZero() && (out.IsZero() || t.Before(out)) {
			out = t
		}
	}
	return out
}

// ensureBundle returns the bundle, fetching the first one.
func (m *Manager) ensureBundle(ctx context.Context) (Bundle, error) {
	if b := m.Bundle(); len(b.Roots) > 0 {
		return b, nil
	}
	return m.refreshBundle(ctx)
}

// refreshBundle takes the signer's bundle over, one caller at a time, so that an
// older one never replaces a newer one. An empty bundle is an error, and the known
// one stays.
func (m *Manager) refreshBundle(ctx context.Context) (Bundle, error) {
	select {
	case m.fetching <- struct{}{}:
		defer func() { <-m.fetching }()
	case <-ctx.Done():
		return Bundle{}, fmt.Errorf("roots of the trust domain: %w", ctx.Err())
	}
	ctx, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	got, err := m.source.Bundle(ctx)
	if err == nil && len(got.Roots) == 0 {
		err = errors.New("the signer has none")
	}
	if err != nil {
		return Bundle{}, fmt.Errorf("roots of the trust domain: %w", err)
	}
	got = NewBundle(got.TrustDomain, got.Roots)
	old := m.Bundle()
	if old.Equal(got) {
		return got, nil
	}
	m.mu.Lock()
	m.bundle = got
	m.mu.Unlock()
	m.out.putBundle(func() {
		if m.cfg.OnBundle != nil {
			m.cfg.OnBundle(got)
		}
	})
	if !got.contains(old) {
		m.distrust(got)
	}
	return got, nil
}

// distrust makes every SVID due that the bundle does not trust. A root goes once
// in years, so the chains are parsed again and not kept.
func (m *Manager) distrust(bundle Bundle) {
	m.mu.Lock()
	held := make(map[*entry]SVID, len(m.entries))
	for _, e := range m.entries {
		if e.issued() {
			held[e] = e.svid
		}
	}
	m.mu.Unlock()
	now := m.cfg.Clock()
	for e, s := range held {
		chain, err := decodeChain(s.ChainPEM)
		if err == nil && verifyChain(e.id, chain, bundle, now) == nil {
			continue
		}
		m.mu.Lock()
		if e.svid.NotAfter.Equal(s.NotAfter) && bytes.Equal(e.svid.ChainPEM, s.ChainPEM) {
			e.untrusted, e.retryAt = true, now
		}
		m.mu.Unlock()
	}
	m.poke()
}

// poke makes Run look at what is due.
func (m *Manager) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}
