package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// upkeepRetry is how long the CA waits after its file could not be written.
const upkeepRetry = time.Minute

// CA is the built-in signer. It trusts its caller to name the identity. It is safe
// for concurrent use.
type CA struct {
	store RootStore
	td    spiffeid.TrustDomain
	clock Clock
	log   *slog.Logger
	// lifetime of the SVIDs.
	lifetime time.Duration

	// mu guards the rest.
	mu    sync.Mutex
	roots []root // oldest first, never empty
	// retryAt is when the next upkeep may be tried after one failed.
	retryAt time.Time
	// others: it was said that the store has other roots.
	others bool
}

// OpenCA opens the CA whose roots are in a file of dir, or makes one; see NewCA.
func OpenCA(dir, trustDomain string, clock Clock, log *slog.Logger) (*CA, error) {
	store, err := openRootFile(dir, clock, log)
	if err != nil {
		return nil, err
	}
	return NewCA(store, trustDomain, clock, log)
}

// NewCA returns the CA whose roots are in store, or makes the first. What cannot be
// read as roots is set aside and a new root is made: all SVIDs are then reissued.
// Roots of another trust domain, or ones that are not valid yet (a wrong clock), are
// refused, as making a new root could not be undone.
func NewCA(store RootStore, trustDomain string, clock Clock, log *slog.Logger) (*CA, error) {
	td, err := spiffeid.TrustDomainFromString(trustDomain)
	if err != nil || td.Name() != trustDomain {
		return nil, fmt.Errorf("trust domain %q is not a lower-case domain name", trustDomain)
	}
	ca := &CA{store: store, td: td, clock: clock, log: log, lifetime: MaxLifetime}
	if ca.roots, err = ca.load(); err != nil {
		return nil, err
	}
	if err := ca.upkeep(clock()); err != nil {
		return nil, err
	}
	return ca, nil
}

// load returns the stored roots, or none when there are none or when they were set
// aside.
func (ca *CA) load() ([]root, error) {
	data, err := ca.store.Load()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the roots of trust domain %s: %w", ca.td, err)
	}
	roots, err := decodeRoots(data)
	if err == nil {
		return roots, ca.accept(roots)
	}
	aside, moved := ca.store.SetAside()
	if moved != nil {
		return nil, fmt.Errorf("%s is damaged (%w) and cannot be set aside: %w", ca.store.Where(), err, moved)
	}
	ca.log.Error("the trust domain's root is damaged: set aside, a new root is made and every certificate is reissued; to keep the old root, stop, mend the copy, put it back and start again",
		"where", ca.store.Where(), "copy", aside, "cause", err)
	return nil, nil
}

