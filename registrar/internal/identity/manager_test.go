package identity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

var errAway = errors.New("signer is away")

// fakeSigner is a CA that can be away, hang, refuse or be replaced.
type fakeSigner struct {
	mu      sync.Mutex
	ca      identity.Signer
	away    bool
	hang    bool
	gate    chan struct{} // when set, requests wait until it is closed
	refuse  map[model.Identity]bool
	signed  int // successes
	asked   int
	inside  int
	highest int // of inside
}

func (f *fakeSigner) set(change func(*fakeSigner)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeSigner) counts() (signed, asked int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.signed, f.asked
}

func (f *fakeSigner) Sign(ctx context.Context, req identity.SignRequest) ([][]byte, error) {
	f.mu.Lock()
	f.asked++
	f.inside++
	f.highest = max(f.highest, f.inside)
	ca, away, hang, gate, refuse := f.ca, f.away, f.hang, f.gate, f.refuse[req.Identity]
	f.mu.Unlock()
	defer f.set(func(f *fakeSigner) { f.inside-- })
	if gate != nil {
		<-gate
		ctx = context.WithoutCancel(ctx) // the answer comes late, but it comes
	}
	switch {
	case hang:
		<-ctx.Done()
		return nil, ctx.Err()
	case away:
		return nil, errAway
	case refuse:
		return nil, fmt.Errorf("%w: not on this node", identity.ErrRefused)
	}
	chain, err := ca.Sign(ctx, req)
	if err == nil {
		f.set(func(f *fakeSigner) { f.signed++ })
	}
	return chain, err
}

func (f *fakeSigner) Bundle(ctx context.Context) (identity.Bundle, error) {
	f.mu.Lock()
	ca, away, hang := f.ca, f.away, f.hang
	f.mu.Unlock()
	switch {
	case hang:
		<-ctx.Done()
		return identity.Bundle{}, ctx.Err()
	case away:
		return identity.Bundle{}, errAway
	}
	return ca.Bundle(ctx)
}

// told records what a manager's callbacks were told, in order.
type told struct {
	mu      sync.Mutex
	events  []string
	svids   map[model.Identity]identity.SVID
	bundles []identity.Bundle
}

func (r *told) update(s identity.SVID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, "svid "+s.Identity.Account)
	if r.svids == nil {
		r.svids = map[model.Identity]identity.SVID{}
	}
	r.svids[s.Identity] = s
}

func (r *told) bundle(b identity.Bundle) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf("bundle of %d", len(b.Roots)))
	r.bundles = append(r.bundles, b)
}

func (r *told) release(id model.Identity) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, "release "+id.Account)
	delete(r.svids, id)
}

func (r *told) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.events
	r.events = nil
	return out
}

func (r *told) svid(id model.Identity) identity.SVID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.svids[id]
}

// rig is a running manager in a synctest bubble.
type rig struct {
	*identity.Manager
	signer *fakeSigner
	told   *told
	log    *logBuffer
	dir    string
	stop   func()
}

