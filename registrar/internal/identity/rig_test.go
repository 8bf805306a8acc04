package identity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

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
