package identity_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net/url"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// Roots come back from the file as they were saved. One above the trust domain, which
// names none, is taken; one that names another domain is not.
func TestBundleFile(t *testing.T) {
	root := func(names ...string) *x509.Certificate {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
		for _, n := range names {
			template.URIs = append(template.URIs, &url.URL{Scheme: "spiffe", Host: n})
		}
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return parseCert(t, der)
	}
	file := identity.NewBundleFile(t.TempDir())
	if _, err := file.Load(testDomain); err == nil {
		t.Error("roots without a file")
	}
	want := identity.NewBundle(testDomain, []*x509.Certificate{root(testDomain), root()})
	if err := file.Save(want); err != nil {
		t.Fatal(err)
	}
	if got, err := file.Load(testDomain); err != nil || !got.Equal(want) {
		t.Errorf("%d roots, %v; want the saved ones", len(got.Roots), err)
	}
	for _, names := range [][]string{{"other.example"}, {testDomain, "other.example"}} {
		data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root(names...).Raw})
		if _, err := identity.ParseBundle(testDomain, data); !errors.Is(err, identity.ErrTrustDomain) {
			t.Errorf("a root of %v: %v", names, err)
		}
	}
}
