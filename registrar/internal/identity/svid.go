package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// jitterShare of an SVID's lifetime is what renewals are spread over, so that
// pods that started together do not renew together.
const jitterShare = 20

// SVID is a workload's certificate with its key. It is a value: its slices are
// never changed after it was handed out.
type SVID struct {
	// Identity is whose it is.
	Identity model.Identity
	// ChainPEM is the chain, leaf first, without the root.
	ChainPEM []byte
	// KeyPEM is the private key (PKCS #8). Never log it.
	KeyPEM []byte
	// NotAfter is when the first certificate of the chain expires.
	NotAfter time.Time

	// renewAt is when it should be renewed: a fixed function of its bytes, so that
	// a restart changes nothing.
	renewAt time.Time
	// notBefore is when its leaf becomes valid.
	notBefore time.Time
	// verifiedBy is the bundle that trusted it when it was made or loaded.
	verifiedBy Bundle
}

// LogValue keeps the key out of logs.
func (s SVID) LogValue() slog.Value {
	return slog.GroupValue(slog.String("identity", s.Identity.SPIFFE()), slog.Time("not_after", s.NotAfter))
}

// String keeps the key out of messages.
func (s SVID) String() string { return s.Identity.SPIFFE() }

// newSVID checks that chain and key belong together and to id, are trusted by
// bundle at now and serve both ends of a connection.
func newSVID(id model.Identity, chain []*x509.Certificate, key *ecdsa.PrivateKey, bundle Bundle, now time.Time) (SVID, error) {
	if err := verifyChain(id, chain, bundle, now); err != nil {
		return SVID{}, err
	}
	if !key.PublicKey.Equal(chain[0].PublicKey) {
		return SVID{}, fmt.Errorf("the certificate of %s is for another key", id.SPIFFE())
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return SVID{}, fmt.Errorf("encode the key of %s: %w", id.SPIFFE(), err)
	}
	s := SVID{
		Identity: id,
		KeyPEM:   pem.EncodeToMemory(&pem.Block{Type: pemPrivateKey, Bytes: keyDER}),
		NotAfter: chain[0].NotAfter,

		notBefore:  chain[0].NotBefore,
		verifiedBy: bundle,
	}
	for _, c := range chain {
		s.ChainPEM = append(s.ChainPEM, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: c.Raw})...)
		if c.NotAfter.Before(s.NotAfter) {
			s.NotAfter = c.NotAfter
		}
	}
	s.renewAt = renewAt(chain[0], s.NotAfter)
	return s, nil
}

// verifyChain checks everything about a chain but its key.
func verifyChain(id model.Identity, chain []*x509.Certificate, bundle Bundle, now time.Time) error {
	want, err := spiffeID(id)
	if err != nil {
		return err
	}
	source, err := bundle.source()
	if err != nil {
		return err
	}
	got, _, err := x509svid.Verify(chain, source, x509svid.WithTime(now))
	if err != nil {
		return fmt.Errorf("the certificate of %s does not verify: %w", want, err)
	}
	if got != want {
		return fmt.Errorf("the certificate of %s says %s", want, got)
	}
	for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth} {
		if !slices.Contains(chain[0].ExtKeyUsage, use) {
			return fmt.Errorf("the certificate of %s must be for both clients and servers", want)
		}
	}
	return nil
}

// renewAt is half-life, or up to a twentieth of the life earlier: as much as the
// certificate's own hash says.
func renewAt(leaf *x509.Certificate, notAfter time.Time) time.Time {
	life := notAfter.Sub(leaf.NotBefore)
	sum := sha256.Sum256(leaf.Raw)
	early := float64(binary.BigEndian.Uint32(sum[:4])) / (1 << 32) * float64(life/jitterShare)
	return leaf.NotBefore.Add(life/2 - time.Duration(early))
}

// encode returns the form in which an SVID is stored: its key, then its chain.
func (s SVID) encode() []byte { return slices.Concat(s.KeyPEM, s.ChainPEM) }

// decodeSVID is the inverse of encode. The result is trusted by bundle at now.
func decodeSVID(id model.Identity, data []byte, bundle Bundle, now time.Time) (SVID, error) {
	keyDER, rest, err := nextBlock(data, pemPrivateKey)
	if err != nil {
		return SVID{}, err
	}
	key, err := parseKey(keyDER)
	if err != nil {
		return SVID{}, err
	}
	chain, err := decodeChain(rest)
	if err != nil {
		return SVID{}, err
	}
	return newSVID(id, chain, key, bundle, now)
}

func decodeChain(data []byte) ([]*x509.Certificate, error) {
	var chain []*x509.Certificate
	for len(bytes.TrimSpace(data)) > 0 {
		var der []byte
		var err error
		if der, data, err = nextBlock(data, pemCertificate); err != nil {
			return nil, err
		}
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		chain = append(chain, c)
	}
	if len(chain) == 0 {
		return nil, errors.New("no certificate")
	}
	return chain, nil
}
