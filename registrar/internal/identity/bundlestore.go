package identity

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
)

// BundleStore keeps the last bundle of a signer that is elsewhere.
type BundleStore interface {
	// Load returns what was saved; an error when there is nothing.
	Load(trustDomain string) (Bundle, error)
	Save(b Bundle) error
}

// BundleFile is the BundleStore in a file.
type BundleFile struct{ path string }

// NewBundleFile returns the BundleFile roots.pem in dir, which must exist.
func NewBundleFile(dir string) BundleFile { return BundleFile{path: filepath.Join(dir, "roots.pem")} }

// Load implements BundleStore.
func (f BundleFile) Load(trustDomain string) (Bundle, error) {
	data, err := os.ReadFile(f.path)
	if err != nil {
		return Bundle{}, fmt.Errorf("roots that were seen last: %w", err)
	}
	b, err := ParseBundle(trustDomain, data)
	if err != nil {
		return Bundle{}, fmt.Errorf("%s: %w", f.path, err)
	}
	return b, nil
}

// Save implements BundleStore. An unchanged bundle costs a read.
func (f BundleFile) Save(b Bundle) error {
	if old, err := f.Load(b.TrustDomain); err == nil && old.Equal(b) {
		return nil
	}
	if err := writeFile(f.path, b.PEM(), durable); err != nil {
		return fmt.Errorf("save the roots of %s: %w", b.TrustDomain, err)
	}
	return nil
}

// ErrTrustDomain marks roots that are sound and of another trust domain.
var ErrTrustDomain = errors.New("of another trust domain")

// ParseBundle reads the roots of a trust domain from PEM; it is the reverse of
// Bundle.PEM. A root that names another domain is ErrTrustDomain; one of an
// organisation's own PKI, above the trust domain, names none.
func ParseBundle(trustDomain string, data []byte) (Bundle, error) {
	var roots []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != pemCertificate {
			return Bundle{}, fmt.Errorf("PEM block %q among the roots of %s", block.Type, trustDomain)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return Bundle{}, fmt.Errorf("root of %s: %w", trustDomain, err)
		}
		if slices.ContainsFunc(c.URIs, func(u *url.URL) bool { return u.String() != "spiffe://"+trustDomain }) {
			return Bundle{}, fmt.Errorf("root %q names %v and not spiffe://%s: it is %w", c.Subject, c.URIs, trustDomain, ErrTrustDomain)
		}
		roots = append(roots, c)
	}
	if len(roots) == 0 {
		return Bundle{}, errors.New("no root of " + trustDomain)
	}
	return NewBundle(trustDomain, roots), nil
}
