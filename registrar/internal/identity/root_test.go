package identity_test

import (
	"bytes"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// The root carries the trust domain's SPIFFE ID and may sign certificates and
// revocation lists, nothing else.
func TestRootProfile(t *testing.T) {
	clock := newManualClock()
	r := bundleOf(t, openCA(t, t.TempDir(), clock.Now)).Roots[0]
	if len(r.URIs) != 1 || r.URIs[0].String() != "spiffe://aether.internal" {
		t.Errorf("URI SAN %v", r.URIs)
	}
	if !r.IsCA || !r.BasicConstraintsValid || r.KeyUsage != x509.KeyUsageCertSign|x509.KeyUsageCRLSign || len(r.ExtKeyUsage) > 0 {
		t.Errorf("IsCA %v, key usage %b, extended %v", r.IsCA, r.KeyUsage, r.ExtKeyUsage)
	}
	if got := r.NotAfter.Sub(clock.Now()); got != 10*365*24*time.Hour {
		t.Errorf("valid for %v", got)
	}
}

// The root's successor is published a day before it signs and the old root stays
// until the last certificate below it has expired, so that no peer ever meets a
// certificate whose root it does not know; a restart at any moment changes nothing.
func TestRootSuccession(t *testing.T) {
	const day = 24 * time.Hour
	half := (10*365*day + time.Minute) / 2
	clock := newManualClock()
	dir := t.TempDir()
	ca := openCA(t, dir, clock.Now)
	start := clock.Now().Add(-time.Minute) // the root's NotBefore
	first := bundleOf(t, ca).Roots[0]
	var last *x509.Certificate // the last SVID below the first root

	steps := []struct {
		name      string
		at        time.Duration
		roots     int
		signsWith int // index in the bundle
	}{
		{"before half-life", half - time.Second, 1, 0},
		{"at half-life: the successor is published", half + time.Second, 2, 0},
		{"it does not sign within a day", half + day - time.Minute, 2, 0},
		{"it signs after a day", half + day + time.Minute, 2, 1},
		{"the old root stays while its certificates live", half + 2*day, 2, 1},
		{"and goes after that", half + 2*day + 2*time.Hour, 1, 0},
	}
	for _, st := range steps {
		clock.Advance(start.Add(st.at).Sub(clock.Now()))
		for _, restarted := range []bool{false, true} {
			if restarted {
				ca = openCA(t, dir, clock.Now)
			}
			b := bundleOf(t, ca)
			if len(b.Roots) != st.roots {
				t.Fatalf("%s (restarted %v): %d roots, want %d", st.name, restarted, len(b.Roots), st.roots)
			}
			c := sign(t, ca, account("checkout"))
			if err := c.CheckSignatureFrom(b.Roots[st.signsWith]); err != nil {
				t.Errorf("%s (restarted %v): signed by another root: %v", st.name, restarted, err)
			}
			if c.CheckSignatureFrom(first) == nil {
				last = c
			}
			if last.NotAfter.After(clock.Now()) {
				if err := verify(last, b, clock.Now()); err != nil {
					t.Errorf("%s (restarted %v): a living certificate is not trusted: %v", st.name, restarted, err)
				}
			}
		}
	}
}

// A root that cannot be stored is never used; the old one goes on.
func TestRootSuccessionWithoutDisk(t *testing.T) {
	clock := newManualClock()
	dir := filepath.Join(t.TempDir(), "ca")
	log, lines := newLog()
	ca, err := identity.OpenCA(dir, testDomain, clock.Now, log)
	if err != nil {
		t.Fatal(err)
	}
	before := bundleOf(t, ca)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	clock.Advance(6 * 365 * 24 * time.Hour)
	if after := bundleOf(t, ca); !after.Equal(before) {
		t.Error("a root is trusted that is not on disk")
	}
	for range 3 {
		if err := verify(sign(t, ca, account("checkout")), before, clock.Now()); err != nil {
			t.Error(err)
		}
	}
	if got := strings.Count(lines.String(), "cannot renew the root"); got != 1 {
		t.Errorf("%d log lines within a minute, want 1", got)
	}
}

// A machine that slept through its root's whole life gets a new root, loudly.
func TestRootExpired(t *testing.T) {
	clock := newManualClock()
	dir := t.TempDir()
	before := bundleOf(t, openCA(t, dir, clock.Now))
	clock.Advance(11 * 365 * 24 * time.Hour)
	log, lines := newLog()
	ca, err := identity.OpenCA(dir, testDomain, clock.Now, log)
	if err != nil {
		t.Fatal(err)
	}
	b := bundleOf(t, ca)
	if len(b.Roots) != 1 || b.Equal(before) {
		t.Errorf("%d roots, same as before: %v", len(b.Roots), b.Equal(before))
	}
	if !strings.Contains(lines.String(), "every root of the trust domain has expired") {
		t.Errorf("log:\n%s", lines)
	}
}

// A bundle has one form, whatever the order of its roots (I5).
func TestBundleOrder(t *testing.T) {
	var roots []*x509.Certificate
	for range 3 {
		roots = append(roots, bundleOf(t, openCA(t, t.TempDir(), newManualClock().Now)).Roots...)
	}
	a := identity.NewBundle(testDomain, []*x509.Certificate{roots[0], roots[1], roots[2]})
	b := identity.NewBundle(testDomain, []*x509.Certificate{roots[2], roots[0], roots[1], roots[0]})
	if !a.Equal(b) || !bytes.Equal(a.PEM(), b.PEM()) {
		t.Error("the same roots in another order have other bytes")
	}
}
