package identity_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// peer is one end of a TLS connection.
type peer struct {
	svid   *x509svid.SVID
	bundle *x509bundle.Bundle
}

func newPeer(t *testing.T, ca *identity.CA, id model.Identity) peer {
	t.Helper()
	csr, key := request(t, x509.CertificateRequest{})
	chain, err := ca.Sign(t.Context(), identity.SignRequest{Identity: id, CSR: csr})
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	svid, err := x509svid.ParseRaw(bytes.Join(chain, nil), keyDER)
	if err != nil {
		t.Fatal(err)
	}
	b := bundleOf(t, ca)
	return peer{svid, x509bundle.FromX509Authorities(spiffeid.RequireTrustDomainFromString(b.TrustDomain), b.Roots)}
}

// handshake returns what each end says about a TLS connection between both.
func handshake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	a, b := net.Pipe()
	done := make(chan error, 1)
	go func() {
		conn := tls.Server(b, server)
		err := conn.HandshakeContext(t.Context())
		if err == nil {
			_, err = conn.Write([]byte("x"))
		}
		done <- errors.Join(err, b.Close())
	}()
	conn := tls.Client(a, client)
	clientErr = conn.HandshakeContext(t.Context())
	if clientErr == nil {
		_, clientErr = conn.Read(make([]byte, 1))
	}
	_ = a.Close()
	return clientErr, <-done
}

// Certificates of the CA carry a TLS connection in which both ends check the
// SPIFFE ID of the other; another account, another trust domain and a root of the
// same name that is not ours are refused (I7, I8).
func TestMutualTLS(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now)
	foreign, err := identity.OpenCA(t.TempDir(), "other.internal", time.Now, quiet())
	if err != nil {
		t.Fatal(err)
	}
	client, server := newPeer(t, ca, account("checkout")), newPeer(t, ca, account("payments"))
	outsider := account("payments")
	outsider.TrustDomain = "other.internal"

	tests := []struct {
		name           string
		client, server peer
		wantClient     spiffeid.Matcher // what the server accepts
		wantServer     spiffeid.Matcher // what the client accepts
		fails          bool
	}{
		{"both ends as expected", client, server, spiffeid.MatchID(client.svid.ID), spiffeid.MatchID(server.svid.ID), false},
		{"server is another account", client, client, spiffeid.MatchAny(), spiffeid.MatchID(server.svid.ID), true},
		{"client is another account", server, server, spiffeid.MatchID(client.svid.ID), spiffeid.MatchAny(), true},
		{"server of another trust domain", client, newPeer(t, foreign, outsider), spiffeid.MatchAny(), spiffeid.MatchAny(), true},
		{"client below another root of the same domain", newPeer(t, openCA(t, t.TempDir(), time.Now), account("checkout")), server, spiffeid.MatchAny(), spiffeid.MatchAny(), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cErr, sErr := handshake(t,
				tlsconfig.MTLSClientConfig(tt.client.svid, tt.client.bundle, tlsconfig.AdaptMatcher(tt.wantServer)),
				tlsconfig.MTLSServerConfig(tt.server.svid, tt.server.bundle, tlsconfig.AdaptMatcher(tt.wantClient)))
			if failed := cErr != nil || sErr != nil; failed != tt.fails {
				t.Errorf("client: %v; server: %v; want failure %v", cErr, sErr, tt.fails)
			}
		})
	}
}

