package identity

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// signTimeout bounds one call of the source for a renewal; a first certificate
	// is bounded by the caller of Ensure.
	signTimeout = 10 * time.Second
	// storedPatience is how long a new certificate is waited for when a stored one is
	// still valid: a registrar that starts while nobody signs serves with that one.
	storedPatience = 2 * time.Second
	// maxSigning bounds the calls of the source at one time.
	maxSigning = 16
)

// ManagerConfig is what a Manager needs.
type ManagerConfig struct {
	// Source gives the certificates; nil when Signer is set.
	Source Source
	// Signer certifies keys that are made here; nil when Source is set.
	Signer Signer
	// Node is the name of this node, for the signer.
	Node string
	// Store keeps SVIDs over a restart; nil keeps them in memory only.
	Store Store
	// Linger is how long an SVID stays in memory after its last user: a pod that is
	// replaced, and the next one of a job, have it at once, and Envoy is sent no other. 0
	// keeps none.
	Linger time.Duration
	// Clock is the wall clock; nil is time.Now.
	Clock Clock
	// Log takes what nobody is told otherwise.
	Log *slog.Logger
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer

	// OnBundle is called with the first bundle and with every change of it, before
	// the SVIDs that need it. OnUpdate is called with every new SVID, OnRelease
	// when an identity is no longer in use. Each may be nil. They are called one at
	// a time, in order, without a lock held; of several changes of one identity that
	// wait, only the last is told. They must return soon and must not call Ensure.
	OnBundle  func(Bundle)
	OnUpdate  func(SVID)
	OnRelease func(model.Identity)
}

// Manager holds one SVID for each identity in use on this node, and those that linger.
// Its methods are safe for concurrent use. Nothing is delivered or renewed unless Run runs.
type Manager struct {
	cfg    ManagerConfig
	source Source
	// pusher is source if that renews by itself, or nil.
	pusher  Pusher
	out     *outbox
	metrics metrics
	// signing has a token for each call of the signer under way.
	signing chan struct{}
	// fetching has a token while the bundle is fetched.
	fetching chan struct{}
	// wake tells Run that something is due earlier than it knew.
	wake chan struct{}
	// newRoots: the pusher has other roots than Run knows.
	newRoots atomic.Bool

	// storeMu makes "is it still in use" and the store's change one step. It is
	// taken before mu.
	storeMu sync.Mutex

	// mu guards what follows and the entries' fields. Never held across a call of
	// the source that waits, the store or a callback.
	mu      sync.Mutex
	entries map[model.Identity]*entry
	bundle  Bundle // no roots until the first fetch
	// wakeAt is when Run looks again at what is due.
	wakeAt time.Time
	away   outage
}

// entry is an identity in use, or one that lingers.
type entry struct {
	id model.Identity
	// turn holds a token while somebody gets a certificate for the entry.
	turn chan struct{}

	// pushed: the source renews and says so.
	pushed bool

	// Guarded by Manager.mu.
	users int
	// lingersUntil counts while there are no users.
	lingersUntil time.Time
	// fresh: the source has something new that was not taken yet.
	fresh  bool
	svid   SVID // no ChainPEM until there is one
	ticket uint64
	// untrusted: the bundle does not trust svid any more.
	untrusted bool
	// retryAt is the earliest time of the next renewal.
	retryAt  time.Time
	failures int
}

// lingers reports whether nobody uses the entry. The caller holds Manager.mu.
func (e *entry) lingers() bool { return e.users == 0 }

// issued reports whether the entry has an SVID. The caller holds Manager.mu.
func (e *entry) issued() bool { return len(e.svid.ChainPEM) > 0 }

// renewAt is when to renew an issued entry: at half-life, or at once when the SVID
// is not trusted or not valid yet (the clock was ahead when it was signed). A source
// that renews by itself is asked when it has something, or else at the end. The
// caller holds Manager.mu.
func (e *entry) renewAt(now time.Time) time.Time {
	t := e.svid.renewAt
	if e.pushed {
		t = e.svid.NotAfter
	}
	if e.fresh || e.untrusted || now.Before(e.svid.notBefore) {
		t = now
	}
	if t.Before(e.retryAt) && !reached(e.retryAt, now, lastRetry) {
		t = e.retryAt
	}
	return t
}

// reached reports whether it is t by now. A t further off than longest, the most that it
// is ever put off, was set before the clock was set back, and does not count.
func reached(t, now time.Time, longest time.Duration) bool {
	return !now.Before(t) || t.Sub(now) > longest
}

