package identity

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// PEM block types.
const (
	pemCertificate = "CERTIFICATE"
	pemPrivateKey  = "PRIVATE KEY"
)

// ErrRefused marks an identity or a request that the signer will not sign, now or
// later: repeating it is useless. Any other error means that the signer is away.
var ErrRefused = errors.New("refused")

// Clock tells the wall-clock time by which certificates are judged; time.Now in
// production.
type Clock func() time.Time

// SignRequest asks for one certificate.
type SignRequest struct {
	// Node is the node that asks. A signer that serves several nodes must check
	// that this node runs a pod of the identity.
	Node string
	// Identity decides what the certificate says.
	Identity model.Identity
	// CSR is a PKCS #10 request in DER: its key is certified, its names are only
	// compared with Identity.
	CSR []byte
}

// Signer signs for the workloads of one trust domain (contract 4.7). Its methods
// are safe for concurrent use.
type Signer interface {
	// Sign returns the chain in DER, leaf first, without the root.
	Sign(ctx context.Context, req SignRequest) ([][]byte, error)
	// Bundle returns the roots that are trusted now.
	Bundle(ctx context.Context) (Bundle, error)
}

// Bundle are the roots that the peers of a trust domain are verified against.
type Bundle struct {
	// TrustDomain without scheme.
	TrustDomain string
	// Roots, the one that became valid first in front, so that equal sets have
	// equal bytes (I5).
	Roots []*x509.Certificate
}

// NewBundle returns a Bundle with the roots in their order and each one once.
func NewBundle(trustDomain string, roots []*x509.Certificate) Bundle {
	sorted := slices.Clone(roots)
	slices.SortFunc(sorted, func(a, b *x509.Certificate) int {
		if c := a.NotBefore.Compare(b.NotBefore); c != 0 {
			return c
		}
		return bytes.Compare(a.Raw, b.Raw)
	})
	same := func(a, b *x509.Certificate) bool { return a.Equal(b) }
	return Bundle{TrustDomain: trustDomain, Roots: slices.CompactFunc(sorted, same)}
}

// PEM returns the roots as concatenated PEM blocks: the trusted_ca of SDS.
func (b Bundle) PEM() []byte {
	var out []byte
	for _, c := range b.Roots {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: c.Raw})...)
	}
	return out
}

// Equal reports whether both trust the same roots for the same domain.
func (b Bundle) Equal(o Bundle) bool {
	return b.TrustDomain == o.TrustDomain &&
		slices.EqualFunc(b.Roots, o.Roots, func(x, y *x509.Certificate) bool { return x.Equal(y) })
}

// contains reports whether b trusts every root of o.
func (b Bundle) contains(o Bundle) bool {
	for _, r := range o.Roots {
		if !slices.ContainsFunc(b.Roots, r.Equal) {
			return false
		}
	}
	return true
}

// source returns b in the form that SVIDs are verified with.
func (b Bundle) source() (*x509bundle.Bundle, error) {
	td, err := spiffeid.TrustDomainFromString(b.TrustDomain)
	if err != nil {
		return nil, fmt.Errorf("trust domain of the bundle: %w", err)
	}
	return x509bundle.FromX509Authorities(td, b.Roots), nil
}

// spiffeID returns the SPIFFE ID of id. An identity with an empty or malformed
// part is refused: an ID without its namespace would be shared by equally named
// accounts of all namespaces (MESH-27).
func spiffeID(id model.Identity) (spiffeid.ID, error) {
	td, err := spiffeid.TrustDomainFromString(id.TrustDomain)
	if err != nil || td.Name() != id.TrustDomain {
		return spiffeid.ID{}, fmt.Errorf("%w: trust domain %q of identity %s is not a lower-case domain name", ErrRefused, id.TrustDomain, id.SPIFFE())
	}
	out, err := spiffeid.FromSegments(td, "ns", id.Namespace, "sa", id.Account)
	if err != nil {
		return spiffeid.ID{}, fmt.Errorf("%w: identity %s: %w", ErrRefused, id.SPIFFE(), err)
	}
	return out, nil
}
