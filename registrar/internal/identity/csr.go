package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"net/url"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// maxCSR bounds a request in bytes: a P-256 request with the longest SPIFFE ID is
// below 3 KiB.
const maxCSR = 16 << 10

// newCSR returns a fresh P-256 key and the request for id signed with it, in DER.
func newCSR(id spiffeid.ID) (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key for %s: %w", id, err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{id.URL()}}, key)
	if err != nil {
		return nil, nil, fmt.Errorf("make a request for %s: %w", id, err)
	}
	return key, der, nil
}

// checkCSR returns the key that der asks to have certified for id. The request
// must be signed by that key, which must be P-256, and may name nothing but id.
// Every error is ErrRefused.
func checkCSR(der []byte, id spiffeid.ID) (*ecdsa.PublicKey, error) {
	if len(der) > maxCSR {
		return nil, fmt.Errorf("%w: certificate request for %s has %d bytes, the limit is %d", ErrRefused, id, len(der), maxCSR)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate request for %s: %w", ErrRefused, id, err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, fmt.Errorf("%w: certificate request for %s is not signed by its own key: %w", ErrRefused, id, err)
	}
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%w: certificate request for %s has a key of type %s; use ECDSA P-256", ErrRefused, id, csr.PublicKeyAlgorithm)
	}
	if len(csr.DNSNames)+len(csr.IPAddresses)+len(csr.EmailAddresses) > 0 {
		return nil, fmt.Errorf("%w: certificate request for %s asks for DNS, IP or mail names; only the SPIFFE ID is certified", ErrRefused, id)
	}
	if len(csr.URIs) > 1 || len(csr.URIs) == 1 && csr.URIs[0].String() != id.String() {
		return nil, fmt.Errorf("%w: certificate request for %s asks for %v", ErrRefused, id, csr.URIs)
	}
	return key, nil
}

// RequestedURI returns the one URI that a request in DER asks for, for a signer that
// has to learn the identity from it. Every error is ErrRefused; whether the request
// is sound Sign checks.
func RequestedURI(der []byte) (*url.URL, error) {
	if len(der) > maxCSR {
		return nil, fmt.Errorf("%w: certificate request of %d bytes, the limit is %d", ErrRefused, len(der), maxCSR)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate request: %w", ErrRefused, err)
	}
	if len(csr.URIs) != 1 {
		return nil, fmt.Errorf("%w: certificate request names %d URIs, it must name one SPIFFE ID", ErrRefused, len(csr.URIs))
	}
	return csr.URIs[0], nil
}
