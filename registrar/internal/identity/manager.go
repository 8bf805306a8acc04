package identity

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// signTimeout bounds one call of the signer for a renewal; a first certificate
	// is bounded by the caller of Ensure.
	signTimeout = 10 * time.Second
	// maxSigning bounds the calls of the signer at one time.
	maxSigning = 16
)

// ManagerConfig is what a Manager needs.
type ManagerConfig struct {
	// Signer signs.
	Signer Signer
	// Node is the name of this node, for the signer.
	Node string
	// Store keeps SVIDs over a restart; nil keeps them in memory only.
	Store Store
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

// Manager holds one SVID for each identity in use on this node. Its methods are
// safe for concurrent use. Nothing is delivered or renewed unless Run runs.
type Manager struct {
	cfg     ManagerConfig
	out     *outbox
	metrics metrics
	// signing has a token for each call of the signer under way.
	signing chan struct{}
	// fetching has a token while the bundle is fetched.
	fetching chan struct{}
	// wake tells Run that something is due earlier than it knew.
	wake chan struct{}

	// storeMu makes "is it still in use" and the store's change one step. It is
	// taken before mu.
	storeMu sync.Mutex

	// mu guards what follows and the entries' fields. Never held across a call of
	// the signer, the store or a callback.
	mu      sync.Mutex
	entries map[model.Identity]*entry
	bundle  Bundle // no roots until the first fetch
	// wakeAt is when Run looks again at what is due.
	wakeAt time.Time
}

// entry is an identity in use.
type entry struct {
	id model.Identity
	// turn holds a token while somebody gets a certificate for the entry.
	turn chan struct{}

	// Guarded by Manager.mu.
	users  int
	svid   SVID // no ChainPEM until there is one
	ticket uint64
	// untrusted: the bundle does not trust svid any more.
	untrusted bool
	// retryAt is the earliest time of the next renewal.
	retryAt  time.Time
	failures int
}

// issued reports whether the entry has an SVID. The caller holds Manager.mu.
func (e *entry) issued() bool { return len(e.svid.ChainPEM) > 0 }

// renewAt is when to renew an issued entry: at half-life, or at once when the SVID
// is not trusted or not valid yet (the clock was ahead when it was signed). The
// caller holds Manager.mu.
func (e *entry) renewAt(now time.Time) time.Time {
	t := e.svid.renewAt
	if e.untrusted || now.Before(e.svid.notBefore) {
		t = now
	}
	// A retryAt beyond every pause was set before the clock was set back.
	if t.Before(e.retryAt) && e.retryAt.Sub(now) <= lastRetry {
		t = e.retryAt
	}
	return t
}

// NewManager returns a Manager that holds nothing yet.
func NewManager(cfg ManagerConfig) (*Manager, error) {
	if cfg.Signer == nil || cfg.Log == nil {
		return nil, errors.New("identity manager: Signer and Log must be set")
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	m := &Manager{
		cfg:      cfg,
		out:      newOutbox(),
		signing:  make(chan struct{}, maxSigning),
		fetching: make(chan struct{}, 1),
		wake:     make(chan struct{}, 1),
		entries:  map[model.Identity]*entry{},
	}
	if err := m.metrics.register(cfg.Metrics, m); err != nil {
		return nil, err
	}
	return m, nil
}

// Run delivers and renews until ctx ends, and then returns nil. It must be called
// once.
func (m *Manager) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.out.run(ctx) })
	m.renewLoop(ctx)
	return nil
}

// Ensure returns the SVID of id, once OnUpdate was called with it, and counts one
// more user of id: each successful Ensure needs one Release. It takes a stored
// SVID in the first half of its life, or has a new one signed; when the signer
// is away, a stored one that is still valid is better than none. The error
// is ErrRefused when repeating it is useless.
func (m *Manager) Ensure(ctx context.Context, id model.Identity) (SVID, error) {
	if _, err := spiffeID(id); err != nil {
		return SVID{}, err
	}
	e := m.use(id)
	s, ticket, err := m.obtain(ctx, e)
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
// forgotten, also in the store. Not to be called when the registrar stops.
func (m *Manager) Release(id model.Identity) {
	m.mu.Lock()
	e, ok := m.entries[id]
	if !ok {
		m.mu.Unlock()
		return
	}
	if e.users--; e.users > 0 {
		m.mu.Unlock()
		return
	}
	delete(m.entries, id)
	if e.issued() && m.cfg.OnRelease != nil {
		m.out.put(id, func() { m.cfg.OnRelease(id) })
	}
	m.mu.Unlock()
	m.forget(id)
}

// Bundle returns the bundle that was fetched last; it has no roots before.
func (m *Manager) Bundle() Bundle {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bundle
}

func (m *Manager) use(id model.Identity) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.entries[id]
	if !ok {
		e = &entry{id: id, turn: make(chan struct{}, 1)}
		m.entries[id] = e
	}
	e.users++
	return e
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
	if ok && m.cfg.Clock().Before(stored.renewAt) {
		m.metrics.reused.Inc()
		return stored, m.install(e, stored), nil
	}
	s, err = m.sign(ctx, e.id)
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

// sign makes a key and has it certified. A chain that the known bundle does not
// trust makes it look at the signer's bundle once more.
func (m *Manager) sign(ctx context.Context, id model.Identity) (SVID, error) {
	select {
	case m.signing <- struct{}{}:
		defer func() { <-m.signing }()
	case <-ctx.Done():
		return SVID{}, ctx.Err()
	}
	s, err := m.signOnce(ctx, id)
	m.metrics.signed(err)
	return s, err
}

func (m *Manager) signOnce(ctx context.Context, id model.Identity) (SVID, error) {
	spiffe, err := spiffeID(id)
	if err != nil {
		return SVID{}, err
	}
	key, csr, err := newCSR(spiffe)
	if err != nil {
		return SVID{}, err
	}
	raw, err := m.cfg.Signer.Sign(ctx, SignRequest{Node: m.cfg.Node, Identity: id, CSR: csr})
	if err != nil {
		return SVID{}, fmt.Errorf("sign: %w", err)
	}
	chain := make([]*x509.Certificate, 0, len(raw))
	for _, der := range raw {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return SVID{}, fmt.Errorf("the signer's answer: %w", err)
		}
		chain = append(chain, c)
	}
	s, err := newSVID(id, chain, key, m.Bundle(), m.cfg.Clock())
	if err == nil {
		return s, nil
	}
	if _, err := m.refreshBundle(ctx); err != nil {
		return SVID{}, err
	}
	return newSVID(id, chain, key, m.Bundle(), m.cfg.Clock())
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
	return ok && (e == nil || cur == e)
}
