package spire_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/identity/spire"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/scripts/spiretest"
)

const trustDomain = "mesh.example"

// patience bounds what is waited for; it matters only when something is broken.
const patience = time.Minute

func account(name string) model.Identity {
	return model.Identity{TrustDomain: trustDomain, Namespace: "shop", Account: name}
}

// entry is what an operator registers for an identity.
func entry(id model.Identity) spiretest.Entry {
	return spiretest.Entry{ID: id.SPIFFE(), Selectors: []string{"k8s:ns:" + id.Namespace, "k8s:sa:" + id.Account}}
}

// node is a manager on a source, as `registrar run` has them. What its callbacks are
// told comes out of the channels, in order.
type node struct {
	*identity.Manager
	log     *logBuffer
	bundles chan identity.Bundle
	svids   chan identity.SVID
	stop    func()
}

// logBuffer is a log that is written and read at the same time.
type logBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// start runs a node over the state in dir.
func start(t *testing.T, s *spiretest.SPIRE, dir, selectors string) *node {
	t.Helper()
	n := &node{log: &logBuffer{}, bundles: make(chan identity.Bundle, 1000), svids: make(chan identity.SVID, 1000)}
	log := slog.New(slog.NewTextHandler(n.log, nil))
	store, err := identity.OpenFileStore(filepath.Join(dir, "svids"), time.Now, log)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := spire.ParseSelectors(selectors)
	if err != nil {
		t.Fatal(err)
	}
	source, err := spire.New(spire.Config{
		Socket: s.AdminSocket, TrustDomain: trustDomain, Selectors: parsed, Saved: identity.NewBundleFile(dir), Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	n.Manager, err = identity.NewManager(identity.ManagerConfig{
		Source: source, Store: store, Log: log,
		OnBundle: func(b identity.Bundle) { n.bundles <- b },
		OnUpdate: func(s identity.SVID) { n.svids <- s },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		n.stop()
		if t.Failed() {
			t.Logf("the node's log:\n%s", n.log)
		}
	})
	return n
}

func (n *node) ensure(t *testing.T, id model.Identity) (identity.SVID, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return n.Ensure(ctx, id)
}

func (n *node) mustEnsure(t *testing.T, id model.Identity) identity.SVID {
	t.Helper()
	s, err := n.ensure(t, id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// next returns the next that a channel has.
func next[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		t.Fatalf("no %s within %s", what, patience)
		panic("unreachable")
	}
}

// check verifies a certificate as a peer does.
func check(t *testing.T, s identity.SVID, roots identity.Bundle) *x509.Certificate {
	t.Helper()
	leafBlock, rest := pem.Decode(s.ChainPEM)
	leaf, err := x509.ParseCertificate(leafBlock.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	pool, between := x509.NewCertPool(), x509.NewCertPool()
	between.AppendCertsFromPEM(rest)
	for _, r := range roots.Roots {
		pool.AddCert(r)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Fatal(err)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != s.Identity.SPIFFE() {
		t.Fatalf("the certificate of %s says %v", s.Identity.SPIFFE(), leaf.URIs)
	}
	return leaf
}

// Two accounts get their own certificates from the agent; one whose entry is made
// only after it was asked for gets it, too; and of several entries that match, the
// one of the account is taken.
func TestCertificates(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), spire.DefaultSelectors)
	web, db, late := account("web"), account("db"), account("late")
	s.Register(t, entry(web))
	s.Register(t, entry(db))
	s.Register(t, spiretest.Entry{ID: "spiffe://" + trustDomain + "/everything-of-shop", Selectors: []string{"k8s:ns:shop"}})
	for _, id := range []model.Identity{web, db} {
		check(t, n.mustEnsure(t, id), n.Bundle())
	}

	got := make(chan identity.SVID, 1)
	go func() {
		if s, err := n.Ensure(t.Context(), late); err != nil {
			t.Error(err)
		} else {
			got <- s
		}
	}()
	await(t, "the agent is asked for it", func() bool { return streams(t, s, late) == 1 })
	s.Register(t, entry(late))
	check(t, next(t, got, "certificate of a late entry"), n.Bundle())
}

// Without an entry of exactly its SPIFFE ID an account is refused, with the command
// that makes the entry, and works once the entry is there.
func TestUnknownAccount(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), "portolan:ns:{namespace},portolan:sa:{account}")
	const other = "spiffe://" + trustDomain + "/ns/other/sa/web"
	s.Register(t, spiretest.Entry{ID: other, Selectors: []string{"portolan:ns:shop", "portolan:sa:web"}})
	id := account("web")

	_, err := n.ensure(t, id)
	if !errors.Is(err, identity.ErrRefused) {
		t.Fatalf("got %v, want it refused", err)
	}
	for _, want := range []string{other, "spire-server entry create", "-spiffeID " + id.SPIFFE() + " -selector portolan:ns:shop -selector portolan:sa:web"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\ndoes not say %s", err, want)
		}
	}
	if len(n.svids) > 0 {
		t.Errorf("somebody else's certificate was handed out: %v", <-n.svids)
	}

	s.Register(t, spiretest.Entry{ID: id.SPIFFE(), Selectors: []string{"portolan:ns:shop", "portolan:sa:web"}})
	check(t, n.mustEnsure(t, id), n.Bundle())
}

