package identity_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"net/url"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const testDomain = "aether.internal"

// TestMain fails the package when a test leaves a goroutine behind (XDS-31).
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// logBuffer collects log lines of concurrent writers.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func newLog() (*slog.Logger, *logBuffer) {
	b := &logBuffer{}
	return slog.New(slog.NewTextHandler(b, nil)), b
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// manualClock is a wall clock that the test sets.
type manualClock struct {
	mu sync.Mutex
	t  time.Time
}

func newManualClock() *manualClock {
	return &manualClock{t: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
}

func (c *manualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *manualClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

func account(name string) model.Identity {
	return model.Identity{TrustDomain: testDomain, Namespace: "shop", Account: name}
}

func openCA(tb testing.TB, dir string, clock identity.Clock) *identity.CA {
	tb.Helper()
	ca, err := identity.OpenCA(dir, testDomain, clock, quiet())
	if err != nil {
		tb.Fatal(err)
	}
	return ca
}

func bundleOf(tb testing.TB, s identity.Signer) identity.Bundle {
	tb.Helper()
	b, err := s.Bundle(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// request returns a CSR of a new P-256 key, with the template's names.
func request(tb testing.TB, tmpl x509.CertificateRequest) ([]byte, *ecdsa.PrivateKey) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &tmpl, key)
	if err != nil {
		tb.Fatal(err)
	}
	return der, key
}

func uri(tb testing.TB, s string) *url.URL {
	tb.Helper()
	u, err := url.Parse(s)
	if err != nil {
		tb.Fatal(err)
	}
	return u
}

// sign has a certificate for id signed and returns it parsed.
func sign(tb testing.TB, s identity.Signer, id model.Identity) *x509.Certificate {
	tb.Helper()
	csr, _ := request(tb, x509.CertificateRequest{})
	chain, err := s.Sign(context.Background(), identity.SignRequest{Node: "n1", Identity: id, CSR: csr})
	if err != nil {
		tb.Fatal(err)
	}
	if len(chain) != 1 {
		tb.Fatalf("chain of %d certificates, want the leaf alone", len(chain))
	}
	return parseCert(tb, chain[0])
}

func parseCert(tb testing.TB, der []byte) *x509.Certificate {
	tb.Helper()
	c, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// leafOf returns the first certificate of an SVID.
func leafOf(tb testing.TB, s identity.SVID) *x509.Certificate {
	tb.Helper()
	b, _ := pem.Decode(s.ChainPEM)
	if b == nil {
		tb.Fatalf("no certificate in %q", s.ChainPEM)
	}
	return parseCert(tb, b.Bytes)
}

// verify checks c against the bundle at a time.
func verify(c *x509.Certificate, b identity.Bundle, now time.Time) error {
	pool := x509.NewCertPool()
	for _, r := range b.Roots {
		pool.AddCert(r)
	}
	_, err := c.Verify(x509.VerifyOptions{
		Roots: pool, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	return err
}

// ecdsaCSR returns a request without names.
func ecdsaCSR(tb testing.TB) ([]byte, *ecdsa.PrivateKey) {
	tb.Helper()
	return request(tb, x509.CertificateRequest{})
}