// start runs a manager over dir; change may alter its configuration.
func start(t *testing.T, dir string, signer *fakeSigner, change func(*identity.ManagerConfig)) *rig {
	t.Helper()
	r := &rig{signer: signer, told: &told{}, dir: dir}
	var log *slog.Logger
	log, r.log = newLog()
	store, err := identity.OpenFileStore(filepath.Join(dir, "svids"), time.Now, log)
	if err != nil {
		t.Fatal(err)
	}
	cfg := identity.ManagerConfig{
		Signer: signer, Node: "n1", Store: store, Log: log,
		OnBundle: r.told.bundle, OnUpdate: r.told.update, OnRelease: r.told.release,
	}
	if change != nil {
		change(&cfg)
	}
	if r.Manager, err = identity.NewManager(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	r.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(r.stop)
	return r
}

func newSigner(t *testing.T, dir string) *fakeSigner {
	t.Helper()
	return &fakeSigner{ca: openCA(t, dir, time.Now), refuse: map[model.Identity]bool{}}
}

func (r *rig) ensure(t *testing.T, id model.Identity) identity.SVID {
	t.Helper()
	s, err := r.Ensure(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (r *rig) files(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(r.dir, "svids", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func equalSVID(a, b identity.SVID) bool {
	return bytes.Equal(a.ChainPEM, b.ChainPEM) && bytes.Equal(a.KeyPEM, b.KeyPEM) && a.NotAfter.Equal(b.NotAfter)
}

// Ensure returns only after the bundle and then the SVID were handed on, so that
// an ADD never builds a listener whose secret nobody has (MESH-25, MESH-46).
func TestEnsureDeliversFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		s := r.ensure(t, account("checkout"))
		if diff := cmp.Diff([]string{"bundle of 1", "svid checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if !equalSVID(s, r.told.svid(account("checkout"))) {
			t.Error("another SVID was delivered")
		}
		if err := verify(leafOf(t, s), r.Bundle(), time.Now()); err != nil {
			t.Error(err)
		}
		if again := r.ensure(t, account("checkout")); !equalSVID(again, s) {
			t.Error("a second user of an identity got another SVID")
		}
		if got := r.told.take(); got != nil {
			t.Errorf("told again: %v", got)
		}
	})
}

// Equally named accounts of two namespaces have two certificates (MESH-27, I8).
func TestEnsureKeepsNamespacesApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		a, b := account("api"), account("api")
		b.Namespace = "ops"
		sa, sb := r.ensure(t, a), r.ensure(t, b)
		if ua, ub := leafOf(t, sa).URIs[0].String(), leafOf(t, sb).URIs[0].String(); ua != a.SPIFFE() || ub != b.SPIFFE() {
			t.Errorf("%s and %s", ua, ub)
		}
		if bytes.Equal(sa.KeyPEM, sb.KeyPEM) {
			t.Error("one key for two identities")
		}
	})
}

// An SVID is renewed once in the twentieth of its life before half of it, with a
// new key, and the old one is served until then.
func TestRenewAtHalfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		ids := make([]model.Identity, 40)
		first := map[model.Identity]identity.SVID{}
		for i := range ids {
			ids[i] = account(fmt.Sprintf("a%d", i))
			first[ids[i]] = r.ensure(t, ids[i])
		}
		r.told.take()

		life := 24*time.Hour + time.Minute
		time.Sleep(life/2 - life/20 - time.Minute)
		synctest.Wait()
		if got := r.told.take(); got != nil {
			t.Fatalf("renewed before 45%% of life: %v", got)
		}
		renewedAt := map[time.Time]bool{}
		for range int(life/20/time.Minute) + 1 {
			time.Sleep(time.Minute)
			synctest.Wait()
			if ev := r.told.take(); len(ev) > 0 {
				renewedAt[time.Now()] = true
			}
		}
		for _, id := range ids {
			now := r.told.svid(id)
			if bytes.Equal(now.ChainPEM, first[id].ChainPEM) || bytes.Equal(now.KeyPEM, first[id].KeyPEM) {
				t.Errorf("%s not renewed by half-life", id.Account)
			}
			if err := verify(leafOf(t, now), r.Bundle(), time.Now()); err != nil {
				t.Error(err)
			}
		}
		if len(renewedAt) < 10 {
			t.Errorf("40 renewals fell into %d minutes of 73: no jitter", len(renewedAt))
		}
		if signed, _ := r.signer.counts(); signed != 80 {
			t.Errorf("%d signatures for 40 identities over half a life, want 80", signed)
		}
	})
}

// While the signer is away the old SVID stays, the signer is asked with growing
// pauses, and soon after its return the SVID is new.
func TestRenewWhileSignerIsAway(t *testing.T) {
	for _, how := range []string{"error", "hang"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				r := start(t, dir, newSigner(t, dir), nil)
				id := account("checkout")
				old := r.ensure(t, id)
				r.told.take()
				r.signer.set(func(f *fakeSigner) { f.away, f.hang = how == "error", how == "hang" })
				_, before := r.signer.counts()

				time.Sleep(14 * time.Hour) // at least an hour and a half past half-life
				synctest.Wait()
				if got := r.told.take(); got != nil {
					t.Errorf("told %v while the signer was away", got)
				}
				if s := r.ensure(t, id); !equalSVID(s, old) {
					t.Error("the old SVID is not served")
				}
				_, after := r.signer.counts()
				if n := after - before; n < 60 || n > 200 {
					t.Errorf("asked %d times in about two hours, want about once a minute", n)
				}
				if !strings.Contains(r.log.String(), "certificates cannot be renewed") {
					t.Errorf("log:\n%s", r.log)
				}

				r.signer.set(func(f *fakeSigner) { f.away, f.hang = false, false })
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if s := r.told.svid(id); equalSVID(s, old) {
					t.Error("not renewed within two minutes of the signer's return")
				}
			})
		})
	}
}