// NewManager returns a Manager that holds nothing yet.
func NewManager(cfg ManagerConfig) (*Manager, error) {
	if (cfg.Signer == nil) == (cfg.Source == nil) || cfg.Log == nil {
		return nil, errors.New("identity manager: Log and one of Signer and Source must be set")
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	m := &Manager{
		cfg:      cfg,
		source:   cfg.Source,
		out:      newOutbox(),
		signing:  make(chan struct{}, maxSigning),
		fetching: make(chan struct{}, 1),
		wake:     make(chan struct{}, 1),
		entries:  map[model.Identity]*entry{},
	}
	if cfg.Signer != nil {
		m.source = signerSource{Signer: cfg.Signer, node: cfg.Node}
	}
	m.pusher, _ = m.source.(Pusher)
	if err := m.metrics.register(cfg.Metrics, m); err != nil {
		return nil, err
	}
	return m, nil
}

// Run delivers and renews until ctx ends, and then returns nil, or until the source
// fails. It must be called once.
func (m *Manager) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { m.out.run(ctx); return nil })
	g.Go(func() error { m.renewLoop(ctx); return nil })
	if m.pusher != nil {
		g.Go(func() error { return m.pusher.Run(ctx, m.noteChange, m.noteRoots) })
	}
	return g.Wait()
}

// noteChange is the pusher's word that it has something new about id.
func (m *Manager) noteChange(id model.Identity) {
	m.mu.Lock()
	if e, ok := m.entries[id]; ok {
		e.fresh, e.retryAt = true, time.Time{}
	}
	m.away = outage{} // it is there
	m.mu.Unlock()
	m.poke()
}

// noteRoots is the pusher's word that it has other roots.
func (m *Manager) noteRoots() {
	m.newRoots.Store(true)
	m.poke()
}

// Ensure returns the SVID of id, once OnUpdate was called with it, and counts one
// more user of id: each successful Ensure needs one Release. It takes a stored
// SVID in the first half of its life, or has a new one signed; when the signer
// is away, a stored one that is still valid is better than none. A source that
// renews by itself is not waited for when a valid one is stored. The error
// is ErrRefused when repeating it is useless.
func (m *Manager) Ensure(ctx context.Context, id model.Identity) (SVID, error) {
	if _, err := spiffeID(id); err != nil {
		return SVID{}, err
	}
	e, again := m.use(id)
	s, ticket, err := m.obtain(ctx, e)
	if err == nil && again {
		m.persist(e, s)
	}
	if err == nil {
		err = m.out.wait(ctx, ticket)
	}
	if err != nil {
		m.Release(id)
		return SVID{}, fmt.Errorf("certificate for %s: %w", id.SPIFFE(), err)
	}
	return s, nil
}

// Release takes one user of id away. With the last one the SVID and its key are
// forgotten in the store at once, and here when they have lingered. Not to be called
// when the registrar stops.
func (m *Manager) Release(id model.Identity) {
	if m.release(id) {
		m.forget(id)
	}
}

// release reports whether it took the last user away.
func (m *Manager) release(id model.Identity) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[id]
	if !ok || e.lingers() {
		return false
	}
	if e.users--; e.users > 0 {
		return false
	}
	if m.cfg.Linger <= 0 || !e.issued() {
		m.dropLocked(e)
		return true
	}
	e.lingersUntil = m.cfg.Clock().Add(m.cfg.Linger)
	if e.lingersUntil.Before(m.wakeAt) {
		m.poke()
	}
	return true
}

// dropLocked forgets an entry. The caller holds mu.
func (m *Manager) dropLocked(e *entry) {
	delete(m.entries, e.id)
	if m.pusher != nil {
		m.pusher.Release(e.id)
	}
	if e.issued() && m.cfg.OnRelease != nil {
		m.out.put(e.id, func() { m.cfg.OnRelease(e.id) })
	}
}

// Bundle returns the bundle that was fetched last; it has no roots before.
func (m *Manager) Bundle() Bundle {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bundle
}

// use counts one more user of id; again says that its SVID had lingered and is good.
func (m *Manager) use(id model.Identity) (e *entry, again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[id]
	if ok && e.lingers() {
		again = m.cfg.Clock().Before(e.svid.NotAfter) && !e.untrusted
		if again {
			m.poke() // it may be due
		} else {
			m.dropLocked(e)
			ok = false
		}
	}
	if !ok {
		e = &entry{id: id, turn: make(chan struct{}, 1), pushed: m.pusher != nil}
		m.entries[id] = e
		if e.pushed {
			m.pusher.Follow(id)
		}
	}
	e.users++
	return e, again
}

// obtain returns the entry's SVID and the ticket of its delivery; callers for the
// same entry take turns, so that it is signed once.
func (m *Manager) obtain(ctx context.Context, e *entry) (SVID, uint64, error) {
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
		return SVID{}, 0, ctx.Err()
	}
	m.mu.Lock()
	s, ticket := e.svid, e.ticket
	m.mu.Unlock()
	if len(s.ChainPEM) > 0 && m.cfg.Clock().Before(s.NotAfter) {
		return s, ticket, nil
	}
	bundle, err := m.ensureBundle(ctx)
	if err != nil {
		return SVID{}, 0, err
	}
	stored, ok := m.load(e, bundle)
	if ok && (e.pushed || m.cfg.Clock().Before(stored.renewAt) || m.isAway()) {
		m.metrics.reused.Inc()
		return stored, m.install(e, stored), nil
	}
	asking := ctx
	if ok {
		var cancel context.CancelFunc
		asking, cancel = context.WithTimeout(ctx, storedPatience)
		defer cancel()
	}
	s, err = m.issue(asking, e)
	if err == nil || ok {
		m.noteAnswer(err, signTimeout)
	}
	switch {
	case err == nil:
		m.persist(e, s)
		return s, m.install(e, s), nil
	case ok:
		m.cfg.Log.Warn("no new certificate; the stored one is used until it expires", "svid", stored, "error", err)
		m.metrics.reused.Inc()
		return stored, m.install(e, stored), nil
	}
	return SVID{}, 0, err
}

