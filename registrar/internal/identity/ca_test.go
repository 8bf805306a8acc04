package identity_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// An SVID says exactly what contract 3 and the SPIFFE X.509 profile ask: one URI
// SAN in the namespaced account form (MESH-27), P-256, 24 h, both ends.
func TestSVIDProfile(t *testing.T) {
	clock := newManualClock()
	ca := openCA(t, t.TempDir(), clock.Now)
	c := sign(t, ca, account("checkout"))

	if got, want := len(c.URIs), 1; got != want {
		t.Fatalf("%d URI SANs, want %d", got, want)
	}
	if got, want := c.URIs[0].String(), "spiffe://aether.internal/ns/shop/sa/checkout"; got != want {
		t.Errorf("URI SAN %s, want %s", got, want)
	}
	if n := len(c.DNSNames) + len(c.IPAddresses) + len(c.EmailAddresses); n != 0 {
		t.Errorf("%d other names, want none", n)
	}
	if got, want := c.NotBefore, clock.Now().Add(-time.Minute); !got.Equal(want) {
		t.Errorf("NotBefore %v, want one minute of skew: %v", got, want)
	}
	if got, want := c.NotAfter, clock.Now().Add(24*time.Hour); !got.Equal(want) {
		t.Errorf("NotAfter %v, want %v", got, want)
	}
	if pub, ok := c.PublicKey.(*ecdsa.PublicKey); !ok || pub.Curve != elliptic.P256() {
		t.Errorf("key %T, want P-256", c.PublicKey)
	}
	if c.IsCA || c.KeyUsage != x509.KeyUsageDigitalSignature {
		t.Errorf("IsCA %v, key usage %b", c.IsCA, c.KeyUsage)
	}
	if diff := cmp.Diff([]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, c.ExtKeyUsage); diff != "" {
		t.Errorf("extended key usage: %s", diff)
	}
	if other := sign(t, ca, account("checkout")); other.SerialNumber.Cmp(c.SerialNumber) == 0 {
		t.Error("two certificates with one serial number")
	}
	if err := verify(c, bundleOf(t, ca), clock.Now()); err != nil {
		t.Error(err)
	}
}

// A restarted CA has the same root, and nobody but the owner can read its files.
func TestOpenCAKeepsRoot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "ca")
	first := bundleOf(t, openCA(t, dir, time.Now))
	before := readFile(t, filepath.Join(dir, "ca.pem"))
	second := bundleOf(t, openCA(t, dir, time.Now))
	if !first.Equal(second) || !bytes.Equal(first.PEM(), second.PEM()) {
		t.Error("another root after a restart")
	}
	if !bytes.Equal(before, readFile(t, filepath.Join(dir, "ca.pem"))) {
		t.Error("the file was written again")
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "ca.pem"): 0o600} {
		if got := stat(t, path).Mode().Perm(); got != want {
			t.Errorf("%s has mode %v, want %v", path, got, want)
		}
	}
}

// A file or folder that others can read is closed to them, and said so.
func TestOpenCACorrectsModes(t *testing.T) {
	dir := t.TempDir()
	openCA(t, dir, time.Now)
	file := filepath.Join(dir, "ca.pem")
	chmod(t, dir, 0o755)
	chmod(t, file, 0o644)
	log, lines := newLog()
	if _, err := identity.OpenCA(dir, testDomain, time.Now, log); err != nil {
		t.Fatal(err)
	}
	if d, f := stat(t, dir).Mode().Perm(), stat(t, file).Mode().Perm(); d != 0o700 || f != 0o600 {
		t.Errorf("modes %v and %v", d, f)
	}
	if got := strings.Count(lines.String(), "keys could be read by others"); got != 2 {
		t.Errorf("%d warnings, want 2:\n%s", got, lines)
	}
}

// A damaged file of roots is named and kept aside byte for byte, and a new root is
// made: the corrupt-state rule of the failure table.
func TestOpenCACorrupt(t *testing.T) {
	source := t.TempDir()
	openCA(t, source, time.Now)
	good := readFile(t, filepath.Join(source, "ca.pem"))
	otherDir := t.TempDir()
	openCA(t, otherDir, time.Now)
	other := readFile(t, filepath.Join(otherDir, "ca.pem"))
	keyAt := bytes.Index(good, []byte("-----BEGIN PRIVATE KEY"))
	leafDER, _ := request(t, x509.CertificateRequest{})
	flipped := bytes.Clone(good)
	flipped[200] ^= 0x11

	tests := map[string][]byte{
		"empty":                 {},
		"binary":                {0, 1, 2, 3},
		"half":                  good[:len(good)/2],
		"certificate only":      good[:keyAt],
		"key only":              good[keyAt:],
		"another root's key":    slices.Concat(good[:keyAt], other[bytes.Index(other, []byte("-----BEGIN PRIVATE KEY")):]),
		"garbage after":         slices.Concat(good, []byte("junk")),
		"garbage before":        slices.Concat([]byte("junk\n"), good),
		"one byte flipped":      flipped,
		"not a root":            slices.Concat(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leafDER}), good[keyAt:]),
		"lost its last byte":    bytes.TrimRight(good, "-\n"),
		"zeroes after a crash":  make([]byte, len(good)),
		"second block cut away": slices.Concat(good, good[:keyAt/2]),
	}
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "ca.pem")
			writeFile(t, file, data)
			log, lines := newLog()
			ca, err := identity.OpenCA(dir, testDomain, time.Now, log)
			if err != nil {
				t.Fatal(err)
			}
			sign(t, ca, account("checkout"))
			copies, err := filepath.Glob(file + ".corrupt-*")
			if err != nil || len(copies) != 1 {
				t.Fatalf("copies %v, %v; want one", copies, err)
			}
			if !bytes.Equal(readFile(t, copies[0]), data) {
				t.Error("the copy differs from what was found")
			}
			if !strings.Contains(lines.String(), "where="+file+" ") || !strings.Contains(lines.String(), "copy="+copies[0]) || !strings.Contains(lines.String(), "level=ERROR") {
				t.Errorf("the log does not name file and copy:\n%s", lines)
			}
			if again := bundleOf(t, openCA(t, dir, time.Now)); !again.Equal(bundleOf(t, ca)) {
				t.Error("the new root does not last")
			}
		})
	}
}