// With many identities due and the signer away, it is asked a few times,
// not for each of them, and all are renewed when it is back.
func TestRenewManyWhileSignerIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		const n = 300
		first := map[model.Identity]identity.SVID{}
		for i := range n {
			id := account(fmt.Sprintf("a%d", i))
			first[id] = r.ensure(t, id)
		}
		r.signer.set(func(f *fakeSigner) { f.away = true })
		time.Sleep(13 * time.Hour)
		_, before := r.signer.counts()
		time.Sleep(10 * time.Minute)
		_, after := r.signer.counts()
		if got := after - before; got > 200 {
			t.Errorf("%d identities were asked for %d times in ten minutes", n, got)
		}
		r.signer.set(func(f *fakeSigner) { f.away = false })
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		for id, old := range first {
			if equalSVID(r.told.svid(id), old) {
				t.Fatalf("%s not renewed after the signer's return", id.Account)
			}
		}
	})
}

// Identities that the signer refuses never keep the others from being renewed.
func TestRenewWithRefusedIdentities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		for i := range 30 {
			id := account(fmt.Sprintf("refused%d", i))
			r.ensure(t, id)
			r.signer.set(func(f *fakeSigner) { f.refuse[id] = true })
		}
		time.Sleep(time.Hour) // the good one expires last, so it comes last
		good := account("good")
		old := r.ensure(t, good)
		time.Sleep(12*time.Hour + time.Minute)
		synctest.Wait()
		if equalSVID(r.told.svid(good), old) {
			t.Error("not renewed at half-life")
		}
	})
}

// An identity without any certificate fails within the caller's time, with a
// reason and without leaving anything behind; it works when the signer is back.
func TestEnsureWhileSignerIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		signer := newSigner(t, dir)
		reg := prometheus.NewRegistry()
		r := start(t, dir, signer, func(c *identity.ManagerConfig) { c.Metrics = reg })
		id := account("checkout")
		signer.set(func(f *fakeSigner) { f.away = true })
		_, err := r.Ensure(t.Context(), id)
		if !errors.Is(err, errAway) || errors.Is(err, identity.ErrRefused) || !strings.Contains(err.Error(), "certificate for spiffe://aether.internal/ns/shop/sa/checkout") {
			t.Errorf("error %v", err)
		}
		signer.set(func(f *fakeSigner) { f.away, f.hang = false, true })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begin := time.Now()
		if _, err := r.Ensure(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if d := time.Since(begin); d != 5*time.Second {
			t.Errorf("took %v", d)
		}
		if got := gauge(t, reg, "portolan_identity_svids"); got != 0 {
			t.Errorf("%v identities in use after failures", got)
		}
		signer.set(func(f *fakeSigner) { f.hang = false })
		r.ensure(t, id)
	})
}

// A certificate that expired because the signer stayed away is not given to a new
// pod as if it were good.
func TestEnsureExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		id := account("checkout")
		r.ensure(t, id)
		r.signer.set(func(f *fakeSigner) { f.away = true })
		time.Sleep(25 * time.Hour)
		if _, err := r.Ensure(t.Context(), id); !errors.Is(err, errAway) {
			t.Errorf("error %v", err)
		}
		r.signer.set(func(f *fakeSigner) { f.away = false })
		if s := r.ensure(t, id); !s.NotAfter.After(time.Now()) {
			t.Errorf("expired at %v", s.NotAfter)
		}
	})
}

