package identity_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

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

// SVIDs that live for seconds are renewed in time, too: at no moment is the one in
// use past its end.
func TestRenewShortLived(t *testing.T) {
	for _, life := range []time.Duration{identity.MinLifetime, 30 * time.Second, 2 * time.Minute} {
		t.Run(life.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				ca := openCA(t, dir, time.Now)
				if err := ca.SetLifetime(life); err != nil {
					t.Fatal(err)
				}
				r := start(t, dir, &fakeSigner{ca: ca}, nil)
				r.ensure(t, account("checkout"))
				for range 100 {
					time.Sleep(life / 10)
					synctest.Wait()
					leaf := leafOf(t, r.told.svid(account("checkout")))
					if err := verify(leaf, r.Bundle(), time.Now()); err != nil {
						t.Fatal(err)
					}
					if got := leaf.NotAfter.Sub(leaf.NotBefore); got > life*11/10+time.Second {
						t.Fatalf("a certificate of %s, want %s and a tenth, in whole seconds", got, life)
					}
				}
				if signed, _ := r.signer.counts(); signed < 10 || signed > 40 {
					t.Errorf("%d signatures in 10 lives, want about two for each", signed)
				}
			})
		})
	}
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
		const n = 100
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
