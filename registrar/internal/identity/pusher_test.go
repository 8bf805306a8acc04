package identity_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// fakePusher gives what the test has put, and says so.
type fakePusher struct {
	ca    *identity.CA
	stuck error // Run ends with it; nil: when ctx does

	mu       sync.Mutex
	has      map[model.Identity]identity.Credential
	gate     chan struct{} // when set, answers wait until it is closed
	asked    int
	followed []string
	changed  func(model.Identity)
}

func (p *fakePusher) Issue(ctx context.Context, id model.Identity) (identity.Credential, error) {
	p.mu.Lock()
	p.asked++
	c, ok := p.has[id]
	gate := p.gate
	p.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return c, ctx.Err()
		}
	}
	if !ok {
		return c, errAway
	}
	if c.Key == nil {
		return c, fmt.Errorf("%w: no entry", identity.ErrRefused)
	}
	return c, nil
}

func (p *fakePusher) Bundle(ctx context.Context) (identity.Bundle, error) { return p.ca.Bundle(ctx) }

func (p *fakePusher) note(what string, id model.Identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.followed = append(p.followed, what+" "+id.Account)
}

func (p *fakePusher) Follow(id model.Identity)  { p.note("follow", id) }
func (p *fakePusher) Release(id model.Identity) { p.note("release", id) }

func (p *fakePusher) Run(ctx context.Context, changed func(model.Identity), _ func()) error {
	p.mu.Lock()
	p.changed = changed
	p.mu.Unlock()
	if p.stuck != nil {
		return p.stuck
	}
	<-ctx.Done()
	return nil
}

// push has the pusher have a new certificate of id, or refuse it.
func (p *fakePusher) push(t *testing.T, id model.Identity, refused bool) {
	t.Helper()
	var c identity.Credential
	if !refused {
		csr, key := request(t, x509.CertificateRequest{})
		chain, err := p.ca.Sign(t.Context(), identity.SignRequest{Identity: id, CSR: csr})
		if err != nil {
			t.Fatal(err)
		}
		c = identity.Credential{Chain: []*x509.Certificate{parseCert(t, chain[0])}, Key: key}
	}
	p.mu.Lock()
	p.has[id] = c
	changed := p.changed
	p.mu.Unlock()
	if changed != nil {
		changed(id)
	}
}

func (p *fakePusher) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// follows are the calls of Follow and Release.
func (p *fakePusher) follows() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.followed)
}

// startPusher runs a manager over dir on a pusher.
func startPusher(t *testing.T, dir string) (*rig, *fakePusher) {
	t.Helper()
	p := &fakePusher{ca: openCA(t, dir, time.Now), has: map[model.Identity]identity.Credential{}}
	r := start(t, dir, nil, func(c *identity.ManagerConfig) { c.Signer, c.Source = nil, p })
	synctest.Wait()
	return r, p
}

// What lingers is followed on, so that its news are taken when it is used again.
func TestPusherLinger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		p := &fakePusher{ca: openCA(t, dir, time.Now), has: map[model.Identity]identity.Credential{}}
		r := start(t, dir, nil, func(c *identity.ManagerConfig) { c.Signer, c.Source, c.Linger = nil, p, time.Hour })
		synctest.Wait()
		id := account("web")
		p.push(t, id, false)
		first := r.ensure(t, id)
		r.Release(id)
		p.push(t, id, false)
		r.ensure(t, id)
		synctest.Wait()
		if equalSVID(first, r.told.svid(id)) {
			t.Error("the certificate that came meanwhile was not taken")
		}
		r.Release(id)
		if diff := cmp.Diff([]string{"follow web"}, p.follows()); diff != "" {
			t.Errorf("while it lingers: %s", diff)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if diff := cmp.Diff([]string{"follow web", "release web"}, p.follows()); diff != "" {
			t.Error(diff)
		}
	})
}

