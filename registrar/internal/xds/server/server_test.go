package server

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clusterservice "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	meshresource "github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// Both services answer over a real socket: everything on ADS, clusters by name on
// the stream of their own, missing names included (XDS-D2, XDS-28).
func TestServices(t *testing.T) {
	f := serve(t, released())
	f.answer()
	f.set(cache.WildcardCluster, "1", "w")
	f.set(cache.OnDemandCluster, "1", "a")
	f.set(cache.Endpoints, "1", "a")
	conn := f.dial()
	ads := f.ads(conn, nil)
	f.must(ads.Subscribe(resource.ClusterType))
	f.must(ads.Subscribe(resource.EndpointType, "a", "ghost"))
	f.waitFor(ads, resource.ClusterType, has("w"))
	f.waitFor(ads, resource.EndpointType, has("a", "ghost"))
	od, err := conn.Clusters(t.Context(), xdstest.Options{})
	f.must(err)
	f.must(od.Subscribe(resource.ClusterType, "a", "ghost", "w"))
	f.waitFor(od, resource.ClusterType, func(s *xdstest.State) bool {
		return has("a")(s) && s.Removed["ghost"] == 1 && s.Removed["w"] == 1
	})
	streams := f.Status().Streams
	if len(streams) != 2 || streams[0].Peer == "" || streams[0].Peer != streams[1].Peer {
		t.Errorf("streams %+v, want two of one peer", streams)
	}
	if want := fmt.Sprintf("pid %d", os.Getpid()); streams[0].Peer != want {
		t.Errorf("peer %q, want %q", streams[0].Peer, want)
	}
}

// What is not delta xDS is refused in so many words, not ignored.
func TestUnimplemented(t *testing.T) {
	f := serve(t, released())
	conn, err := grpc.NewClient("unix://"+f.path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	f.must(err)
	defer conn.Close()
	for name, open := range map[string]func(context.Context) (interface{ RecvMsg(any) error }, error){
		"StreamAggregatedResources": func(ctx context.Context) (interface{ RecvMsg(any) error }, error) {
			return discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
		},
		"StreamClusters": func(ctx context.Context) (interface{ RecvMsg(any) error }, error) {
			return clusterservice.NewClusterDiscoveryServiceClient(conn).StreamClusters(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			stream, err := open(t.Context())
			if err == nil {
				err = stream.RecvMsg(new(discoveryv3.DiscoveryResponse))
			}
			if status.Code(err) != codes.Unimplemented {
				t.Errorf("error %v, want Unimplemented", err)
			}
		})
	}
}

// Streams that are opened and killed, idle, mid-response or unread, leave no
// goroutine and no state behind (XDS-31).
func TestStreamsLeaveNothing(t *testing.T) {
	f := serve(t, released())
	f.answer()
	names := make([]string, 50)
	for i := range names {
		names[i] = fmt.Sprint("c", i)
	}
	f.set(cache.WildcardCluster, "1", names...)
	warm := f.dial()
	client := f.ads(warm, nil)
	f.must(client.Subscribe(resource.ClusterType))
	f.waitFor(client, resource.ClusterType, has(names...))
	base := runtime.NumGoroutine()

	const workers, each = 20, 50
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			conn, err := xdstest.Dial("unix://" + f.path)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			for i := range each {
				ctx, cancel := context.WithCancel(t.Context())
				c, err := conn.ADS(ctx, xdstest.Options{Judge: func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
					if i%3 == 0 {
						cancel() // in the middle of the exchange
					}
					return xdstest.Ack()
				}})
				if err != nil {
					t.Error(err)
					cancel()
					return
				}
				_ = c.Subscribe(resource.ClusterType)
				_ = c.Subscribe(resource.EndpointType, fmt.Sprintf("e%d-%d", worker, i))
				if i%3 == 1 {
					_ = c.WaitFor(ctx, resource.ClusterType, has(names...))
				}
				cancel()
				<-c.Done()
			}
		})
	}
	wg.Wait()
	eventually(t, "goroutines back to base", func() bool { return runtime.NumGoroutine() <= base })
	eventually(t, "one stream left", func() bool { return len(f.Status().Streams) == 1 })
	if got := f.Demanded(cache.Endpoints); len(got) != 0 {
		t.Errorf("%d names still demanded", len(got))
	}
}

// eventually waits for what no event tells: the end of goroutines of a library.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<16)
			t.Fatalf("not in %v: %s\n%s", patience, what, buf[:runtime.Stack(buf, true)])
		}
		<-ticker.C
	}
}