// A signer whose clock is far behind, so that its certificates are past half of
// their life when they come, is not asked without pause.
func TestSignerClockBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		clock := func() time.Time { return time.Now().Add(-13 * time.Hour) }
		r := start(t, dir, &fakeSigner{ca: openCA(t, dir, clock)}, nil)
		r.ensure(t, account("checkout"))
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed < 3 || signed > 22 {
			t.Errorf("%d signatures in ten minutes, want about two a minute", signed)
		}
	})
}

// A refused identity says so, so that the caller does not try again.
func TestEnsureRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		for _, id := range []model.Identity{
			{Namespace: "shop", Account: "a"},
			{TrustDomain: testDomain, Account: "a"},
			{TrustDomain: "evil.example", Namespace: "shop", Account: "a"},
		} {
			if _, err := r.Ensure(t.Context(), id); !errors.Is(err, identity.ErrRefused) {
				t.Errorf("%v: error %v", id, err)
			}
		}
		if f := r.files(t); len(f) != 0 {
			t.Errorf("files %v", f)
		}
	})
}

// A restarted registrar has byte for byte the same bundle and SVIDs and asks the
// signer for nothing: Envoy is sent no secret again (contract 4.8).
func TestRestartKeepsSVIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		first := map[model.Identity]identity.SVID{}
		for i := range 20 {
			id := account(fmt.Sprintf("a%d", i))
			first[id] = r.ensure(t, id)
		}
		bundle := r.Bundle()
		r.stop()
		time.Sleep(10 * time.Hour)

		r = start(t, dir, newSigner(t, dir), nil)
		for id, want := range first {
			if got := r.ensure(t, id); !equalSVID(got, want) {
				t.Errorf("%s has another SVID after the restart", id.Account)
			}
		}
		if !bytes.Equal(r.Bundle().PEM(), bundle.PEM()) {
			t.Error("another bundle after the restart")
		}
		if signed, asked := r.signer.counts(); signed+asked != 0 {
			t.Errorf("%d signatures after the restart", asked)
		}
		// Renewed at the time that was set before the restart.
		time.Sleep(2*time.Hour + time.Minute)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed != len(first) {
			t.Errorf("%d of %d renewed by half-life", signed, len(first))
		}
	})
}

// After a restart past half-life an SVID is new; with the signer away the stored
// one serves until it expires and is renewed when the signer is back; an expired
// one is never used.
func TestRestartPastHalfLife(t *testing.T) {
	tests := []struct {
		name  string
		after time.Duration
		away  bool
		want  string // same, new or error
	}{
		{"signer there", 13 * time.Hour, false, "new"},
		{"signer away", 13 * time.Hour, true, "same"},
		{"signer away, expired", 25 * time.Hour, true, "error"},
		{"signer there, expired", 25 * time.Hour, false, "new"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				id := account("checkout")
				r := start(t, dir, newSigner(t, dir), nil)
				old := r.ensure(t, id)
				r.stop()
				time.Sleep(tt.after)
				signer := newSigner(t, dir)
				r = start(t, dir, signer, nil)
				if err := waitBundle(r); err != nil {
					t.Fatal(err)
				}
				signer.set(func(f *fakeSigner) { f.away = tt.away })
				s, err := r.Ensure(t.Context(), id)
				got := "new"
				switch {
				case err != nil:
					got = "error"
				case equalSVID(s, old):
					got = "same"
				}
				if got != tt.want {
					t.Fatalf("%s (%v), want %s", got, err, tt.want)
				}
				signer.set(func(f *fakeSigner) { f.away = false })
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if tt.want == "same" && equalSVID(r.told.svid(id), old) {
					t.Error("not renewed after the signer's return")
				}
			})
		})
	}
}

// waitBundle waits until Run has fetched the bundle.
func waitBundle(r *rig) error {
	synctest.Wait()
	if len(r.Bundle().Roots) == 0 {
		return errors.New("no bundle")
	}
	return nil
}

