package spire

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	delegatedidentityv1 "github.com/spiffe/spire-api-sdk/proto/spire/api/agent/delegatedidentity/v1"
	"github.com/spiffe/spire-api-sdk/proto/spire/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// defaultPatience is a little more than an agent needs to learn of a new entry: it
	// asks its server every 5 seconds.
	defaultPatience = 6 * time.Second
	// The pause between two attempts to reach the agent doubles from firstRetry to
	// lastRetry, with jitter.
	firstRetry = 200 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Config is what a Source needs.
type Config struct {
	// Socket is the path of the agent's admin socket.
	Socket string
	// TrustDomain is the mesh's, and must be the agent's.
	TrustDomain string
	Selectors   Selectors
	// Patience is how long a new identity waits for its registration entry before
	// it is refused; 0 is 6 s.
	Patience time.Duration
	// Saved keeps the last roots over a restart, so that a node whose agent is away
	// goes on with the certificates that it has.
	Saved identity.BundleStore
	Log   *slog.Logger
}

// Source is the identity.Pusher that takes everything from the agent: one stream for
// the roots and one for each identity that is followed, over one connection.
type Source struct {
	cfg    Config
	td     spiffeid.TrustDomain
	conn   *grpc.ClientConn
	client delegatedidentityv1.DelegatedIdentityClient
	roots  answer[identity.Bundle]
	// streams are the goroutines of subscriptions.
	streams sync.WaitGroup

	// mu guards what follows. Not held across a call of changed.
	mu            sync.Mutex
	subscriptions map[model.Identity]*subscription
	changed       func(model.Identity) // nil until Run
	ended         bool                 // Run has returned
}

// subscription is what the agent says of one identity.
type subscription struct {
	svid answer[identity.Credential]
	// patient is until when an absent entry is waited for.
	patient time.Time
	cancel  context.CancelFunc
}

// New returns a Source; the agent is asked when the first identity is followed or Run
// runs.
func New(cfg Config) (*Source, error) {
	if cfg.Socket == "" || len(cfg.Selectors.templates) == 0 || cfg.Saved == nil || cfg.Log == nil {
		return nil, errors.New("SPIRE: Socket, Selectors, Saved and Log must be set")
	}
	if cfg.Patience == 0 {
		cfg.Patience = defaultPatience
	}
	td, err := spiffeid.TrustDomainFromString(cfg.TrustDomain)
	if err != nil || td.Name() != cfg.TrustDomain {
		return nil, fmt.Errorf("trust domain %q is not a lower-case domain name", cfg.TrustDomain)
	}
	conn, err := grpc.NewClient("unix:"+cfg.Socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the agent asks the kernel who is there
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: firstRetry, Multiplier: 1.6, Jitter: 0.2, MaxDelay: lastRetry},
			MinConnectTimeout: lastRetry,
		}))
	if err != nil {
		return nil, fmt.Errorf("SPIRE agent's admin socket %s: %w", cfg.Socket, err)
	}
	return &Source{
		cfg: cfg, td: td, conn: conn, client: delegatedidentityv1.NewDelegatedIdentityClient(conn),
		subscriptions: map[model.Identity]*subscription{},
	}, nil
}

// Run implements identity.Pusher.
func (s *Source) Run(ctx context.Context, changed func(model.Identity), bundle func()) error {
	s.mu.Lock()
	s.changed = changed
	early := make([]model.Identity, 0, len(s.subscriptions))
	for id := range s.subscriptions {
		early = append(early, id)
	}
	s.mu.Unlock()
	for _, id := range early {
		changed(id)
	}
	s.followRoots(ctx, bundle)

	s.mu.Lock()
	s.ended = true
	for _, sub := range s.subscriptions {
		sub.cancel()
	}
	s.mu.Unlock()
	s.streams.Wait()
	if err := s.conn.Close(); err != nil {
		s.cfg.Log.Warn("connection to the SPIRE agent was not closed cleanly", "error", err)
	}
	return nil
}

// Follow implements identity.Pusher.
func (s *Source) Follow(id model.Identity) {
	ctx, cancel := context.WithCancel(context.Background())
	sub := &subscription{patient: time.Now().Add(s.cfg.Patience), cancel: cancel}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.subscriptions[id] = sub
	if s.ended {
		cancel()
		sub.svid.fail(errors.New("the registrar stops"))
		return
	}
	s.streams.Go(func() { s.follow(ctx, id, sub) })
}

// Release implements identity.Pusher.
func (s *Source) Release(id model.Identity) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub, ok := s.subscriptions[id]; ok {
		sub.cancel()
		delete(s.subscriptions, id)
	}
}

// Issue implements identity.Source: what the agent gave last. An identity without a
// registration entry is identity.ErrRefused.
func (s *Source) Issue(ctx context.Context, id model.Identity) (identity.Credential, error) {
	s.mu.Lock()
	sub, ok := s.subscriptions[id]
	s.mu.Unlock()
	if !ok {
		return identity.Credential{}, fmt.Errorf("SPIRE: %s is not followed", id.SPIFFE())
	}
	return sub.svid.await(ctx, sub.patient)
}

// Bundle implements identity.Source: the roots that the agent gave last. With the agent
// away since the start it is what was there last.
func (s *Source) Bundle(ctx context.Context) (identity.Bundle, error) {
	b, err := s.roots.await(ctx, time.Now())
	if err == nil {
		return b, nil
	}
	saved, loadErr := s.cfg.Saved.Load(s.cfg.TrustDomain)
	if loadErr != nil {
		return identity.Bundle{}, errors.Join(err, loadErr)
	}
	s.cfg.Log.Warn("roots cannot be fetched; those that were seen last are used", "error", err)
	return saved, nil
}

