package identity_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

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
