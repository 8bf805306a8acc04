package server

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// What a script of FuzzRequests says with one byte each. A resource is set on a
// few names only, so that requests meet content.
var (
	scriptTypes = []string{
		resource.ClusterType, resource.EndpointType, resource.ListenerType, resource.RouteType, resource.SecretType,
		"", "type.googleapis.com/envoy.service.runtime.v3.Runtime", resource.AnyType, "\x00",
	}
	scriptNames = []string{
		"a", "b", "c", "*", "", "ghost", "A.aether.internal.:080", strings.Repeat("long", 300), "xdstp://a/b", "\x00/\u202e",
	}
	scriptNodes = []*corev3.Node{
		nil,
		{},
		{Id: "n1", UserAgentName: "envoy"},
		{Id: "n1", UserAgentName: "tool"},
		{Id: "n2", UserAgentName: "envoy"},
		{Id: strings.Repeat("n", 5000), Cluster: "\x00", UserAgentName: "envoy", Locality: &corev3.Locality{Region: "*"}},
	}
	scriptReasons = []string{"", "a: no", "Error adding/updating resource(s) a, b: bad", strings.Repeat("x", 5000)}
)

// script reads choices from the input of the fuzzer; at its end all are 0.
type script struct{ data []byte }

func (s *script) next(n int) int {
	if len(s.data) == 0 {
		return 0
	}
	b := s.data[0]
	s.data = s.data[1:]
	return int(b) % n
}

// take cuts up to n bytes off.
func (s *script) take(n int) []byte {
	n = min(n, len(s.data))
	out := s.data[:n]
	s.data = s.data[n:]
	return out
}

func (s *script) names() []string {
	var out []string
	for range s.next(4) {
		out = append(out, scriptNames[s.next(len(scriptNames))])
	}
	return out
}

// request makes one request out of parts, as no client would.
func (s *script) request(last map[string]string) *discoveryv3.DeltaDiscoveryRequest {
	r := &discoveryv3.DeltaDiscoveryRequest{
		Node: scriptNodes[s.next(len(scriptNodes))], TypeUrl: scriptTypes[s.next(len(scriptTypes))],
		ResourceNamesSubscribe: s.names(), ResourceNamesUnsubscribe: s.names(),
	}
	for _, name := range s.names() {
		if r.InitialResourceVersions == nil {
			r.InitialResourceVersions = map[string]string{}
		}
		r.InitialResourceVersions[name] = []string{"", "1", strings.Repeat("v", 100)}[s.next(3)]
	}
	switch s.next(4) {
	case 1:
		r.ResponseNonce = last[r.GetTypeUrl()]
	case 2:
		r.ResponseNonce = []string{"0", "1", "99", "x"}[s.next(4)]
	case 3:
		r.ResponseNonce = last[r.GetTypeUrl()]
		r.ErrorDetail = &rpcstatus.Status{Code: 3, Message: scriptReasons[s.next(len(scriptReasons))]}
	}
	return r
}

// raw reads one request as it comes from a connection; nil if it is none.
func (s *script) raw() *discoveryv3.DeltaDiscoveryRequest {
	r := &discoveryv3.DeltaDiscoveryRequest{}
	if proto.Unmarshal(s.take(s.next(256)), r) != nil {
		return nil
	}
	return r
}

// hostile is a client that sends what the script says. It may take its answers
// and never says so, or leave them lying.
type hostile struct {
	stream xdstest.Stream
	end    context.CancelFunc
	mu     sync.Mutex
	last   map[string]string // nonces by type
}

func newHostile(s *Server, ads, reads bool) *hostile {
	ctx, cancel := context.WithCancel(context.Background())
	h := &hostile{last: map[string]string{}, end: cancel}
	h.stream = xdstest.Pipe(ctx, func(str xdstest.ServerStream) error {
		if ads {
			return s.DeltaAggregatedResources(str)
		}
		return s.DeltaClusters(str)
	})
	if reads {
		go h.read()
	}
	return h
}

func (h *hostile) read() {
	for {
		resp, err := h.stream.Recv()
		if err != nil {
			return
		}
		h.mu.Lock()
		h.last[resp.GetTypeUrl()] = resp.GetNonce()
		h.mu.Unlock()
	}
}

// send sends a request as gRPC does: only what can be encoded.
func (h *hostile) send(r *discoveryv3.DeltaDiscoveryRequest) {
	wire, err := proto.Marshal(r)
	if err != nil {
		return
	}
	sent := &discoveryv3.DeltaDiscoveryRequest{}
	if proto.Unmarshal(wire, sent) == nil {
		_ = h.stream.Send(sent) // the server may have ended the stream
	}
}

func (h *hostile) nonces() map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.last)
}