// A client that comes back with tens of thousands of names is let in, and is sent
// only what changed (XDS-51, XDS-R24, XDS-R22).
func TestLargeReconnect(t *testing.T) {
	f := serve(t, released())
	const n = 60_000
	state := &xdstest.State{Subscribed: map[string]bool{}, Resources: map[string]xdstest.Resource{}}
	var list []cache.Resource
	for i := range n {
		r, err := cache.NewResource(fmt.Sprintf("a-service-with-quite-a-long-name-%06d.a-namespace.aether.internal:9090", i), &discoveryv3.ResourceName{Name: "x"})
		f.must(err)
		list = append(list, r)
		state.Subscribed[r.Name] = true
		state.Resources[r.Name] = xdstest.Resource{Version: r.Version, Body: r.Body}
	}
	f.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.OnDemandCluster: list}})
	f.set(cache.OnDemandCluster, "changed", list[7].Name)
	od, err := f.dial().Clusters(t.Context(), xdstest.Options{})
	f.must(err)
	f.must(od.Resume(resource.ClusterType, state))
	f.waitFor(od, resource.ClusterType, func(s *xdstest.State) bool { return len(s.Responses) > 0 })
	if got := od.State(resource.ClusterType).Received; len(got) != 1 || got[list[7].Name] != 1 {
		t.Errorf("%d resources were sent, want the one that changed", len(got))
	}
}

// Envoy's own pings, as the bootstrap sets them, are rarer than what is taken for
// abuse (XDS-R25): too strict a server ends the connection after a few.
func TestKeepaliveIsAllowed(t *testing.T) {
	raw, err := meshresource.Bootstrap(meshresource.BootstrapParams{NodeID: "n", Cluster: "c", XDSSocket: "/x", AdminSocket: "/a"})
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`"connection_keepalive": \{\s*"interval": "([^"]+)"`).FindSubmatch(raw)
	if found == nil {
		t.Fatalf("the bootstrap sets no keepalive:\n%s", raw)
	}
	// Envoy varies the interval by 15 %.
	if interval, err := time.ParseDuration(string(found[1])); err != nil || interval < 2*minPing {
		t.Errorf("Envoy pings every %s (%v), at most every %v is allowed", found[1], err, minPing)
	}
}

// A peer that is gone without a word is noticed: its stream is closed, and when
// it is back it gets what it missed (XDS-52).
func TestHalfOpen(t *testing.T) {
	f := serveAt(t, filepath.Join(t.TempDir(), "xds.sock"), Config{
		Cache: released(), PingAfter: time.Second, PingTimeout: 500 * time.Millisecond,
	})
	f.set(cache.WildcardCluster, "1", "a", "gone")
	wire := newWire(t, f.path)
	conn, err := xdstest.Dial("unix://" + wire.path)
	f.must(err)
	defer conn.Close()
	lost := f.ads(conn, nil)
	f.must(lost.Subscribe(resource.ClusterType))
	f.waitFor(lost, resource.ClusterType, has("a", "gone"))
	wire.cut()
	f.set(cache.WildcardCluster, "2", "a")
	f.Apply(cache.Batch{Remove: []cache.Key{{Kind: cache.WildcardCluster, Name: "gone"}}})
	eventually(t, "the stream is closed", func() bool { return len(f.Status().Streams) == 0 })

	back := f.ads(f.dial(), nil)
	f.must(back.Resume(resource.ClusterType, lost.State(resource.ClusterType)))
	f.must(back.Subscribe(resource.ListenerType))
	f.waitFor(back, resource.ClusterType, func(s *xdstest.State) bool { return has("a")(s) && s.Received["a"] == 1 })
}

// wire is a connection in two parts, which can be cut without either end being
// told.
type wire struct {
	path string
	up   atomic.Bool
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	w := &wire{path: filepath.Join(t.TempDir(), "wire")}
	w.up.Store(true)
	l, err := net.Listen("unix", w.path)
	if err != nil {
		t.Fatal(err)
	}
	var copying sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); copying.Wait() })
	copying.Go(func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("unix", to)
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
			copying.Go(func() { w.copy(a, b) })
			copying.Go(func() { w.copy(b, a) })
		}
	})
	return w
}

// cut loses all that comes from now on.
func (w *wire) cut() { w.up.Store(false) }

func (w *wire) copy(to, from net.Conn) {
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if w.up.Load() {
			_, _ = to.Write(buf[:n])
		}
	}
}

// A client that does not read its socket at all holds up nobody else, however
// much there is to send to it (XDS-R12).
func TestUnreadStream(t *testing.T) {
	f := serve(t, released())
	body := strings.Repeat("x", 1<<10)
	var names []string
	for i := range 2000 {
		names = append(names, fmt.Sprint("c", i))
	}
	f.set(cache.WildcardCluster, body, names...)

	block := make(chan struct{})
	slow := f.ads(f.dial(), func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { <-block; return xdstest.Ack() })
	f.must(slow.Subscribe(resource.ListenerType))
	f.must(slow.Subscribe(resource.ClusterType))
	fast := f.ads(f.dial(), nil)
	f.must(fast.Subscribe(resource.ClusterType))
	f.waitFor(fast, resource.ClusterType, has(names...))
	for i := range 20 {
		f.set(cache.WildcardCluster, fmt.Sprint(i), "c0")
		f.waitFor(fast, resource.ClusterType, func(s *xdstest.State) bool { return s.Received["c0"] == i+2 })
	}
	close(block)
	want := fast.State(resource.ClusterType).Resources["c0"].Version
	f.waitFor(slow, resource.ClusterType, func(s *xdstest.State) bool { return s.Resources["c0"].Version == want })
}