// accept refuses roots that are sound but not for here and now.
func (ca *CA) accept(roots []root) error {
	now := ca.clock()
	for _, r := range roots {
		if got := r.cert.URIs[0].String(); got != ca.td.ID().String() {
			return fmt.Errorf("%s holds the root of %s, not of %s: set the trust domain back, or move it away to start a new root (every certificate is then reissued)",
				ca.store.Where(), got, ca.td.ID())
		}
	}
	if first := roots[0].cert; now.Before(first.NotBefore) {
		return fmt.Errorf("the root in %s is valid from %s on and the clock says %s: correct the clock, or move it away to start a new root",
			ca.store.Where(), first.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return nil
}

// upkeep drops roots that nothing chains to any more, makes a successor when the
// newest root is past half of its life, and stores the result. On error the roots
// are as before: a root that is not stored is never used. The caller holds mu or
// is alone.
func (ca *CA) upkeep(now time.Time) error {
	next := livingRoots(ca.roots, now)
	changed := len(next) != len(ca.roots)
	if len(next) == 0 && len(ca.roots) > 0 {
		ca.log.Error("every root of the trust domain has expired: a new one is made and every certificate is reissued", "where", ca.store.Where())
	}
	if needsSuccessor(next, now) {
		r, err := newRoot(ca.td, now)
		if err != nil {
			return err
		}
		next, changed = append(next, r), true
		ca.log.Info("new root of the trust domain", "trust_domain", ca.td.Name(), "where", ca.store.Where(),
			"subject", r.cert.Subject.CommonName, "not_after", r.cert.NotAfter, "older_roots", len(next)-1)
	}
	if !changed {
		return nil
	}
	data, err := encodeRoots(next)
	if err != nil {
		return err
	}
	if err := ca.store.Save(data); err != nil {
		return fmt.Errorf("store the roots of trust domain %s: %w", ca.td, err)
	}
	ca.roots = next
	return nil
}

// keep puts the roots back into the store when somebody took them away or spoilt them:
// the next start would make a new root, and until every certificate is reissued nobody
// trusts anybody. Other sound roots stay for that start: somebody means them.
func (ca *CA) keep() {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	what, err := ca.putBack()
	switch {
	case err != nil:
		ca.log.Error("cannot see to the stored roots; those at hand go on signing", "where", ca.store.Where(), "error", err)
	case what != "":
		ca.log.Error("somebody took the stored roots away or damaged them, they are put back; who wants a new root ends the signer before", "where", ca.store.Where(), "found", what)
	}
}

// putBack is keep, and says what was found instead of the roots; "" when they are there.
// The caller holds mu.
func (ca *CA) putBack() (what string, err error) {
	data, err := ca.store.Load()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		what = "nothing"
	case err != nil:
		return "", err
	default:
		stored, err := decodeRoots(data)
		if err == nil {
			ca.compare(stored)
			return "", nil
		}
		aside, err := ca.store.SetAside()
		if err != nil {
			return "", err
		}
		what = "damaged, copied to " + aside
	}
	if data, err = encodeRoots(ca.roots); err != nil {
		return "", err
	}
	return what, ca.store.Save(data)
}

// compare says, once, that the store has other roots than those that sign. The caller
// holds mu.
func (ca *CA) compare(stored []root) {
	same := slices.EqualFunc(stored, ca.roots, func(a, b root) bool { return a.cert.Equal(b.cert) })
	if !same && !ca.others {
		ca.log.Error("the store has other roots than those that sign; they count from the signer's next start on, when every certificate is reissued", "where", ca.store.Where())
	}
	ca.others = !same
}

// current returns the roots after upkeep. A failed upkeep is logged and tried
// again later: the roots at hand have years left.
func (ca *CA) current(now time.Time) []root {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if !now.Before(ca.retryAt) {
		if err := ca.upkeep(now); err != nil {
			ca.retryAt = now.Add(upkeepRetry)
			ca.log.Error("cannot renew the root; the present one goes on signing", "error", err)
		}
	}
	return ca.roots
}

// CheckLifetime refuses a life that SVIDs of the CA cannot have.
func CheckLifetime(d time.Duration) error {
	if d < MinLifetime || d > MaxLifetime {
		return fmt.Errorf("%s: need a time from %s to %s", d, MinLifetime, MaxLifetime)
	}
	return nil
}

// SetLifetime sets how long the SVIDs are to live, as CheckLifetime allows. It is
// for the time before the first Sign.
func (ca *CA) SetLifetime(d time.Duration) error {
	if err := CheckLifetime(d); err != nil {
		return fmt.Errorf("life of certificates: %w", err)
	}
	ca.lifetime = d
	return nil
}

// Sign implements Signer: an SVID for client and server use, with the
// SPIFFE ID as its only name.
func (ca *CA) Sign(ctx context.Context, req SignRequest) ([][]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	id, err := spiffeID(req.Identity)
	if err != nil {
		return nil, err
	}
	if !id.MemberOf(ca.td) {
		return nil, fmt.Errorf("%w: %s is not of trust domain %s", ErrRefused, id, ca.td)
	}
	pub, err := checkCSR(req.CSR, id)
	if err != nil {
		return nil, err
	}
	der, err := ca.issue(id, pub)
	if err != nil {
		return nil, err
	}
	ca.log.Debug("signed", "node", req.Node, "identity", id.String())
	return [][]byte{der}, nil
}

func (ca *CA) issue(id spiffeid.ID, pub *ecdsa.PublicKey) ([]byte, error) {
	now := ca.clock()
	signer, ok := signingRoot(ca.current(now), now)
	if !ok {
		return nil, fmt.Errorf("no root of trust domain %s is valid at %s: check the clock", ca.td, now.UTC().Format(time.RFC3339))
	}
	notAfter := now.Add(ca.lifetime)
	if notAfter.After(signer.cert.NotAfter) {
		notAfter = signer.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		NotBefore:             now.Add(-min(backdate, ca.lifetime/backdateShare)),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{id.URL()},
	}, signer.cert, pub, signer.key)
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", id, err)
	}
	return der, nil
}

// Bundle implements Signer. It is asked every minute, and sees to the store.
func (ca *CA) Bundle(ctx context.Context) (Bundle, error) {
	if err := ctx.Err(); err != nil {
		return Bundle{}, err
	}
	ca.keep()
	roots := ca.current(ca.clock())
	certs := make([]*x509.Certificate, 0, len(roots))
	for _, r := range roots {
		certs = append(certs, r.cert)
	}
	return NewBundle(ca.td.Name(), certs), nil
}

var _ Signer = (*CA)(nil)