// A source that renews by itself is not asked at half-life; what it has is handed on
// when it says so, and only when that is new. Of two users it hears once.
func TestPusherRenewsByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := startPusher(t, t.TempDir())
		id := account("web")
		p.push(t, id, false)
		first := r.ensure(t, id)
		r.ensure(t, id)
		r.told.take()
		asked := p.count()
		time.Sleep(20 * time.Hour)
		synctest.Wait()
		if got := p.count(); got != asked {
			t.Errorf("asked %d times without news", got-asked)
		}
		p.changed(id)
		synctest.Wait()
		if got := r.told.take(); got != nil {
			t.Errorf("the same certificate told again: %v", got)
		}
		p.push(t, id, false)
		synctest.Wait()
		if diff := cmp.Diff([]string{"svid web"}, r.told.take()); diff != "" {
			t.Error(diff)
		}
		if equalSVID(first, r.told.svid(id)) {
			t.Error("the old certificate told again")
		}
		r.Release(id)
		r.Release(id)
		if diff := cmp.Diff([]string{"follow web", "release web"}, p.follows()); diff != "" {
			t.Error(diff)
		}
	})
}

// A source that does not have an identity any more takes nothing away; the log says
// why nothing new comes, and a certificate that comes afterwards is taken at once.
func TestPusherRefusesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := startPusher(t, t.TempDir())
		id := account("web")
		p.push(t, id, false)
		first := r.ensure(t, id)
		asked := p.count()
		p.push(t, id, true)
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := p.count() - asked; got < 30 || got > 100 {
			t.Errorf("asked %d times in an hour after the refusal, want about once a minute", got)
		}
		if s := r.ensure(t, id); !equalSVID(s, first) {
			t.Error("the certificate in use changed")
		}
		if !strings.Contains(r.log.String(), "no entry") {
			t.Errorf("log:\n%s", r.log)
		}
		p.push(t, id, false)
		synctest.Wait()
		if equalSVID(r.told.svid(id), first) {
			t.Error("what came after the refusal is not taken at once")
		}
	})
}

// What comes while the source is being asked is taken although the answer, from before,
// is a refusal.
func TestPusherNewsWhileAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := startPusher(t, t.TempDir())
		id := account("web")
		p.push(t, id, false)
		first := r.ensure(t, id)
		gate := make(chan struct{})
		p.mu.Lock()
		p.gate = gate
		p.mu.Unlock()
		p.push(t, id, true)
		synctest.Wait() // asked, and answered with a refusal that is under way
		p.push(t, id, false)
		close(gate)
		synctest.Wait()
		if equalSVID(r.told.svid(id), first) {
			t.Error("the new certificate is not taken at once")
		}
	})
}

// After a restart the stored certificate serves at once, also past its half-life,
// while the source has none yet.
func TestPusherAwayAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, id := t.TempDir(), account("web")
		r, p := startPusher(t, dir)
		p.push(t, id, false)
		first := r.ensure(t, id)
		r.stop()
		time.Sleep(20 * time.Hour)

		r, p = startPusher(t, dir)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if s, err := r.Ensure(ctx, id); err != nil || !equalSVID(s, first) || p.count() > 0 {
			t.Errorf("the stored certificate does not serve, or the source was asked %d times", p.count())
		}
		p.push(t, id, false)
		synctest.Wait()
		if events := r.told.take(); !slices.Contains(events, "svid web") || equalSVID(r.told.svid(id), first) {
			t.Errorf("told %v, want the new certificate", events)
		}
	})
}

// What a source has after it was away for long is taken at once, for every identity,
// although the manager had begun to ask seldom.
func TestPusherIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, p := startPusher(t, t.TempDir())
		ids := make([]model.Identity, 30)
		for i := range ids {
			ids[i] = account(fmt.Sprintf("a%d", i))
			p.push(t, ids[i], false)
			r.ensure(t, ids[i])
		}
		p.mu.Lock()
		clear(p.has)
		p.mu.Unlock()
		time.Sleep(30 * time.Hour) // all have ended
		r.told.take()
		for _, id := range ids {
			p.push(t, id, false)
		}
		synctest.Wait()
		if got := r.told.take(); len(got) != len(ids) {
			t.Errorf("%d of %d were told", len(got), len(ids))
		}
	})
}

// A source that ends ends the manager.
func TestPusherFails(t *testing.T) {
	want := errors.New("broken")
	m, err := identity.NewManager(identity.ManagerConfig{Source: &fakePusher{ca: openCA(t, t.TempDir(), time.Now), stuck: want}, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Run(t.Context()); !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}