// FuzzRequests lets up to four clients send whatever the input says, while content
// changes, and then asks as Envoy does on new streams: it gets what there is, all of
// it and once, and what the others asked for is forgotten with them (I9).
func FuzzRequests(f *testing.F) {
	f.Add([]byte{})
	envoy := []byte{0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 1, 3, 0, 1, 5, 0, 0, 0}
	f.Add(envoy)
	f.Add(slices.Concat(envoy, []byte{5, 0, 1, 1, 0, 0, 2, 0, 0, 0, 0, 1, 6, 1, 0, 7, 2, 7, 3}, envoy, envoy))
	f.Add([]byte{1, 1, 3, 8, 3, 3, 3, 3, 3, 9, 9, 1, 2, 1, 2, 3, 3, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
	resume := &discoveryv3.DeltaDiscoveryRequest{
		Node: &corev3.Node{Id: "n1"}, TypeUrl: resource.ListenerType, InitialResourceVersions: map[string]string{"a": "1", "gone": ""},
		ResponseNonce: "7", ErrorDetail: &rpcstatus.Status{Message: "a"},
	}
	wire, err := proto.Marshal(resume)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(slices.Concat([]byte{4, 0, byte(len(wire))}, wire, []byte{4, 0, byte(len(wire))}, wire))
	f.Fuzz(func(t *testing.T, data []byte) {
		synctest.Test(t, func(t *testing.T) { playScript(t, &script{data: data}) })
	})
}

// maxSteps keeps one run short: longer inputs find nothing that these do not.
const maxSteps = 100

// stage is a server with content that the test knows.
type stage struct {
	*testing.T
	cache  *cache.Cache
	server *Server
	held   map[cache.Key]string // versions
}

func playScript(t *testing.T, s *script) {
	t.Helper()
	g := &stage{T: t, cache: released(), held: map[cache.Key]string{}}
	var err error
	if g.server, err = New(Config{Cache: g.cache}); err != nil {
		t.Fatal(err)
	}
	open := func(i int) *hostile { return newHostile(g.server, i%2 == 0, i != 3) }
	clients := []*hostile{open(0), open(1), open(2), open(3)}
	for range maxSteps {
		if len(s.data) == 0 {
			break
		}
		op, i := s.next(8), s.next(len(clients))
		switch op {
		default:
			clients[i].send(s.request(clients[i].nonces()))
		case 4:
			if r := s.raw(); r != nil {
				clients[i].send(r)
			}
		case 5:
			g.set(s.key(), s.next(3))
		case 6:
			g.remove(s.key())
		case 7:
			clients[i].end()
			synctest.Wait()
			clients[i] = open(i)
			g.supply()
		}
		if s.next(2) == 0 {
			synctest.Wait()
		}
	}
	g.serves()
	for _, c := range clients {
		c.end()
	}
	g.supply()
	if streams := g.cache.Status().Streams; len(streams) != 0 {
		t.Errorf("streams that ended are still there: %+v", streams)
	}
	for _, kind := range cache.Kinds() {
		if names := g.cache.Demanded(kind); len(names) != 0 {
			t.Errorf("%s: nobody asks, still demanded: %q", kind, names)
		}
	}
}

// key chooses something that may exist: no name is a cluster of both sorts.
func (s *script) key() cache.Key {
	kind := cache.Kinds()[s.next(len(cache.Kinds()))]
	switch kind {
	case cache.WildcardCluster:
		return cache.Key{Kind: kind, Name: "a"}
	case cache.OnDemandCluster:
		return cache.Key{Kind: kind, Name: []string{"b", "c"}[s.next(2)]}
	default:
		return cache.Key{Kind: kind, Name: scriptNames[s.next(3)]}
	}
}

func (g *stage) set(key cache.Key, content int) {
	r, err := cache.NewResource(key.Name, wrapperspb.Int64(int64(content+1)))
	if err != nil {
		g.Fatal(err)
	}
	g.cache.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{key.Kind: {r}}})
	g.held[key] = r.Version
}

func (g *stage) remove(key cache.Key) {
	g.cache.Apply(cache.Batch{Remove: []cache.Key{key}})
	delete(g.held, key)
}

// supply answers demand once, as a publisher does that knows no other names and
// keeps nothing that nobody asks for.
func (g *stage) supply() {
	synctest.Wait()
	d := g.cache.TakeDemand()
	g.cache.Apply(cache.Batch{Remove: d.Wanted})
	for _, key := range g.cache.Evict(d.Dropped...) {
		delete(g.held, key)
	}
	synctest.Wait()
}

// serves asks for everything, as an Envoy that has just come, and checks that it
// gets what there is.
func (g *stage) serves() {
	g.Helper()
	g.supply()
	ctx, cancel := context.WithCancel(context.Background())
	node := &corev3.Node{Id: "honest", UserAgentName: "envoy"}
	connect := func(serve func(xdstest.ServerStream) error) *xdstest.Client {
		return xdstest.New(xdstest.Pipe(ctx, serve), xdstest.Options{Node: node})
	}
	ads := connect(func(str xdstest.ServerStream) error { return g.server.DeltaAggregatedResources(str) })
	onDemand := connect(func(str xdstest.ServerStream) error { return g.server.DeltaClusters(str) })
	defer func() {
		cancel()
		<-ads.Done()
		<-onDemand.Done()
	}()
	asked := []string{"a", "b", "c", "ghost"}
	client := func(kind cache.Kind) *xdstest.Client {
		if kind == cache.OnDemandCluster {
			return onDemand
		}
		return ads
	}
	for _, kind := range cache.Kinds() {
		names := asked
		if kind == cache.WildcardCluster || kind == cache.Listener {
			names = nil
		}
		if err := client(kind).Subscribe(kind.TypeURL(), names...); err != nil {
			g.Fatal(err)
		}
	}
	for range 3 {
		g.supply()
		time.Sleep(time.Minute) // gates that wait for somebody else have ended
	}
	for _, kind := range cache.Kinds() {
		want := map[string]string{}
		for _, name := range asked {
			version, held := g.held[cache.Key{Kind: kind, Name: name}]
			if !held && kind == cache.Endpoints {
				empty, err := cache.NewResource(name, &endpointv3.ClusterLoadAssignment{ClusterName: name})
				if err != nil {
					g.Fatal(err)
				}
				version, held = empty.Version, true
			}
			if held {
				want[name] = version
			}
		}
		st := client(kind).State(kind.TypeURL())
		if diff := cmp.Diff(want, st.Versions()); diff != "" {
			g.Errorf("%s held (-want +got):\n%s", kind, diff)
		}
		if gone := kind == cache.Secret || kind == cache.Route || kind == cache.OnDemandCluster; gone && st.Removed["ghost"] == 0 {
			g.Errorf("%s ghost was asked for and not answered", kind)
		}
	}
}
