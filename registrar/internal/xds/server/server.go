package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	clusterservice "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/stream/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

const (
	// maxRequest bounds one request. A reconnecting Envoy lists every name that it
	// holds in its first one, and with gRPC's default of 4 MiB could never come
	// back (XDS-R24).
	maxRequest = 64 << 20
	// minPing is the shortest time between two pings of a client; Envoy's
	// connection_keepalive interval must be longer, or it is cut off (XDS-R25).
	minPing = time.Second
	// defaultPingAfter and defaultPingTimeout find a peer that is gone without a
	// word within a quarter of a minute.
	defaultPingAfter   = 10 * time.Second
	defaultPingTimeout = 5 * time.Second
	// stopGrace bounds how long Serve waits for open streams to end.
	stopGrace = 2 * time.Second
)

// Config is what a Server needs.
type Config struct {
	// Cache that is served.
	Cache *cache.Cache
	// Logger gets the opening and closing of streams. Nil discards them.
	Logger *slog.Logger
	// PingAfter and PingTimeout say when a quiet peer is asked whether it lives and
	// how long it has to answer, before its streams are closed (XDS-52). 0 is ten
	// and five seconds; a PingAfter below one second is one second.
	PingAfter, PingTimeout time.Duration
	// Registerer gets the metrics of the cache; nil registers none.
	Registerer prometheus.Registerer
}

// Server serves one cache. It implements the delta methods of the aggregated and
// of the cluster discovery service; the others are unimplemented.
type Server struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	clusterservice.UnimplementedClusterDiscoveryServiceServer

	cache       *cache.Cache
	log         *slog.Logger
	ping        keepalive.ServerParameters
	stopping    chan struct{}
	serving     atomic.Bool
	connections atomic.Uint64
}

// New returns a server that is not serving yet. It fails if the metrics are
// registered already.
func New(cfg Config) (*Server, error) {
	s := &Server{
		cache:    cfg.Cache,
		log:      cfg.Logger,
		stopping: make(chan struct{}),
		ping: keepalive.ServerParameters{
			Time:    cmp.Or(cfg.PingAfter, defaultPingAfter),
			Timeout: cmp.Or(cfg.PingTimeout, defaultPingTimeout),
		},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(newCollector(cfg.Cache)); err != nil {
			return nil, fmt.Errorf("register xds metrics: %w", err)
		}
	}
	return s, nil
}

// Serve serves on l, which it closes, until ctx ends or l fails. Streams are
// ended in an orderly way; Envoy goes on with what it has and connects again. A
// Server serves once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	if !s.serving.CompareAndSwap(false, true) {
		return errors.Join(errors.New("xds server: Serve was called twice"), l.Close())
	}
	g := grpc.NewServer(
		grpc.Creds(peerCredentials{connections: &s.connections}),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
		grpc.KeepaliveParams(s.ping),
	)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(g, s)
	clusterservice.RegisterClusterDiscoveryServiceServer(g, s)
	done := make(chan error, 1)
	go func() { done <- g.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve xds on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	close(s.stopping)
	force := time.AfterFunc(stopGrace, g.Stop)
	g.GracefulStop()
	force.Stop()
	if err := <-done; err != nil {
		return fmt.Errorf("serve xds on %s: %w", l.Addr(), err)
	}
	return nil
}

// DeltaAggregatedResources implements the aggregated discovery service.
func (s *Server) DeltaAggregatedResources(
	str discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer,
) error {
	return s.serve(str, cache.ADS, resource.AnyType)
}

// DeltaClusters implements the cluster discovery service: clusters on demand.
func (s *Server) DeltaClusters(str clusterservice.ClusterDiscoveryService_DeltaClustersServer) error {
	return s.serve(str, cache.OnDemand, resource.ClusterType)
}

// serve runs one stream until its client, its connection or the server ends it.
func (s *Server) serve(str stream.DeltaStream, service cache.Service, typeURL string) error {
	ctx, cancel := context.WithCancel(str.Context())
	defer cancel()
	name := peerName(ctx)
	st := s.cache.Open(cache.StreamParams{Service: service, Peer: name})
	defer st.Close()
	log := s.log.With("stream", st.ID(), "service", service.String(), "peer", name)
	log.Info("xds stream opened")
	go func() {
		select {
		case <-s.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := delta.NewServer(ctx, st, st).DeltaStreamHandler(str, typeURL)
	if err != nil {
		log = log.With("error", err)
	}
	log.Info("xds stream closed")
	return err
}