// The agent renews certificates that live shortly, and each new one is handed on
// before the one before it ends. One whose entry is taken away stays.
func TestRotation(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), spire.DefaultSelectors)
	id := account("web")
	e := entry(id)
	e.Lifetime = 20 * time.Second
	made := s.Register(t, e)
	n.mustEnsure(t, id)
	last := check(t, next(t, n.svids, "first certificate"), n.Bundle())
	for range 3 {
		svid := next(t, n.svids, "renewed certificate")
		leaf := check(t, svid, n.Bundle())
		if !leaf.NotBefore.After(last.NotBefore) || bytes.Equal(leaf.RawSubjectPublicKeyInfo, last.RawSubjectPublicKeyInfo) {
			t.Fatalf("not renewed: from %s, then from %s", last.NotBefore, leaf.NotBefore)
		}
		if leaf.NotBefore.After(last.NotAfter) {
			t.Fatalf("a gap from %s to %s", last.NotAfter, leaf.NotBefore)
		}
		last = leaf
	}

	s.Unregister(t, made)
	await(t, "the log says that the entry is gone", func() bool { return strings.Contains(n.log.String(), "spire-server entry create") })
	if got := n.mustEnsure(t, id); len(got.ChainPEM) == 0 {
		t.Error("the last certificate is gone with its entry")
	}
}

func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !holds(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, patience)
		}
	}
}

// While the agent is away everybody keeps his certificate, also over a restart of
// the registrar; a new account hears why it gets none. When the agent is back, all
// goes on by itself.
func TestAgentAway(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	dir := t.TempDir()
	n := start(t, s, dir, spire.DefaultSelectors)
	web, db := account("web"), account("db")
	s.Register(t, entry(web))
	s.Register(t, entry(db))
	first := n.mustEnsure(t, web)

	s.StopAgent(t)
	await(t, "the log says that the agent is away", func() bool { return strings.Contains(n.log.String(), "no certificates from the SPIRE agent") })
	if got := n.mustEnsure(t, web); !bytes.Equal(got.ChainPEM, first.ChainPEM) {
		t.Error("the certificate in use changed")
	}
	n.stop()

	n = start(t, s, dir, spire.DefaultSelectors)
	got := n.mustEnsure(t, web)
	if !bytes.Equal(got.ChainPEM, first.ChainPEM) || !bytes.Equal(got.KeyPEM, first.KeyPEM) {
		t.Error("after the restart the certificate is another")
	}
	check(t, got, next(t, n.bundles, "saved roots"))
	if next(t, n.svids, "stored certificate"); len(n.svids) > 0 {
		t.Error("told twice")
	}
	_, err := n.ensure(t, db)
	if err == nil || errors.Is(err, identity.ErrRefused) || !strings.Contains(err.Error(), s.AdminSocket) {
		t.Errorf("got %v, want that the agent at %s is away", err, s.AdminSocket)
	}

	s.StartAgent(t) // it has forgotten the keys of workloads
	renewed := next(t, n.svids, "certificate of the agent that is back")
	if check(t, renewed, n.Bundle()); renewed.Identity != web || bytes.Equal(renewed.KeyPEM, first.KeyPEM) {
		t.Errorf("got %s with the same key", renewed.Identity.SPIFFE())
	}
	check(t, n.mustEnsure(t, db), n.Bundle())
	// The stream of the roots says so, which may be back later than that of a certificate.
	await(t, "the log says that the agent is back", func() bool { return strings.Contains(n.log.String(), "the SPIRE agent is back") })
	if said := strings.Count(n.log.String(), "no certificates from the SPIRE agent"); said != 1 {
		t.Errorf("the log says %d times that the agent is away, want once", said)
	}
}

// A new root of the trust domain is trusted before anything is signed by it.
func TestRootChange(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), spire.DefaultSelectors)
	s.Register(t, entry(account("web")))
	svid := n.mustEnsure(t, account("web"))
	if got := next(t, n.bundles, "roots"); len(got.Roots) != 1 {
		t.Fatalf("%d roots, want 1", len(got.Roots))
	}
	s.PrepareRoot(t)
	got := next(t, n.bundles, "changed roots")
	if len(got.Roots) != 2 || got.TrustDomain != trustDomain {
		t.Errorf("%d roots of %s, want 2", len(got.Roots), got.TrustDomain)
	}
	check(t, svid, got)
}

// A registrar that the agent does not let act for others hears what to change.
func TestNoDelegate(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), spire.DefaultSelectors)
	s.Register(t, entry(account("web")))
	n.mustEnsure(t, account("web"))
	s.Unregister(t, s.DelegateEntry)
	await(t, "a new account hears of authorized_delegates", func() bool {
		_, err := n.ensure(t, account("db"))
		return err != nil && !errors.Is(err, identity.ErrRefused) && strings.Contains(err.Error(), "authorized_delegates")
	})
	n.mustEnsure(t, account("web"))
}

// streams is how many streams of an identity the agent has seen.
func streams(t *testing.T, s *spiretest.SPIRE, id model.Identity) int {
	t.Helper()
	n := 0
	for line := range strings.Lines(s.AgentLog(t)) {
		if strings.Contains(line, "Subscribing to cache changes") && strings.Contains(line, "sa:"+id.Account+`\"`) {
			n++
		}
	}
	return n
}

// An identity has one stream however many pods have it.
func TestOneStreamForEachIdentity(t *testing.T) {
	s := spiretest.Start(t, trustDomain)
	n := start(t, s, t.TempDir(), spire.DefaultSelectors)
	for _, name := range []string{"web", "db"} {
		s.Register(t, entry(account(name)))
		for range 20 {
			n.mustEnsure(t, account(name))
		}
		if got := streams(t, s, account(name)); got != 1 {
			t.Errorf("%d streams of %s, want 1", got, name)
		}
	}
}

func TestParseSelectors(t *testing.T) {
	for _, bad := range []string{"", "k8s", "k8s:", ":ns:{namespace}", "k8s:ns:{namespace}", "k8s:sa:{account}", "k8s:ns:{namespace},k8s:sa:{account},", "{namespace}:{account}"} {
		if _, err := spire.ParseSelectors(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