// A stored SVID that is damaged, another one's, or of a root that is gone is
// replaced, with a log line that names the file.
func TestRestartWithDamagedFiles(t *testing.T) {
	damage := map[string]func(t *testing.T, r *rig, file string){
		"empty":   func(t *testing.T, _ *rig, file string) { t.Helper(); writeFile(t, file, nil) },
		"garbage": func(t *testing.T, _ *rig, file string) { t.Helper(); writeFile(t, file, []byte("\x00\x01junk")) },
		"cut short": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			data := readFile(t, file)
			writeFile(t, file, data[:len(data)-40])
		},
		"key only": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			data := readFile(t, file)
			writeFile(t, file, data[:bytes.Index(data, []byte("-----BEGIN CERT"))])
		},
		"junk after": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			writeFile(t, file, append(readFile(t, file), "junk"...))
		},
		"a folder": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o700)); err != nil {
				t.Fatal(err)
			}
		},
		"another identity's": func(t *testing.T, r *rig, file string) {
			t.Helper()
			r.ensure(t, account("other"))
			for _, f := range r.files(t) {
				if f != file {
					writeFile(t, file, readFile(t, f))
				}
			}
		},
		"another key": func(t *testing.T, r *rig, file string) {
			t.Helper()
			r.ensure(t, account("other"))
			for _, f := range r.files(t) {
				if f == file {
					continue
				}
				own, other := readFile(t, file), readFile(t, f)
				cert := []byte("-----BEGIN CERT")
				writeFile(t, file, append(bytes.Clone(other[:bytes.Index(other, cert)]), own[bytes.Index(own, cert):]...))
			}
		},
		"root remade": func(t *testing.T, r *rig, _ string) {
			t.Helper()
			writeFile(t, filepath.Join(r.dir, "ca.pem"), []byte("junk"))
		},
	}
	for name, do := range damage {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				id := account("checkout")
				r := start(t, dir, newSigner(t, dir), nil)
				old := r.ensure(t, id)
				file := r.files(t)[0]
				do(t, r, file)
				r.stop()

				r = start(t, dir, newSigner(t, dir), nil)
				s := r.ensure(t, id)
				if equalSVID(s, old) || bytes.Equal(s.KeyPEM, old.KeyPEM) {
					t.Error("not replaced")
				}
				if err := verify(leafOf(t, s), r.Bundle(), time.Now()); err != nil {
					t.Error(err)
				}
				if !strings.Contains(r.log.String(), file) || !strings.Contains(r.log.String(), "a new one is signed") {
					t.Errorf("the log does not name %s:\n%s", file, r.log)
				}
			})
		})
	}
}

// The last Release forgets SVID, key and file; one before it changes nothing.
func TestRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		id := account("checkout")
		r.Release(id) // not in use: nothing happens
		first := r.ensure(t, id)
		r.ensure(t, id)
		r.Release(id)
		synctest.Wait()
		if diff := cmp.Diff([]string{"bundle of 1", "svid checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if again := r.ensure(t, id); !equalSVID(again, first) {
			t.Error("another SVID while it was in use")
		}
		r.Release(id)
		r.Release(id)
		r.Release(id)
		synctest.Wait()
		if diff := cmp.Diff([]string{"release checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if f := r.files(t); len(f) != 0 {
			t.Errorf("files %v", f)
		}
		if again := r.ensure(t, id); bytes.Equal(again.KeyPEM, first.KeyPEM) {
			t.Error("a forgotten key is back")
		}
		time.Sleep(13 * time.Hour)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed != 3 {
			t.Errorf("%d signatures, want two first ones and one renewal", signed)
		}
	})
}

// A root that leaves the signer's bundle takes its SVIDs with it: all are replaced
// within a minute, the new bundle first.
func TestBundleReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		ids := []model.Identity{account("a"), account("b"), account("c")}
		for _, id := range ids {
			r.ensure(t, id)
		}
		r.told.take()
		next := openCA(t, t.TempDir(), time.Now)
		r.signer.set(func(f *fakeSigner) { f.ca = next })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		events := r.told.take()
		if len(events) != 4 || events[0] != "bundle of 1" {
			t.Fatalf("told %v", events)
		}
		for _, id := range ids {
			if err := verify(leafOf(t, r.told.svid(id)), bundleOf(t, next), time.Now()); err != nil {
				t.Errorf("%s: %v", id.Account, err)
			}
		}
	})
}

