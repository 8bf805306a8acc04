package cache_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	gcpcache "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/stream/v3"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// benchSubscribed is how many load assignments the client of the benchmarks
// subscribes to, of all that there are.
const benchSubscribed = 200

var benchSizes = []int{100, 10_000, 100_000}

func benchName(i int) string { return fmt.Sprintf("service-%06d.aether.internal:9090", i) }

// assignment has ten endpoints, one of which depends on i.
func assignment(name string, i int) *endpointv3.ClusterLoadAssignment {
	locality := &endpointv3.LocalityLbEndpoints{}
	for j := range 10 {
		address := fmt.Sprintf("10.0.0.%d", j)
		if j == 0 {
			address = fmt.Sprintf("10.1.%d.%d", i/256%256, i%256)
		}
		locality.LbEndpoints = append(locality.LbEndpoints, &endpointv3.LbEndpoint{
			HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
				Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
					Address: address, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: 15008},
				}}},
			}},
		})
	}
	return &endpointv3.ClusterLoadAssignment{ClusterName: name, Endpoints: []*endpointv3.LocalityLbEndpoints{locality}}
}

// peer is a delta server's loop without a network: it takes a response, gives it
// a nonce, and acknowledges it.
type peer struct {
	watcher   gcpcache.ConfigWatcher
	responses chan gcpcache.DeltaResponse
	sub       stream.Subscription
	cancel    func()
	nonce     int
	// sent is called with every response that was given its nonce.
	sent func(*discoveryv3.DeltaDiscoveryResponse)
}

func newPeer(b *testing.B, w gcpcache.ConfigWatcher, names int) *peer {
	b.Helper()
	p := &peer{watcher: w, responses: make(chan gcpcache.DeltaResponse, 20)}
	req := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: resource.EndpointType, Node: &corev3.Node{Id: "n1"}}
	for i := range names {
		req.ResourceNamesSubscribe = append(req.ResourceNamesSubscribe, benchName(i))
	}
	p.sub = stream.NewDeltaSubscription(req.GetResourceNamesSubscribe(), nil, nil, true)
	p.request(b, req)
	return p
}

func (p *peer) request(b *testing.B, req *discoveryv3.DeltaDiscoveryRequest) {
	b.Helper()
	if p.cancel != nil {
		p.cancel()
	}
	var err error
	if p.cancel, err = p.watcher.CreateDeltaWatch(req, p.sub, p.responses); err != nil {
		b.Fatal(err)
	}
}

// take takes one response, which must have one resource unless any is allowed.
func (p *peer) take(b *testing.B, resources int) {
	b.Helper()
	resp := <-p.responses
	message, err := resp.GetDeltaDiscoveryResponse()
	if err != nil {
		b.Fatal(err)
	}
	if got := len(message.GetResources()); got != resources {
		b.Fatalf("%d resources in the response, want %d", got, resources)
	}
	p.nonce++
	message.Nonce = strconv.Itoa(p.nonce)
	if p.sent != nil {
		p.sent(message)
	}
	p.sub.SetReturnedResources(resp.GetReturnedResources())
	p.request(b, &discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: resource.EndpointType, Node: &corev3.Node{Id: "n1"}, ResponseNonce: message.GetNonce(),
	})
}

