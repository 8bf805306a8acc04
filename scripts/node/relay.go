package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	xdsPath   = runDir + "/xds/xds.sock"
	relayPath = envoyDir + "/relay.sock"
	// inboundPort is where a pod's mesh listener is (contract section 7).
	inboundPort = 15008

	clusterType    = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	assignmentType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

	// relayMark begins the nonces and versions of what the relay itself sends.
	relayMark = "relay-"
	// maxMessage is the largest message that the relay passes on, in bytes.
	maxMessage = 64 << 20
	// pingPause is the shortest time between two pings of Envoy's keepalive.
	pingPause = 5 * time.Second
	// redialPause is the longest pause before a registrar that is away is dialled
	// again.
	redialPause = 100 * time.Millisecond
)

// Relay stands between the node's Envoy and the registrar and makes Envoy's view
// of chosen services stale: it passes every delta stream on, and replaces what a
// test has chosen. Everything else, and everybody else on the registrar's socket,
// goes on as without it. Safe for concurrent use.
type Relay struct {
	server   *grpc.Server
	upstream *grpc.ClientConn

	mu      sync.Mutex
	streams []*relayStream          // guarded by mu; those that Envoy has open
	pinned  map[string][]netip.Addr // guarded by mu; load assignments that stay as they are
	admits  map[string][]string     // guarded by mu; SPIFFE IDs by cluster
	pushes  int                     // guarded by mu; numbers the nonces
	late    time.Duration           // guarded by mu; how much later Envoy gets a response
	severed bool                    // guarded by mu; Envoy gets no aggregated stream
}

// relayStream is one stream of Envoy's.
type relayStream struct {
	grpc.ServerStream

	method  string
	end     context.CancelFunc
	sending sync.Mutex // held while a message goes to Envoy
	// assignments are the registrar's latest load assignments, guarded by Relay.mu.
	assignments map[string]*discoveryv3.Resource
	// acks are where to say what became of a push, by its nonce; guarded by Relay.mu.
	acks map[string]chan<- error
}

// startRelay listens on relayPath.
func startRelay() (*Relay, error) {
	if err := os.MkdirAll(envoyDir, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", envoyDir, err)
	}
	upstream, err := grpc.NewClient("unix://"+xdsPath, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: redialPause, Multiplier: 1, MaxDelay: redialPause}, MinConnectTimeout: time.Second,
		}))
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	listener, err := net.Listen("unix", relayPath) //nolint:noctx // binds at once
	if err != nil {
		return nil, errors.Join(fmt.Errorf("relay: %w", err), upstream.Close())
	}
	r := &Relay{upstream: upstream, pinned: map[string][]netip.Addr{}, admits: map[string][]string{}}
	// Envoy's keepalive is allowed, as the registrar allows it.
	r.server = grpc.NewServer(grpc.UnknownServiceHandler(r.relay), grpc.MaxRecvMsgSize(maxMessage),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingPause, PermitWithoutStream: true}))
	go func() { _ = r.server.Serve(listener) }() // ends by close; Envoy then says what it misses
	return r, nil
}

func (r *Relay) close() error {
	r.server.Stop()
	if err := r.upstream.Close(); err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	return nil
}

// Assign makes the pods at these addresses, all healthy, the endpoints of a cluster
// whatever the registrar says, until Follow. It returns when Envoy has accepted
// them; a cluster that Envoy does not have yet gets them with it.
func (r *Relay) Assign(ctx context.Context, cluster string, pods ...netip.Addr) error {
	r.mu.Lock()
	r.pinned[cluster] = pods
	r.mu.Unlock()
	return r.push(ctx, cluster)
}

// Follow gives a cluster the registrar's endpoints again, and returns when Envoy
// has accepted them.
func (r *Relay) Follow(ctx context.Context, cluster string) error {
	r.mu.Lock()
	delete(r.pinned, cluster)
	r.mu.Unlock()
	return r.push(ctx, cluster)
}

// Admit makes a cluster accept servers with this SPIFFE ID too, as if pods of the
// service had run under that account. It holds for what Envoy is sent from now on,
// so it is called before Envoy asks for the cluster.
func (r *Relay) Admit(cluster, spiffe string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.admits[cluster] = append(r.admits[cluster], spiffe)
}

// Delay makes every response of the registrar reach Envoy so much later, one after
// the other on each stream: what an Envoy sees that is far away or busy, and what
// makes a moment between two responses long enough to be seen.
func (r *Relay) Delay(late time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late = late
}

