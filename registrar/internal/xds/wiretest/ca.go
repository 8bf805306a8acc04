package wiretest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/url"
	"testing"
	"time"
)

// CA signs SPIFFE certificates for tests.
type CA struct {
	// PEM is the root certificate.
	PEM []byte
	// Pool holds it.
	Pool *x509.CertPool
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	tb   testing.TB
}

// NewCA makes a certificate authority.
func NewCA(tb testing.TB) *CA {
	tb.Helper()
	ca := &CA{tb: tb, key: newKey(tb), Pool: x509.NewCertPool()}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "wiretest"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, ca.key.Public(), ca.key)
	if err != nil {
		tb.Fatal(err)
	}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		tb.Fatal(err)
	}
	ca.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	ca.Pool.AddCert(ca.cert)
	return ca
}

// Issue signs a certificate with the SPIFFE ID as its only SAN, valid for an hour.
func (ca *CA) Issue(spiffe string) (chainPEM, keyPEM []byte) {
	ca.tb.Helper()
	uri, err := url.Parse(spiffe)
	if err != nil {
		ca.tb.Fatal(err)
	}
	key := newKey(ca.tb)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		NotBefore:    time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		URIs:        []*url.URL{uri},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		ca.tb.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		ca.tb.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}

// Client returns a TLS configuration with a certificate of the SPIFFE ID that
// accepts any server of this CA, as a foreign mTLS client has it.
func (ca *CA) Client(spiffe string) *tls.Config {
	ca.tb.Helper()
	chain, key := ca.Issue(spiffe)
	certificate, err := tls.X509KeyPair(chain, key)
	if err != nil {
		ca.tb.Fatal(err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{certificate},
		// A SPIFFE server has no DNS name to check; the chain is checked below.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection checks the chain
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: ca.Pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
			return err
		},
	}
}

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}
