package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"fmt"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Credential is a certificate with its key, as a Source gives it: not yet checked.
type Credential struct {
	// Chain is leaf first, without the root.
	Chain []*x509.Certificate
	Key   *ecdsa.PrivateKey
}

// Source gives whole certificates for the workloads of one trust domain. A Signer
// with keys made here is one; the other kind is a Pusher. Its methods are safe for
// concurrent use.
type Source interface {
	// Issue returns the certificate that id shall have from now on.
	Issue(ctx context.Context, id model.Identity) (Credential, error)
	// Bundle returns the roots that are trusted now.
	Bundle(ctx context.Context) (Bundle, error)
}

// Pusher is a Source that renews by itself and says so. It is asked when it has
// something new, not at half-life.
type Pusher interface {
	Source
	// Follow starts to get certificates of id, Release ends it: once for each Follow,
	// and never twice at one time for the same id. Neither waits. Issue is for
	// identities that are followed.
	Follow(id model.Identity)
	Release(id model.Identity)
	// Run works until ctx ends. It calls changed when there is a new certificate of
	// id, or news about it, and bundle when there are new roots. Neither waits.
	Run(ctx context.Context, changed func(id model.Identity), bundle func()) error
}

// signerSource is the Source that makes the keys and has a Signer certify them.
type signerSource struct {
	Signer
	node string
}

// Issue implements Source with a new key.
func (s signerSource) Issue(ctx context.Context, id model.Identity) (Credential, error) {
	spiffe, err := spiffeID(id)
	if err != nil {
		return Credential{}, err
	}
	key, csr, err := newCSR(spiffe)
	if err != nil {
		return Credential{}, err
	}
	raw, err := s.Sign(ctx, SignRequest{Node: s.node, Identity: id, CSR: csr})
	if err != nil {
		return Credential{}, fmt.Errorf("sign: %w", err)
	}
	chain := make([]*x509.Certificate, 0, len(raw))
	for _, der := range raw {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return Credential{}, fmt.Errorf("the signer's answer: %w", err)
		}
		chain = append(chain, c)
	}
	return Credential{Chain: chain, Key: key}, nil
}