// A server that restarts takes the socket over; clients that reconnect get the
// difference, and those that are connected to the old one are told that it ends
// (MESH-14, MESH-42).
func TestRestart(t *testing.T) {
	old := serve(t, released())
	old.set(cache.Listener, "1", "l", "gone")
	client := old.ads(old.dial(), nil)
	old.must(client.Subscribe(resource.ListenerType))
	old.waitFor(client, resource.ListenerType, has("l", "gone"))
	old.stop()
	<-client.Done()
	if err := client.Err(); err != io.EOF { //nolint:errorlint // a stream's orderly end is this value
		t.Errorf("stream ended with %v, want an orderly end", err)
	}

	held := cache.New(cache.Config{})
	f := serveAt(t, old.path, Config{Cache: held})
	again := f.ads(f.dial(), nil)
	f.must(again.Resume(resource.ListenerType, client.State(resource.ListenerType)))
	eventually(t, "the client is connected", func() bool { return len(held.Status().Streams) == 1 })
	f.set(cache.Listener, "1", "l")
	if got := len(again.Order()); got != 0 {
		t.Errorf("%d responses before the content was complete", got)
	}
	held.Release()
	f.waitFor(again, resource.ListenerType, has("l"))
	if got := again.State(resource.ListenerType).Received; len(got) != 0 {
		t.Errorf("sent again %v, want nothing", got)
	}
}

// Serving ends with its listener's error and is refused a second time.
func TestServeErrors(t *testing.T) {
	s, err := New(Config{Cache: released()})
	if err != nil {
		t.Fatal(err)
	}
	listen := func() net.Listener {
		l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := listen()
	_ = l.Close()
	if err := s.Serve(t.Context(), l); err == nil || !strings.Contains(err.Error(), "serve xds on") {
		t.Errorf("closed listener: %v", err)
	}
	if err := s.Serve(t.Context(), listen()); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("second time: %v", err)
	}
}

// The metrics count what happened, by type and service and never by name
// (XDS-76).
func TestMetrics(t *testing.T) {
	f := serve(t, released())
	f.set(cache.WildcardCluster, "1", "a", "b")
	client := f.ads(f.dial(), func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resource.ListenerType {
			return xdstest.Nack("no")
		}
		return xdstest.Ack()
	})
	f.must(client.Subscribe(resource.ClusterType))
	f.must(client.Subscribe(resource.SecretType, "s"))
	f.must(client.Subscribe(resource.ListenerType))
	f.waitFor(client, resource.ListenerType, func(s *xdstest.State) bool { return s.Nacked == 1 })
	eventually(t, "verdicts are in", func() bool {
		m := f.Metrics()
		return m.Counters[cache.WildcardCluster].Acknowledged == 1 && m.Counters[cache.Listener].Rejected == 1
	})
	got := gather(t, f.registry)
	want := map[string]float64{
		"portolan_xds_held{}":                                               0,
		"portolan_xds_streams{service=ads}":                                 1,
		"portolan_xds_streams{service=on-demand}":                           0,
		"portolan_xds_resources{type=cluster}":                              2,
		"portolan_xds_subscriptions{type=secret}":                           1,
		"portolan_xds_pending_resources{type=cluster}":                      0,
		"portolan_xds_responses_total{type=cluster}":                        1,
		"portolan_xds_sent_resources_total{type=cluster}":                   2,
		"portolan_xds_acknowledged_responses_total{type=cluster}":           1,
		"portolan_xds_rejected_responses_total{type=listener}":              1,
		"portolan_xds_acknowledged_responses_total{type=listener}":          0,
		"portolan_xds_gate_timeouts_total{type=listener}":                   0,
		"portolan_xds_responses_total{type=on-demand-cluster}":              0,
		"portolan_xds_sent_resources_total{type=listener}":                  0,
		"portolan_xds_acknowledged_responses_total{type=on-demand-cluster}": 0,
	}
	for name, value := range want {
		if number, ok := got[name]; !ok || number != value {
			t.Errorf("%s is %v (%v), want %v", name, number, ok, value)
		}
	}
	if want := 1 + len(cache.Services()) + 8*len(cache.Kinds()); len(got) != want {
		t.Errorf("%d series, want %d whatever is served", len(got), want)
	}
	if _, err := New(Config{Cache: f.Cache, Registerer: f.registry}); err == nil {
		t.Error("metrics are registered twice")
	}
}

// gather returns the value of every series, by name{label=value}.
func gather(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]float64)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := family.GetName() + "{" + strings.Join(labels, ",") + "}"
			out[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return out
}