// Every request that is not for the identity's own P-256 key and name alone is
// refused for good, with the reason.
func TestSignRefuses(t *testing.T) {
	ca := openCA(t, t.TempDir(), time.Now)
	id := account("checkout")
	good, _ := request(t, x509.CertificateRequest{})
	forged := bytes.Clone(good)
	forged[len(forged)-1] ^= 1
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	rsaCSR, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, rsaKey)
	if err != nil {
		t.Fatal(err)
	}
	p384Key, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p384CSR, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, p384Key)
	if err != nil {
		t.Fatal(err)
	}
	withURIs := func(uris ...*url.URL) []byte {
		der, _ := request(t, x509.CertificateRequest{URIs: uris})
		return der
	}
	own, other := uri(t, id.SPIFFE()), uri(t, account("admin").SPIFFE())
	dnsCSR, _ := request(t, x509.CertificateRequest{DNSNames: []string{"bank.example"}})

	tests := []struct {
		name string
		id   model.Identity
		csr  []byte
		want string // empty: signed
	}{
		{"no name", id, good, ""},
		{"own name", id, withURIs(own), ""},
		{"another account's name", id, withURIs(other), "asks for [spiffe://aether.internal/ns/shop/sa/admin]"},
		{"own and another name", id, withURIs(own, other), "asks for"},
		{"DNS name", id, dnsCSR, "asks for DNS, IP or mail names"},
		{"not a request", id, []byte("hello"), "certificate request for spiffe://aether.internal/ns/shop/sa/checkout"},
		{"empty", id, nil, "certificate request for"},
		{"too long", id, make([]byte, 1<<20), "has 1048576 bytes, the limit is 16384"},
		{"not signed by its key", id, forged, "is not signed by its own key"},
		{"RSA key", id, rsaCSR, "type RSA; use ECDSA P-256"},
		{"P-384 key", id, p384CSR, "use ECDSA P-256"},
		{"another trust domain", model.Identity{TrustDomain: "evil.example", Namespace: "a", Account: "b"}, good, "is not of trust domain aether.internal"},
		{"empty trust domain (MESH-27)", model.Identity{Namespace: "a", Account: "b"}, good, `trust domain ""`},
		{"upper-case trust domain", model.Identity{TrustDomain: "Aether.Internal", Namespace: "a", Account: "b"}, good, "is not a lower-case domain name"},
		{"trust domain with scheme", model.Identity{TrustDomain: "spiffe://aether.internal", Namespace: "a", Account: "b"}, good, "is not a lower-case domain name"},
		{"no namespace (MESH-27)", model.Identity{TrustDomain: testDomain, Account: "b"}, good, "identity spiffe://aether.internal/ns//sa/b"},
		{"no account", model.Identity{TrustDomain: testDomain, Namespace: "a"}, good, "identity spiffe://aether.internal/ns/a/sa/"},
		{"account that climbs", model.Identity{TrustDomain: testDomain, Namespace: "a", Account: "b/../c"}, good, "identity spiffe://aether.internal/ns/a/sa/b/../c"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ca.Sign(t.Context(), identity.SignRequest{Node: "n1", Identity: tt.id, CSR: tt.csr})
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if !errors.Is(err, identity.ErrRefused) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want a refusal with %q", err, tt.want)
			}
		})
	}
}

// FuzzSign: no request makes the CA panic or certify another name.
func FuzzSign(f *testing.F) {
	ca := openCA(f, f.TempDir(), time.Now)
	id := account("checkout")
	plain, _ := request(f, x509.CertificateRequest{})
	own, _ := request(f, x509.CertificateRequest{URIs: []*url.URL{uri(f, id.SPIFFE())}})
	other, _ := request(f, x509.CertificateRequest{URIs: []*url.URL{uri(f, account("admin").SPIFFE())}, DNSNames: []string{"a"}})
	for _, seed := range [][]byte{nil, plain, own, other} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, csr []byte) {
		chain, err := ca.Sign(t.Context(), identity.SignRequest{Identity: id, CSR: csr})
		if err != nil {
			if !errors.Is(err, identity.ErrRefused) {
				t.Errorf("not a refusal: %v", err)
			}
			return
		}
		c := parseCert(t, chain[0])
		if len(c.URIs) != 1 || c.URIs[0].String() != id.SPIFFE() || len(c.DNSNames) > 0 {
			t.Errorf("certified %v %v", c.URIs, c.DNSNames)
		}
	})
}

// FuzzOpenCA: no content of the file keeps the CA from starting, other than a
// sound root that is not for here and now.
func FuzzOpenCA(f *testing.F) {
	dir := f.TempDir()
	openCA(f, dir, time.Now)
	good := readFile(f, filepath.Join(dir, "ca.pem"))
	for _, seed := range [][]byte{nil, good, good[:len(good)/2], slices.Concat(good, good)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, "ca.pem"), data)
		ca, err := identity.OpenCA(dir, testDomain, time.Now, quiet())
		if err != nil {
			if !strings.Contains(err.Error(), "move the file away") {
				t.Error(err)
			}
			return
		}
		sign(t, ca, account("checkout"))
	})
}

func BenchmarkSign(b *testing.B) {
	ca := openCA(b, b.TempDir(), time.Now)
	csr, _ := request(b, x509.CertificateRequest{})
	for b.Loop() {
		if _, err := ca.Sign(b.Context(), identity.SignRequest{Identity: account("checkout"), CSR: csr}); err != nil {
			b.Fatal(err)
		}
	}
}