// A bundle without roots never replaces a good one (contract 4.8).
func TestBundleEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		r.ensure(t, account("a"))
		r.told.take()
		r.signer.set(func(f *fakeSigner) { f.ca = rootless{} })
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if len(r.Bundle().Roots) != 1 || r.told.take() != nil {
			t.Error("an empty bundle was taken over")
		}
		if !strings.Contains(r.log.String(), "the signer has none") {
			t.Errorf("log:\n%s", r.log)
		}
	})
}

type rootless struct{}

func (rootless) Sign(context.Context, identity.SignRequest) ([][]byte, error) { return nil, errAway }

func (rootless) Bundle(context.Context) (identity.Bundle, error) {
	return identity.Bundle{TrustDomain: testDomain}, nil
}

// answer is a signer with one answer for all.
type answer struct {
	*identity.CA
	chain func(req identity.SignRequest) [][]byte
}

func (a answer) Sign(_ context.Context, req identity.SignRequest) ([][]byte, error) {
	return a.chain(req), nil
}

// What a signer answers is checked: nothing unsound is ever handed on.
func TestSignerAnswersChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, other := openCA(t, t.TempDir(), time.Now), openCA(t, t.TempDir(), time.Now)
		from := func(s identity.Signer, id model.Identity, csr []byte) [][]byte {
			if csr == nil {
				return [][]byte{sign(t, s, id).Raw}
			}
			chain, err := s.Sign(t.Context(), identity.SignRequest{Identity: id, CSR: csr})
			if err != nil {
				t.Fatal(err)
			}
			return chain
		}
		anonymous, _ := ecdsaCSR(t)
		tests := []struct {
			name  string
			chain func(req identity.SignRequest) [][]byte
			want  string
		}{
			{"nothing", func(identity.SignRequest) [][]byte { return nil }, "empty certificates chain"},
			{"garbage", func(identity.SignRequest) [][]byte { return [][]byte{{1, 2}} }, "the signer's answer"},
			{"another key", func(req identity.SignRequest) [][]byte { return from(ca, req.Identity, nil) }, "is for another key"},
			{"another identity", func(identity.SignRequest) [][]byte { return from(ca, account("admin"), anonymous) }, "says spiffe://aether.internal/ns/shop/sa/admin"},
			{"an unknown root", func(req identity.SignRequest) [][]byte { return from(other, req.Identity, req.CSR) }, "does not verify"},
			{"the root itself", func(identity.SignRequest) [][]byte { return [][]byte{bundleOf(t, ca).Roots[0].Raw} }, "does not verify"},
		}
		for _, tt := range tests {
			dir := t.TempDir()
			r := start(t, dir, &fakeSigner{ca: answer{ca, tt.chain}}, nil)
			_, err := r.Ensure(t.Context(), account("checkout"))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: error %v, want %q", tt.name, err, tt.want)
			}
			synctest.Wait()
			if got := r.told.take(); len(got) != 1 || got[0] != "bundle of 1" {
				t.Errorf("%s: told %v", tt.name, got)
			}
			if f := r.files(t); len(f) != 0 {
				t.Errorf("%s: files %v", tt.name, f)
			}
			r.stop()
		}
	})
}

// A clock that was ahead for a while leaves certificates that are not valid yet;
// they are replaced when the clock is right again.
func TestClockSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ahead atomic.Int64
		clock := func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
		dir := t.TempDir()
		signer := &fakeSigner{ca: openCA(t, dir, clock)}
		r := start(t, dir, signer, func(c *identity.ManagerConfig) { c.Clock = clock })
		id := account("checkout")
		r.ensure(t, id)
		ahead.Store(int64(20 * time.Hour))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if leaf := leafOf(t, r.told.svid(id)); !leaf.NotBefore.After(time.Now()) {
			t.Fatal("not renewed by the wrong clock; the test has no subject")
		}
		ahead.Store(0)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if err := verify(leafOf(t, r.told.svid(id)), r.Bundle(), time.Now()); err != nil {
			t.Errorf("after the clock was set right: %v", err)
		}
	})
}