// follow keeps the subscription of one identity until ctx ends.
func (s *Source) follow(ctx context.Context, id model.Identity, sub *subscription) {
	selectors := s.cfg.Selectors.of(id)
	s.retry(ctx, func(progress func()) error {
		stream, err := s.client.SubscribeToX509SVIDs(ctx, &delegatedidentityv1.SubscribeToX509SVIDsRequest{Selectors: selectors})
		for err == nil {
			var got *delegatedidentityv1.SubscribeToX509SVIDsResponse
			if got, err = stream.Recv(); err == nil {
				progress()
				s.take(id, sub, selectors, got.GetX509Svids())
			}
		}
		return err
	}, func(err error) { sub.svid.fail(err) })
}

// take has a subscription's answer be what the agent sent.
func (s *Source) take(id model.Identity, sub *subscription, selectors []*types.Selector, list []*delegatedidentityv1.X509SVIDWithKey) {
	got, err := pick(id, selectors, list)
	if err != nil {
		sub.svid.refuse(err)
	} else {
		sub.svid.set(got)
	}
	s.mu.Lock()
	changed := s.changed
	s.mu.Unlock()
	if changed != nil {
		changed(id)
	}
}

// followRoots keeps the roots until ctx ends, and says when the agent is away.
func (s *Source) followRoots(ctx context.Context, told func()) {
	away := false
	s.retry(ctx, func(progress func()) error {
		stream, err := s.client.SubscribeToX509Bundles(ctx, &delegatedidentityv1.SubscribeToX509BundlesRequest{})
		for err == nil {
			var got *delegatedidentityv1.SubscribeToX509BundlesResponse
			if got, err = stream.Recv(); err != nil {
				break
			}
			if err = s.takeRoots(got.GetCaCertificates()); err != nil {
				break
			}
			progress()
			if away {
				s.cfg.Log.Info("the SPIRE agent is back", "socket", s.cfg.Socket)
				away = false
			}
			told()
		}
		return err
	}, func(err error) {
		s.roots.fail(err)
		if !away {
			s.cfg.Log.Warn("no certificates from the SPIRE agent; the last ones stay in use until they expire", "socket", s.cfg.Socket, "error", err)
			away = true
		}
	})
}

// takeRoots has the roots be those of the mesh's trust domain. Those of others, which
// the agent federates with, are left.
func (s *Source) takeRoots(all map[string][]byte) error {
	der, ok := all[s.td.IDString()]
	if !ok {
		domains := make([]string, 0, len(all))
		for d := range all {
			domains = append(domains, d)
		}
		return fmt.Errorf("the SPIRE agent has roots of %v and none of %s: set --trust-domain to the agent's", domains, s.td.IDString())
	}
	parsed, err := x509bundle.ParseRaw(s.td, der)
	if err != nil {
		return fmt.Errorf("the SPIRE agent's roots of %s: %w", s.td, err)
	}
	b := identity.NewBundle(s.td.Name(), parsed.X509Authorities())
	s.roots.set(b)
	if err := s.cfg.Saved.Save(b); err != nil {
		s.cfg.Log.Error("roots are not saved: with the SPIRE agent away a restart would have none", "error", err)
	}
	return nil
}

// retry repeats a stream until ctx ends, with a pause after each failure that starts
// anew when the stream made progress.
func (s *Source) retry(ctx context.Context, stream func(progress func()) error, failed func(error)) {
	pause := firstRetry
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		err := stream(func() { pause = firstRetry })
		if ctx.Err() != nil {
			return
		}
		failed(s.explain(err))
		timer.Reset(pause/2 + rand.N(pause)) //nolint:gosec // jitter
		pause = min(2*pause, lastRetry)
	}
}

// explain adds the remedy to a failure that is not the agent's absence.
func (s *Source) explain(err error) error {
	switch status.Code(err) {
	case codes.PermissionDenied:
		return fmt.Errorf("the SPIRE agent does not let the registrar act for workloads: the registrar needs a registration entry whose SPIFFE ID is in the agent's authorized_delegates: %w", err)
	case codes.Unavailable:
		return fmt.Errorf("the SPIRE agent is not there: does it run with admin_socket_path = %q? %w", s.cfg.Socket, err)
	default:
		return fmt.Errorf("SPIRE agent at %s: %w", s.cfg.Socket, err)
	}
}

// pick returns the certificate of exactly id. Every error is identity.ErrRefused.
func pick(id model.Identity, selectors []*types.Selector, list []*delegatedidentityv1.X509SVIDWithKey) (identity.Credential, error) {
	var others []string
	for _, item := range list {
		at := item.GetX509Svid().GetId()
		name := "spiffe://" + at.GetTrustDomain() + at.GetPath()
		if name != id.SPIFFE() {
			others = append(others, name)
			continue
		}
		c, err := parse(item)
		if err != nil {
			return identity.Credential{}, fmt.Errorf("%w: SPIRE's certificate of %s: %w", identity.ErrRefused, name, err)
		}
		return c, nil
	}
	return identity.Credential{}, fmt.Errorf("%w: %w", identity.ErrRefused, &absentError{id: id, selectors: selectors, others: others})
}

func parse(item *delegatedidentityv1.X509SVIDWithKey) (identity.Credential, error) {
	var chain []byte
	for _, der := range item.GetX509Svid().GetCertChain() {
		chain = append(chain, der...)
	}
	got, err := x509svid.ParseRaw(chain, item.GetX509SvidKey())
	if err != nil {
		return identity.Credential{}, err
	}
	key, ok := got.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return identity.Credential{}, fmt.Errorf("its key is a %T: set workload_x509_svid_key_type = \"ec-p256\" at the agent", got.PrivateKey)
	}
	return identity.Credential{Chain: got.Certificates, Key: key}, nil
}

var _ identity.Pusher = (*Source)(nil)