// Roots that somebody takes away or spoils under a running CA are put back, and said so:
// else its next start would make others, and every certificate would be reissued. Sound
// ones that somebody put in their place stay for that start, and are told of once.
func TestRootsTakenAway(t *testing.T) {
	otherDir := t.TempDir()
	openCA(t, otherDir, time.Now)
	other := readFile(t, filepath.Join(otherDir, "ca.pem"))
	put := func(data []byte) func(*testing.T, string) {
		return func(t *testing.T, file string) { t.Helper(); writeFile(t, file, data) }
	}
	for _, tt := range []struct {
		name string
		hand func(t *testing.T, file string)
		said string
		back bool
	}{
		{"not touched", func(*testing.T, string) {}, "", true},
		{"removed", remove, "found=nothing", true},
		{"emptied", put(nil), "found=\"damaged, copied to ", true},
		{"garbage", put([]byte("none")), "found=\"damaged, copied to ", true},
		{"other roots", put(other), "the store has other roots than those that sign", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "ca")
			log, lines := newLog()
			ca, err := identity.OpenCA(dir, testDomain, time.Now, log)
			if err != nil {
				t.Fatal(err)
			}
			file, before := filepath.Join(dir, "ca.pem"), bundleOf(t, ca)
			tt.hand(t, file)
			for range 2 {
				if now := bundleOf(t, ca); !now.Equal(before) {
					t.Error("the running CA has other roots")
				}
			}
			if next := bundleOf(t, openCA(t, dir, time.Now)); next.Equal(before) != tt.back {
				t.Errorf("the next start has the roots: %v, want %v", !tt.back, tt.back)
			}
			if n := strings.Count(lines.String(), "level=ERROR"); n != min(len(tt.said), 1) || !strings.Contains(lines.String(), tt.said) {
				t.Errorf("%d errors, want %q once:\n%s", n, tt.said, lines)
			}
		})
	}
}

// What cannot be undone by the registrar is refused with the remedy, and the file
// stays as it was.
func TestOpenCARefuses(t *testing.T) {
	clock := newManualClock()
	tests := []struct {
		name   string
		domain string
		at     time.Duration
		want   []string
	}{
		{"another trust domain", "other.internal", 0, []string{"ca.pem", "holds the root of spiffe://aether.internal, not of spiffe://other.internal", "set the trust domain back"}},
		{"clock before the root", testDomain, -48 * time.Hour, []string{"ca.pem", "correct the clock"}},
		{"empty trust domain", "", 0, []string{`trust domain "" is not a lower-case domain name`}},
		{"bad trust domain", "Aether", 0, []string{`trust domain "Aether" is not a lower-case domain name`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			openCA(t, dir, clock.Now)
			before := readFile(t, filepath.Join(dir, "ca.pem"))
			_, err := identity.OpenCA(dir, tt.domain, func() time.Time { return clock.Now().Add(tt.at) }, quiet())
			if err == nil {
				t.Fatal("opened")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q lacks %q", err, w)
				}
			}
			if !bytes.Equal(before, readFile(t, filepath.Join(dir, "ca.pem"))) {
				t.Error("the file was changed")
			}
		})
	}
}

// A file that cannot be read is not taken for a damaged one: no new root is made
// because of a broken disk.
func TestOpenCAUnreadable(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "ca.pem"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.OpenCA(dir, testDomain, time.Now, quiet()); err == nil || !strings.Contains(err.Error(), "read the roots of trust domain aether.internal") {
		t.Errorf("error %v", err)
	}
}

// What a crash in the middle of a write leaves behind is removed and changes
// nothing.
func TestOpenCAAfterCrash(t *testing.T) {
	dir := t.TempDir()
	before := bundleOf(t, openCA(t, dir, time.Now))
	left := filepath.Join(dir, "ca.pem.tmp-123")
	writeFile(t, left, []byte("-----BEGIN CERT"))
	if after := bundleOf(t, openCA(t, dir, time.Now)); !after.Equal(before) {
		t.Error("another root")
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("leftover is still there: %v", err)
	}
}
