package wiretest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	clusterservicev3 "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// The types that the server knows, in the order in which it sends them.
const (
	typePrefix   = "type.googleapis.com/envoy."
	TypeCluster  = typePrefix + "config.cluster.v3.Cluster"
	TypeEndpoint = typePrefix + "config.endpoint.v3.ClusterLoadAssignment"
	TypeSecret   = typePrefix + "extensions.transport_sockets.tls.v3.Secret"
	TypeListener = typePrefix + "config.listener.v3.Listener"
	TypeRoute    = typePrefix + "config.route.v3.RouteConfiguration"
)

// XDS is a delta xDS server with the contract that Portolan's own has: ADS, and
// delta CDS for on-demand clusters. It serves what the test sets and nothing else.
type XDS struct {
	// Socket is where it listens.
	Socket string

	tb     testing.TB
	server *grpc.Server
	served chan struct{}

	mu       sync.Mutex // guards everything below and every stream's state
	sets     map[string]map[string]*resource
	onDemand map[string]*resource
	streams  map[*stream]bool
	asked    map[string]int
	opened   int // DeltaClusters streams ever opened
	unknown  func(name string) *clusterv3.Cluster
	withheld map[string]bool
	nacks    []string
}

// resource is one version of one resource.
type resource struct {
	body    *anypb.Any
	version string
}

// NewXDS starts the server. It ends with the test, and fails it if Envoy rejected
// anything that the test did not take note of with NACKs.
func NewXDS(tb testing.TB) *XDS {
	tb.Helper()
	x := &XDS{
		Socket:   filepath.Join(tb.TempDir(), "xds.sock"),
		tb:       tb,
		sets:     make(map[string]map[string]*resource),
		onDemand: make(map[string]*resource),
		streams:  make(map[*stream]bool),
		asked:    make(map[string]int),
		withheld: make(map[string]bool),
	}
	x.Restart()
	tb.Cleanup(func() {
		x.Stop()
		for _, nack := range x.NACKs() {
			tb.Errorf("Envoy rejected: %s", nack)
		}
	})
	return x
}

// Restart serves on the socket again after Stop, with the same resources.
func (x *XDS) Restart() {
	x.tb.Helper()
	var config net.ListenConfig
	l, err := config.Listen(context.Background(), "unix", x.Socket)
	if err != nil {
		x.tb.Fatal(err)
	}
	x.server = grpc.NewServer(grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(x.server, adsServer{x: x})
	clusterservicev3.RegisterClusterDiscoveryServiceServer(x.server, cdsServer{x: x})
	x.served = make(chan struct{})
	go func() { defer close(x.served); _ = x.server.Serve(l) }()
}

// Stop ends all streams and removes the socket.
func (x *XDS) Stop() {
	x.server.Stop()
	<-x.served
}

// Set adds or replaces resources of the aggregated stream.
func (x *XDS) Set(messages ...proto.Message) {
	x.tb.Helper()
	x.change(func() {
		for _, m := range messages {
			r := x.wrap(m)
			if x.sets[r.body.GetTypeUrl()] == nil {
				x.sets[r.body.GetTypeUrl()] = make(map[string]*resource)
			}
			x.sets[r.body.GetTypeUrl()][Name(m)] = r
		}
	})
}

// Remove takes resources of the aggregated stream away.
func (x *XDS) Remove(typeURL string, names ...string) {
	x.change(func() {
		for _, name := range names {
			delete(x.sets[typeURL], name)
		}
	})
}

// SetOnDemand adds or replaces clusters that are given only when asked for.
func (x *XDS) SetOnDemand(clusters ...*clusterv3.Cluster) {
	x.tb.Helper()
	x.change(func() {
		for _, c := range clusters {
			x.onDemand[c.GetName()] = x.wrap(c)
		}
	})
}

// Unknown says what an on-demand name that was not set is answered with. Without it
// the answer is that the name does not exist.
func (x *XDS) Unknown(f func(name string) *clusterv3.Cluster) {
	x.change(func() { x.unknown = f })
}

// Withhold leaves a name of the aggregated stream that was not set without any answer.
// Without it the answer is that the name does not exist.
func (x *XDS) Withhold(name string) {
	x.change(func() { x.withheld[name] = true })
}

// Asked returns how often an on-demand cluster was asked for.
func (x *XDS) Asked() map[string]int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return maps.Clone(x.asked)
}

// OnDemandStreams returns how many delta CDS streams are open, and how many ever
// were opened.
func (x *XDS) OnDemandStreams() (open, opened int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for s := range x.streams {
		if s.onDemand {
			open++
		}
	}
	return open, x.opened
}

// NACKs returns what Envoy has rejected and forgets it.
func (x *XDS) NACKs() []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := x.nacks
	x.nacks = nil
	return out
}

// Sync waits until Envoy has acknowledged everything. A cluster that is warming
// and a listener that waits for a secret are not acknowledged yet.
func (x *XDS) Sync() {
	x.tb.Helper()
	waiting := ""
	defer func() {
		if waiting != "" {
			x.tb.Logf("xDS waits for: %s", waiting)
		}
	}()
	Eventually(x.tb, "Envoy acknowledges everything", func() bool {
		waiting = x.waiting()
		return waiting == ""
	})
}

// waiting says what is not acknowledged; empty means nothing.
func (x *XDS) waiting() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	connected := false
	for s := range x.streams {
		connected = connected || !s.onDemand
		for typeURL, sub := range s.subs {
			switch u := x.pending(s, typeURL); {
			case sub.nonce != "":
				return fmt.Sprintf("acknowledgement of %s %v", sub.nonce, sub.inFlight)
			case !u.empty():
				return fmt.Sprintf("sending of %s: %d and %v", shortType(typeURL), len(u.add), u.remove)
			}
		}
		if !s.onDemand && (s.subs[TypeCluster] == nil || s.subs[TypeListener] == nil) {
			return "the first requests"
		}
	}
	if !connected {
		return "a stream"
	}
	return ""
}

func (x *XDS) change(f func()) {
	x.mu.Lock()
	f()
	x.mu.Unlock()
	x.wakeAll()
}

func (x *XDS) wakeAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for s := range x.streams {
		s.wake()
	}
}

func (x *XDS) wrap(m proto.Message) *resource {
	x.tb.Helper()
	body := new(anypb.Any)
	if err := anypb.MarshalFrom(body, m, proto.MarshalOptions{Deterministic: true}); err != nil {
		x.tb.Fatal(err)
	}
	sum := sha256.Sum256(body.GetValue())
	return &resource{body: body, version: hex.EncodeToString(sum[:8])}
}

// Name returns the name by which Envoy knows a resource.
func Name(m proto.Message) string {
	switch m := m.(type) {
	case interface{ GetClusterName() string }:
		return m.GetClusterName()
	case interface{ GetName() string }:
		return m.GetName()
	}
	panic(fmt.Sprintf("wiretest: %T has no name", m))
}

type adsServer struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	x *XDS
}

func (s adsServer) DeltaAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return s.x.serve(stream, false)
}

type cdsServer struct {
	clusterservicev3.UnimplementedClusterDiscoveryServiceServer
	x *XDS
}

func (s cdsServer) DeltaClusters(stream clusterservicev3.ClusterDiscoveryService_DeltaClustersServer) error {
	return s.x.serve(stream, true)
}

// names returns the sorted keys of a set.
func names[V any](set map[string]V) []string {
	out := make([]string, 0, len(set))
	for name := range set {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func shortType(typeURL string) string {
	return typeURL[strings.LastIndexByte(typeURL, '.')+1:]
}
