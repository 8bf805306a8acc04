package apiservertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"testing"
	"time"
)

// writeCredentials makes what the API server starts with: a certificate for its
// address, signed by itself, the key that signs the tokens of ServiceAccounts, and
// the administrator's token.
func (s *Server) writeCredentials(tb testing.TB) {
	tb.Helper()
	key, account := newKey(tb), newKey(tb)
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kube-apiserver"},
		IPAddresses: []net.IP{s.addr.AsSlice()}, DNSNames: []string{"kubernetes.default.svc"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		tb.Fatal(err)
	}
	s.caPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	public, err := x509.MarshalPKIXPublicKey(account.Public())
	if err != nil {
		tb.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"server.crt":  s.caPEM,
		"server.key":  keyPEM(tb, key),
		"account.key": keyPEM(tb, account),
		"account.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"tokens.csv":  fmt.Appendf(nil, "%s,admin,admin,system:masters\n", s.token),
	} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			tb.Fatal(err)
		}
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

func keyPEM(tb testing.TB, key *ecdsa.PrivateKey) []byte {
	tb.Helper()
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}