// One endpoint changes; a client subscribes to 200 of all load assignments. Time
// and allocations are from the change to its acknowledgement, serialisation and
// version included, without a network.
func BenchmarkEndpointChange(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprintf("cache=portolan/resources=%d", size), func(b *testing.B) {
			c := cache.New(cache.Config{})
			c.Release()
			list := make([]cache.Resource, size)
			for i := range list {
				list[i] = benchResource(b, i, 0)
			}
			c.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Endpoints: list}})
			st := c.Open(cache.StreamParams{Service: cache.ADS})
			defer st.Close()
			subscribed := min(size, benchSubscribed)
			p := newPeer(b, st, subscribed)
			p.sent = func(m *discoveryv3.DeltaDiscoveryResponse) { st.OnStreamDeltaResponse(0, nil, m) }
			p.take(b, subscribed)
			defer cpu(b)()
			for i := 1; b.Loop(); i++ {
				c.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
					cache.Endpoints: {benchResource(b, i%subscribed, i)},
				}})
				p.take(b, 1)
			}
		})
		b.Run(fmt.Sprintf("cache=linear/resources=%d", size), func(b *testing.B) {
			all := make(map[string]types.Resource, size)
			for i := range size {
				all[benchName(i)] = assignment(benchName(i), 0)
			}
			c := gcpcache.NewLinearCache(resource.EndpointType, gcpcache.WithInitialResources(all))
			subscribed := min(size, benchSubscribed)
			p := newPeer(b, c, subscribed)
			p.take(b, subscribed)
			defer cpu(b)()
			for i := 1; b.Loop(); i++ {
				name := benchName(i % subscribed)
				if err := c.UpdateResource(name, assignment(name, i)); err != nil {
					b.Fatal(err)
				}
				p.take(b, 1)
			}
		})
		b.Run(fmt.Sprintf("cache=snapshot/resources=%d", size), func(b *testing.B) {
			c := gcpcache.NewSnapshotCache(true, gcpcache.IDHash{}, nil)
			all := make([]types.Resource, size)
			for i := range all {
				all[i] = assignment(benchName(i), 0)
			}
			set := func(version int) {
				snapshot, err := gcpcache.NewSnapshot(strconv.Itoa(version), map[resource.Type][]types.Resource{resource.EndpointType: all})
				if err == nil {
					err = c.SetSnapshot(context.Background(), "n1", snapshot)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			set(0)
			subscribed := min(size, benchSubscribed)
			p := newPeer(b, c, subscribed)
			p.take(b, subscribed)
			defer cpu(b)()
			for i := 1; b.Loop(); i++ {
				all[i%subscribed] = assignment(benchName(i%subscribed), i)
				set(i)
				p.take(b, 1)
			}
		})
	}
}

// cpu reports the processor time of the loop that runs until it is called: on a
// busy machine the time by the clock says little.
func cpu(b *testing.B) (report func()) {
	b.Helper()
	b.ReportAllocs()
	start := cpuTime(b)
	return func() {
		b.ReportMetric(float64(cpuTime(b)-start)/float64(b.N), "cpu-ns/op")
	}
}

func cpuTime(b *testing.B) int64 {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

func benchResource(b *testing.B, service, i int) cache.Resource {
	b.Helper()
	name := benchName(service)
	r, err := cache.NewResource(name, assignment(name, i))
	if err != nil {
		b.Fatal(err)
	}
	return r
}

// Many Envoys subscribe to what changes: the cost of a change for each of them.
func BenchmarkFanOut(b *testing.B) {
	for _, streams := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			c := cache.New(cache.Config{})
			c.Release()
			list := make([]cache.Resource, benchSubscribed)
			for i := range list {
				list[i] = benchResource(b, i, 0)
			}
			c.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Endpoints: list}})
			peers := make([]*peer, streams)
			for i := range peers {
				st := c.Open(cache.StreamParams{Service: cache.ADS})
				defer st.Close()
				peers[i] = newPeer(b, st, benchSubscribed)
				peers[i].sent = func(m *discoveryv3.DeltaDiscoveryResponse) { st.OnStreamDeltaResponse(0, nil, m) }
				peers[i].take(b, benchSubscribed)
			}
			defer cpu(b)()
			for i := 1; b.Loop(); i++ {
				c.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
					cache.Endpoints: {benchResource(b, i%benchSubscribed, i)},
				}})
				for _, p := range peers {
					p.take(b, 1)
				}
			}
		})
	}
}

// A client comes back with all it has, of which one thing has changed.
func BenchmarkReconnect(b *testing.B) {
	for _, size := range []int{1000, 60_000} {
		b.Run(fmt.Sprintf("names=%d", size), func(b *testing.B) {
			c := cache.New(cache.Config{})
			c.Release()
			list := make([]cache.Resource, size)
			req := &discoveryv3.DeltaDiscoveryRequest{
				TypeUrl: resource.EndpointType, InitialResourceVersions: make(map[string]string, size),
			}
			for i := range list {
				list[i] = benchResource(b, i, 0)
				req.ResourceNamesSubscribe = append(req.ResourceNamesSubscribe, list[i].Name)
				req.InitialResourceVersions[list[i].Name] = list[i].Version
			}
			list[7] = benchResource(b, 7, 1)
			c.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Endpoints: list}})
			defer cpu(b)()
			for b.Loop() {
				st := c.Open(cache.StreamParams{Service: cache.ADS})
				p := &peer{watcher: st, responses: make(chan gcpcache.DeltaResponse, 20)}
				p.sub = stream.NewDeltaSubscription(nil, nil, nil, false)
				p.request(b, req)
				p.take(b, 1)
				st.Close()
			}
		})
	}
}