// Sever ends Envoy's aggregated stream and refuses it a new one until Restore, as if
// Envoy came to connect it much later than the stream of the clusters on demand: a
// cluster that it gets meanwhile has no load assignment.
func (r *Relay) Sever() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.severed = true
	for _, s := range r.streams {
		if s.aggregated() {
			s.end()
		}
	}
}

// Restore lets Envoy connect its aggregated stream again.
func (r *Relay) Restore() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.severed = false
}

// aggregated reports whether the stream carries everything but the clusters on demand.
func (s *relayStream) aggregated() bool {
	return s.method == discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName
}

// push sends a cluster's load assignment to every stream that has it.
func (r *Relay) push(ctx context.Context, cluster string) error {
	type sent struct {
		stream *relayStream
		resp   *discoveryv3.DeltaDiscoveryResponse
	}
	var out []sent
	r.mu.Lock()
	acks := make(chan error, len(r.streams)) // nobody waits to say what became of a push
	for _, s := range r.streams {
		latest := s.assignments[cluster]
		if latest == nil {
			continue
		}
		r.pushes++
		mark := relayMark + strconv.Itoa(r.pushes)
		resource := &discoveryv3.Resource{Name: cluster, Version: mark, Resource: latest.GetResource()}
		if err := r.edit(assignmentType, resource); err != nil {
			r.mu.Unlock()
			return err
		}
		s.acks[mark] = acks
		out = append(out, sent{s, &discoveryv3.DeltaDiscoveryResponse{
			TypeUrl: assignmentType, Nonce: mark, Resources: []*discoveryv3.Resource{resource},
		}})
	}
	r.mu.Unlock()
	for _, o := range out {
		if err := o.stream.send(o.resp); err != nil {
			return fmt.Errorf("relay: send %s: %w", cluster, err)
		}
	}
	for range out {
		select {
		case err := <-acks:
			if err != nil {
				return fmt.Errorf("relay: Envoy refuses %s: %w", cluster, err)
			}
		case <-ctx.Done():
			return fmt.Errorf("relay: wait until Envoy has %s: %w", cluster, ctx.Err())
		}
	}
	return nil
}

// relay handles one stream of Envoy's, of any method: all have the delta messages.
func (r *Relay) relay(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	if !strings.Contains(method, "/Delta") {
		return status.Errorf(codes.Unimplemented, "%s: the relay passes delta streams only", method)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	s := &relayStream{
		ServerStream: stream, method: method, end: cancel,
		assignments: map[string]*discoveryv3.Resource{}, acks: map[string]chan<- error{},
	}
	if !r.join(s) {
		return status.Errorf(codes.Unavailable, "%s: a test has severed it", method)
	}
	defer r.forget(s)
	up, err := r.upstream.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}

	go func() {
		_ = r.passRequests(s, up) // Envoy's end of the stream is the end of both
		cancel()
	}()
	return r.passResponses(s, up)
}

// join reports whether a stream may be passed on, and takes it up.
func (r *Relay) join(s *relayStream) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.severed && s.aggregated() {
		return false
	}
	r.streams = append(r.streams, s)
	return true
}

func (r *Relay) forget(s *relayStream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.streams = slices.DeleteFunc(r.streams, func(other *relayStream) bool { return other == s })
	for _, ack := range s.acks {
		ack <- errors.New("the stream ended")
	}
}

func (r *Relay) passRequests(s *relayStream, up grpc.ClientStream) error {
	for {
		var req discoveryv3.DeltaDiscoveryRequest
		if err := s.RecvMsg(&req); err != nil {
			return err
		}
		if r.acknowledged(s, &req) {
			if len(req.GetResourceNamesSubscribe())+len(req.GetResourceNamesUnsubscribe()) == 0 {
				continue
			}
			req.ResponseNonce, req.ErrorDetail = "", nil
		}
		if err := up.SendMsg(&req); err != nil {
			return err
		}
	}
}

// acknowledged reports whether the request answers a push of the relay's own.
func (r *Relay) acknowledged(s *relayStream, req *discoveryv3.DeltaDiscoveryRequest) bool {
	if !strings.HasPrefix(req.GetResponseNonce(), relayMark) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if ack, ok := s.acks[req.GetResponseNonce()]; ok {
		delete(s.acks, req.GetResponseNonce())
		if req.GetErrorDetail() != nil {
			ack <- errors.New(req.GetErrorDetail().GetMessage())
		} else {
			ack <- nil
		}
	}
	return true
}