// A slow receiver is told the newest state of each identity, in order, and never
// an old one after a new one.
func TestSlowReceiver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		gate := make(chan struct{})
		var events []string
		r := start(t, dir, newSigner(t, dir), func(c *identity.ManagerConfig) {
			c.OnBundle = func(identity.Bundle) { <-gate }
			c.OnUpdate = func(s identity.SVID) { events = append(events, "svid "+s.Identity.Account) }
			c.OnRelease = func(id model.Identity) { events = append(events, "release "+id.Account) }
		})
		synctest.Wait() // the bundle's delivery hangs
		var wg sync.WaitGroup
		for _, name := range []string{"a", "b"} {
			wg.Go(func() {
				if _, err := r.Ensure(context.Background(), account(name)); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Ensure(ctx, account("c")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Ensure returned before its SVID was delivered: %v", err)
		}
		close(gate)
		wg.Wait()
		synctest.Wait()
		if diff := cmp.Diff([]string{"svid a", "svid b", "release c"}, events); diff != "" {
			t.Error(diff)
		}
	})
}

// Ensure ends with the manager.
func TestEnsureAfterStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		r.stop()
		if _, err := r.Ensure(context.Background(), account("a")); err == nil || !strings.Contains(err.Error(), "has stopped") {
			t.Errorf("error %v", err)
		}
	})
}

// A thousand pods of a hundred identities at once cost a hundred signatures, never
// more than the bound of them at one time.
func TestEnsureConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		gate := make(chan struct{})
		r.signer.set(func(f *fakeSigner) { f.gate = gate })
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				if _, err := r.Ensure(context.Background(), account(fmt.Sprintf("a%d", i%100))); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		close(gate)
		wg.Wait()
		if signed, _ := r.signer.counts(); signed != 100 {
			t.Errorf("%d signatures for 100 identities", signed)
		}
		r.signer.set(func(f *fakeSigner) {
			if f.highest != 16 {
				t.Errorf("%d signatures at one time, want the bound, 16", f.highest)
			}
		})
	})
}

// An identity that is released while its renewal is under way stays released: it
// is not told again and leaves no file (XDS-47).
func TestReleaseDuringRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		id := account("checkout")
		r.ensure(t, id)
		gate := make(chan struct{})
		r.signer.set(func(f *fakeSigner) { f.gate = gate })
		time.Sleep(12*time.Hour + time.Minute)
		synctest.Wait()
		if _, asked := r.signer.counts(); asked != 2 {
			t.Fatalf("%d requests, want the renewal under way", asked)
		}
		r.told.take()
		r.Release(id)
		close(gate)
		synctest.Wait()
		if diff := cmp.Diff([]string{"release checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if f := r.files(t); len(f) != 0 {
			t.Errorf("files %v", f)
		}
	})
}

// Random users of random identities, with renewals among them, end in a state that
// equals what is in use: in memory, in the receiver and on disk.
func TestEnsureReleaseRandomly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		const workers, rounds, names = 8, 60, 5
		held := make([]map[model.Identity]int, workers)
		var wg sync.WaitGroup
		for w := range workers {
			held[w] = map[model.Identity]int{}
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(w), 1))
				for range rounds {
					if rnd.IntN(3) == 0 {
						time.Sleep(time.Duration(rnd.IntN(10)) * time.Hour)
					}
					id := account(fmt.Sprintf("a%d", rnd.IntN(names)))
					if held[w][id] > 0 && rnd.IntN(2) == 0 {
						held[w][id]--
						r.Release(id)
						continue
					}
					if _, err := r.Ensure(context.Background(), id); err != nil {
						t.Error(err)
						return
					}
					held[w][id]++
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		want := map[model.Identity]bool{}
		for _, h := range held {
			for id, n := range h {
				if n > 0 {
					want[id] = true
				}
			}
		}
		got := map[model.Identity]bool{}
		for id, s := range r.told.svids {
			got[id] = true
			if now := r.ensure(t, id); !equalSVID(now, s) {
				t.Errorf("%s: the receiver has another SVID", id.Account)
			}
			if err := verify(leafOf(t, s), r.Bundle(), time.Now()); err != nil {
				t.Errorf("%s: %v", id.Account, err)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("in use and told differ: %s", diff)
		}
		if f := r.files(t); len(f) != len(want) {
			t.Errorf("%d files for %d identities: %v", len(f), len(want), f)
		}
	})
}

