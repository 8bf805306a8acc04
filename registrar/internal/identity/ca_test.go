package identity_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
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
			if !strings.Contains(lines.String(), "file="+file+" ") || !strings.Contains(lines.String(), "copy="+copies[0]) || !strings.Contains(lines.String(), "level=ERROR") {
				t.Errorf("the log does not name file and copy:\n%s", lines)
			}
			if again := bundleOf(t, openCA(t, dir, time.Now)); !again.Equal(bundleOf(t, ca)) {
				t.Error("the new root does not last")
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
