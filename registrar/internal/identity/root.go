package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

const (
	// rootLifetime of a root; it is followed up at half of it.
	rootLifetime = 10 * 365 * 24 * time.Hour
	// MaxLifetime of a workload's certificate, and what it is unless it is set.
	MaxLifetime = 24 * time.Hour
	// MinLifetime of one: a renewal and its way to Envoy fit into its second half.
	MinLifetime = 5 * time.Second
	// backdate is how far in the past a certificate starts, for peers whose clock
	// is behind ours; backdateShare of its life for one that lives shortly, as
	// renewals come at half of the whole.
	backdate      = time.Minute
	backdateShare = 10
	// ripening is how long a new root is only published before it signs, so that
	// every peer trusts it by then.
	ripening = 24 * time.Hour
	// retirement is how long a root stays published after its successor began to
	// sign: the last SVID below it has expired, with an hour to spare.
	retirement = MaxLifetime + time.Hour
)

// root is one self-signed authority.
type root struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// ripe reports whether r may sign although an older root exists.
func (r root) ripe(now time.Time) bool {
	return !now.Before(r.ripeAt())
}

func (r root) ripeAt() time.Time { return r.cert.NotBefore.Add(backdate + ripening) }

func (r root) validAt(now time.Time) bool {
	return !now.Before(r.cert.NotBefore) && now.Before(r.cert.NotAfter)
}

// newRoot makes a root for td. Its subject is its own, so that verifiers which
// find issuers by name never have to choose between two roots of one domain.
func newRoot(td spiffeid.TrustDomain, now time.Time) (root, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return root{}, fmt.Errorf("make the root key of %s: %w", td, err)
	}
	var tag [8]byte
	if _, err := rand.Read(tag[:]); err != nil {
		return root{}, fmt.Errorf("make the root name of %s: %w", td, err)
	}
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"Portolan"}, CommonName: "root " + hex.EncodeToString(tag[:])},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(rootLifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		URIs:                  []*url.URL{td.ID().URL()},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return root{}, fmt.Errorf("sign the root of %s: %w", td, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return root{}, fmt.Errorf("parse the root of %s: %w", td, err)
	}
	return root{cert: cert, key: key}, nil
}

// signingRoot returns the root that signs at now: the newest that is ripe, or
// else the oldest that is valid.
func signingRoot(roots []root, now time.Time) (root, bool) {
	var best root
	found := false
	for _, r := range roots {
		if r.validAt(now) && (!found || r.ripe(now)) {
			best, found = r, true
		}
	}
	return best, found
}

// livingRoots returns the roots that some valid SVID may still chain to.
func livingRoots(roots []root, now time.Time) []root {
	var out []root
	for i, r := range roots {
		superseded := false
		for _, next := range roots[i+1:] {
			if !now.Before(next.ripeAt().Add(retirement)) && next.validAt(now) {
				superseded = true
			}
		}
		if !superseded && now.Before(r.cert.NotAfter) {
			out = append(out, r)
		}
	}
	return out
}

// needsSuccessor reports whether the newest root is past half of its life.
func needsSuccessor(roots []root, now time.Time) bool {
	if len(roots) == 0 {
		return true
	}
	c := roots[len(roots)-1].cert
	return !now.Before(c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 2))
}

// encodeRoots writes each root as a certificate block followed by its key block.
// Key and certificate share one file, so that one rename replaces both: two
// files could be left half new, half old by a crash.
func encodeRoots(roots []root) ([]byte, error) {
	var buf bytes.Buffer
	for _, r := range roots {
		key, err := x509.MarshalPKCS8PrivateKey(r.key)
		if err != nil {
			return nil, fmt.Errorf("encode root key: %w", err)
		}
		for _, b := range []*pem.Block{{Type: pemCertificate, Bytes: r.cert.Raw}, {Type: pemPrivateKey, Bytes: key}} {
			if err := pem.Encode(&buf, b); err != nil {
				return nil, fmt.Errorf("encode root: %w", err)
			}
		}
	}
	return buf.Bytes(), nil
}

// decodeRoots is the inverse of encodeRoots; anything else in data is an error.
func decodeRoots(data []byte) ([]root, error) {
	var out []root
	for len(bytes.TrimSpace(data)) > 0 {
		var certDER, keyDER []byte
		var err error
		if certDER, data, err = nextBlock(data, pemCertificate); err != nil {
			return nil, err
		}
		if keyDER, data, err = nextBlock(data, pemPrivateKey); err != nil {
			return nil, err
		}
		r, err := parseRoot(certDER, keyDER)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	if len(out) == 0 {
		return nil, errors.New("the file is empty")
	}
	return out, nil
}

// nextBlock takes the PEM block of the wanted type that data starts with.
func nextBlock(data []byte, want string) (der, rest []byte, err error) {
	if !bytes.HasPrefix(bytes.TrimLeft(data, "\r\n"), []byte("-----BEGIN "+want+"-----")) {
		return nil, nil, fmt.Errorf("no %s block where one must be", want)
	}
	b, rest := pem.Decode(data)
	if b == nil || b.Type != want {
		return nil, nil, fmt.Errorf("the %s block is damaged", want)
	}
	return b.Bytes, rest, nil
}

// parseRoot checks that certDER is a root of a trust domain that signed itself
// with the key in keyDER.
func parseRoot(certDER, keyDER []byte) (root, error) {
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return root{}, fmt.Errorf("root certificate: %w", err)
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 || len(cert.URIs) != 1 {
		return root{}, errors.New("the certificate is not the root of a trust domain")
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return root{}, fmt.Errorf("root certificate: %w", err)
	}
	key, err := parseKey(keyDER)
	if err != nil {
		return root{}, fmt.Errorf("root key: %w", err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return root{}, errors.New("the key is not the certificate's")
	}
	return root{cert: cert, key: key}, nil
}

// parseKey reads a PKCS #8 P-256 key.
func parseKey(der []byte) (*ecdsa.PrivateKey, error) {
	k, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, err
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, errors.New("not an ECDSA P-256 key")
	}
	return key, nil
}