// The metrics count identities, roots, signatures and the soonest expiry.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		reg := prometheus.NewRegistry()
		r := start(t, dir, newSigner(t, dir), func(c *identity.ManagerConfig) { c.Metrics = reg })
		if got := gauge(t, reg, "portolan_identity_soonest_expiry_timestamp_seconds"); got != 0 {
			t.Errorf("soonest expiry %v without certificates", got)
		}
		first := r.ensure(t, account("a"))
		time.Sleep(time.Hour)
		r.ensure(t, account("b"))
		r.signer.set(func(f *fakeSigner) { f.refuse[account("c")] = true })
		_, _ = r.Ensure(t.Context(), account("c"))
		want := map[string]float64{
			"portolan_identity_svids":                            2,
			"portolan_identity_roots":                            1,
			"portolan_identity_soonest_expiry_timestamp_seconds": float64(first.NotAfter.Unix()),
			"portolan_identity_reused_total":                     0,
			"portolan_identity_signatures_total error":           0,
			"portolan_identity_signatures_total ok":              2,
			"portolan_identity_signatures_total refused":         1,
		}
		got := map[string]float64{}
		for name := range want {
			got[name] = gauge(t, reg, name)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if _, err := identity.NewManager(identity.ManagerConfig{Signer: r.signer, Log: quiet(), Metrics: reg}); err == nil {
			t.Error("two managers share one registry")
		}
	})
}

// gauge returns the value of a gauge or counter, named by itself or followed by
// its label's value.
func gauge(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	list, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		for _, m := range f.GetMetric() {
			got := f.GetName()
			for _, l := range m.GetLabel() {
				got += " " + l.GetValue()
			}
			if got == name {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// A private key never reaches a log line or a message.
func TestSVIDHidesKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		s := r.ensure(t, account("checkout"))
		log, lines := newLog()
		log.Info("x", "svid", s)
		out := lines.String() + fmt.Sprintf("%v %+v %s", s, s, s)
		if strings.Contains(out, "PRIVATE KEY") || strings.Contains(out, string(s.KeyPEM[40:60])) {
			t.Errorf("key shown: %s", out)
		}
		if !strings.Contains(out, s.Identity.SPIFFE()) {
			t.Errorf("identity not shown: %s", out)
		}
	})
}

// A manager without its necessary parts is refused.
func TestNewManagerRefuses(t *testing.T) {
	if _, err := identity.NewManager(identity.ManagerConfig{Log: quiet()}); err == nil {
		t.Error("no error without a signer")
	}
	if _, err := identity.NewManager(identity.ManagerConfig{Signer: rootless{}}); err == nil {
		t.Error("no error without a log")
	}
}

// Keys in the store are readable by their owner alone, and what no certificate
// can need any more is removed when the store is opened.
func TestFileStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "svids")
	open := func() *identity.FileStore {
		t.Helper()
		s, err := identity.OpenFileStore(dir, time.Now, quiet())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	if got, err := s.Get("k"); got != nil || err != nil {
		t.Errorf("empty store: %q, %v", got, err)
	}
	for _, v := range []string{"one", "two"} {
		if err := s.Put("k", []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.Get("k"); string(got) != "two" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if d, f := stat(t, dir).Mode().Perm(), stat(t, s.Where("k")).Mode().Perm(); d != 0o700 || f != 0o600 {
		t.Errorf("modes %v, %v", d, f)
	}
	writeFile(t, s.Where("k")+".tmp-77", []byte("half"))
	writeFile(t, s.Where("old"), []byte("old"))
	day := time.Now().Add(-25 * time.Hour)
	if err := os.Chtimes(s.Where("old"), day, day); err != nil {
		t.Fatal(err)
	}
	s = open()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
	for range 2 {
		if err := s.Delete("k"); err != nil {
			t.Error(err)
		}
	}
	if got, err := s.Get("k"); got != nil || err != nil {
		t.Errorf("deleted: %q, %v", got, err)
	}
}