func (r *Relay) passResponses(s *relayStream, up grpc.ClientStream) error {
	for {
		var resp discoveryv3.DeltaDiscoveryResponse
		if err := up.RecvMsg(&resp); err != nil {
			return err
		}
		if err := r.wait(s.Context()); err != nil {
			return err
		}
		// One lock for all of a response: what a push finds afterwards is its content.
		r.mu.Lock()
		for _, name := range resp.GetRemovedResources() {
			if resp.GetTypeUrl() == assignmentType {
				delete(s.assignments, name)
			}
		}
		for _, resource := range resp.GetResources() {
			if resp.GetTypeUrl() == assignmentType {
				s.assignments[resource.GetName()] = &discoveryv3.Resource{Resource: resource.GetResource()}
			}
			if err := r.edit(resp.GetTypeUrl(), resource); err != nil {
				r.mu.Unlock()
				return err
			}
		}
		r.mu.Unlock()
		if err := s.send(&resp); err != nil {
			return err
		}
	}
}

// wait is the delay of one response.
func (r *Relay) wait(ctx context.Context) error {
	r.mu.Lock()
	late := r.late
	r.mu.Unlock()
	timer := time.NewTimer(late)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

func (s *relayStream) send(resp *discoveryv3.DeltaDiscoveryResponse) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.SendMsg(resp)
}

// edit puts what a test has chosen in the place of a resource's content. The caller
// holds r.mu.
func (r *Relay) edit(typeURL string, resource *discoveryv3.Resource) error {
	switch typeURL {
	case assignmentType:
		if pods, ok := r.pinned[resource.GetName()]; ok {
			return pack(resource, loadAssignment(resource.GetName(), pods))
		}
	case clusterType:
		if ids := r.admits[resource.GetName()]; len(ids) > 0 {
			return admit(resource, ids)
		}
	}
	return nil
}

func loadAssignment(cluster string, pods []netip.Addr) *endpointv3.ClusterLoadAssignment {
	group := &endpointv3.LocalityLbEndpoints{}
	for _, ip := range pods {
		group.LbEndpoints = append(group.LbEndpoints, &endpointv3.LbEndpoint{
			HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
				Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
					Address: ip.String(), PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: inboundPort},
				}}},
			}},
			HealthStatus:        corev3.HealthStatus_HEALTHY,
			LoadBalancingWeight: wrapperspb.UInt32(1),
		})
	}
	return &endpointv3.ClusterLoadAssignment{ClusterName: cluster, Endpoints: []*endpointv3.LocalityLbEndpoints{group}}
}

// admit adds SPIFFE IDs to those that a cluster accepts. A tombstone has none.
func admit(resource *discoveryv3.Resource, ids []string) error {
	var cluster clusterv3.Cluster
	if err := resource.GetResource().UnmarshalTo(&cluster); err != nil {
		return fmt.Errorf("relay: cluster %s: %w", resource.GetName(), err)
	}
	if cluster.GetTransportSocket() == nil {
		return nil
	}
	var socket tlsv3.UpstreamTlsContext
	if err := cluster.GetTransportSocket().GetTypedConfig().UnmarshalTo(&socket); err != nil {
		return fmt.Errorf("relay: transport socket of %s: %w", resource.GetName(), err)
	}
	validation := socket.GetCommonTlsContext().GetCombinedValidationContext().GetDefaultValidationContext()
	for _, id := range ids {
		validation.MatchTypedSubjectAltNames = append(validation.MatchTypedSubjectAltNames, &tlsv3.SubjectAltNameMatcher{
			SanType: tlsv3.SubjectAltNameMatcher_URI,
			Matcher: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: id}},
		})
	}
	packed, err := anypb.New(&socket)
	if err != nil {
		return fmt.Errorf("relay: transport socket of %s: %w", resource.GetName(), err)
	}
	cluster.GetTransportSocket().ConfigType = &corev3.TransportSocket_TypedConfig{TypedConfig: packed}
	return pack(resource, &cluster)
}

// pack makes m the resource's content. It leaves the message that was there alone.
func pack(resource *discoveryv3.Resource, m proto.Message) error {
	packed, err := anypb.New(m)
	if err != nil {
		return fmt.Errorf("relay: %s: %w", resource.GetName(), err)
	}
	resource.Resource = packed
	return nil
}
