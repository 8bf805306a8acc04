package identity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

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

// An SVID lingers in memory, not in the store: whoever uses it again within that time has
// the same one, nothing is told, and it is stored again. Then it is forgotten.
func TestLinger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), func(c *identity.ManagerConfig) { c.Linger = time.Minute })
		id := account("checkout")
		first := r.ensure(t, id)
		stored := r.files(t)
		r.told.take()
		for range 3 {
			r.Release(id)
			r.Release(id) // one too many
			if f := r.files(t); len(f) != 0 {
				t.Errorf("files %v while nobody uses it", f)
			}
			time.Sleep(59 * time.Second)
			if again := r.ensure(t, id); !equalSVID(again, first) {
				t.Error("another SVID")
			}
			if diff := cmp.Diff(stored, r.files(t)); diff != "" {
				t.Errorf("stored again: %s", diff)
			}
		}
		if got := r.told.take(); got != nil {
			t.Errorf("told %q", got)
		}
		r.Release(id)
		time.Sleep(time.Minute)
		synctest.Wait()
		if diff := cmp.Diff([]string{"release checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if again := r.ensure(t, id); bytes.Equal(again.KeyPEM, first.KeyPEM) {
			t.Error("a forgotten key is back")
		}
	})
}

// What lingers is not renewed; used again past its half-life it is at once, and serves
// until then, also while the signer is away. What has expired is got anew or not at all.
func TestLingerPastHalfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), func(c *identity.ManagerConfig) { c.Linger = 48 * time.Hour })
		id := account("checkout")
		first := r.ensure(t, id)
		r.Release(id)
		time.Sleep(13 * time.Hour)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed != 1 {
			t.Errorf("%d signatures, want none for what nobody uses", signed)
		}
		r.signer.set(func(f *fakeSigner) { f.away = true })
		if again := r.ensure(t, id); !equalSVID(again, first) {
			t.Error("not used, though it is valid and the signer is away")
		}
		r.signer.set(func(f *fakeSigner) { f.away = false })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed != 2 {
			t.Errorf("%d signatures, want a renewal", signed)
		}
		r.Release(id)
		time.Sleep(25 * time.Hour)
		synctest.Wait()
		r.told.take()
		r.signer.set(func(f *fakeSigner) { f.away = true })
		if _, err := r.Ensure(t.Context(), id); err == nil {
			t.Error("an expired one is used")
		}
		synctest.Wait()
		if diff := cmp.Diff([]string{"release checkout"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
	})
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