// issue has the source give an SVID.
func (m *Manager) issue(ctx context.Context, e *entry) (SVID, error) {
	select {
	case m.signing <- struct{}{}:
		defer func() { <-m.signing }()
	case <-ctx.Done():
		return SVID{}, ctx.Err()
	}
	m.mu.Lock()
	e.fresh = false // what is said from here on may be newer than the answer
	m.mu.Unlock()
	s, err := m.issueOnce(ctx, e.id)
	m.metrics.signed(err)
	return s, err
}

// issueOnce asks once. A chain that the known bundle does not trust makes it look at
// the source's bundle once more.
func (m *Manager) issueOnce(ctx context.Context, id model.Identity) (SVID, error) {
	got, err := m.source.Issue(ctx, id)
	if err != nil {
		return SVID{}, err
	}
	s, err := newSVID(id, got.Chain, got.Key, m.Bundle(), m.cfg.Clock())
	if err == nil {
		return s, nil
	}
	if _, err := m.refreshBundle(ctx); err != nil {
		return SVID{}, err
	}
	return newSVID(id, got.Chain, got.Key, m.Bundle(), m.cfg.Clock())
}

// install makes s the entry's SVID and queues its delivery.
func (m *Manager) install(e *entry, s SVID) uint64 {
	now := m.cfg.Clock()
	m.mu.Lock()
	defer m.mu.Unlock()
	e.svid, e.failures = s, 0
	// A root may have gone between the check of s and now.
	e.untrusted = !m.bundle.contains(s.verifiedBy)
	e.retryAt = now.Add(pauseAfter(s, now))
	if m.entries[e.id] == e {
		e.ticket = m.out.put(e.id, func() {
			if m.cfg.OnUpdate != nil {
				m.cfg.OnUpdate(s)
			}
		})
	}
	if e.renewAt(now).Before(m.wakeAt) {
		m.poke()
	}
	return e.ticket
}

// load returns the stored SVID of an entry if it is sound and trusted now.
func (m *Manager) load(e *entry, bundle Bundle) (SVID, bool) {
	if m.cfg.Store == nil {
		return SVID{}, false
	}
	m.storeMu.Lock()
	defer m.storeMu.Unlock()
	data, err := m.cfg.Store.Get(storeKey(e.id))
	if err != nil {
		m.cfg.Log.Warn("cannot read a stored certificate; a new one is signed", "identity", e.id.SPIFFE(), "where", m.cfg.Store.Where(storeKey(e.id)), "error", err)
		return SVID{}, false
	}
	if data == nil {
		return SVID{}, false
	}
	s, err := decodeSVID(e.id, data, bundle, m.cfg.Clock())
	if err != nil {
		// No copy is kept: it holds a private key, and nothing in it is unique.
		m.cfg.Log.Warn("a stored certificate is of no use; a new one is signed", "identity", e.id.SPIFFE(), "where", m.cfg.Store.Where(storeKey(e.id)), "error", err)
		return SVID{}, false
	}
	return s, true
}

// persist stores s while the entry is in use. A failure costs a new certificate
// after the next restart, no more.
func (m *Manager) persist(e *entry, s SVID) {
	if m.cfg.Store == nil {
		return
	}
	m.storeMu.Lock()
	defer m.storeMu.Unlock()
	if !m.inUse(e.id, e) {
		return
	}
	if err := m.cfg.Store.Put(storeKey(e.id), s.encode()); err != nil {
		m.cfg.Log.Warn("cannot store a certificate; after a restart a new one is signed", "svid", s, "error", err)
	}
}

// forget removes what is stored of an identity unless it came into use again.
func (m *Manager) forget(id model.Identity) {
	if m.cfg.Store == nil {
		return
	}
	m.storeMu.Lock()
	defer m.storeMu.Unlock()
	if m.inUse(id, nil) {
		return
	}
	if err := m.cfg.Store.Delete(storeKey(id)); err != nil {
		m.cfg.Log.Warn("cannot remove a stored certificate", "identity", id.SPIFFE(), "error", err)
	}
}

// inUse reports whether the identity is in use, by the very entry e unless that
// is nil.
func (m *Manager) inUse(id model.Identity, e *entry) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	cur, ok := m.entries[id]
	return ok && !cur.lingers() && (e == nil || cur == e)
}
