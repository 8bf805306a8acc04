package resource_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	upstreamhttpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// ticker answers "/stream" with a line per line of the request, so that a test can
// see that one stream goes on, and everything else as the echo server does.
func ticker(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/stream" {
			wiretest.Echo(name).ServeHTTP(w, r)
			return
		}
		control := http.NewResponseController(w)
		_ = control.EnableFullDuplex()
		_ = control.Flush()
		for lines := bufio.NewScanner(r.Body); lines.Scan(); {
			_, _ = fmt.Fprintln(w, lines.Text())
			_ = control.Flush()
		}
	})
}

// tick is an open stream of ticker.
type tick struct {
	out *io.PipeWriter
	in  *bufio.Reader
	end func() error
}

func (m *mesh) openTick(c *http.Client, authority string) *tick {
	m.Helper()
	reader, writer := io.Pipe()
	// The stream may be open for longer than a client's usual timeout.
	request, err := http.NewRequestWithContext(m.Context(), http.MethodPost, "http://"+authority+"/stream", reader)
	if err != nil {
		m.Fatal(err)
	}
	response, err := c.Do(request) //nolint:bodyclose // end closes it
	if err != nil {
		m.Fatalf("stream to %s: %v", authority, err)
	}
	return &tick{out: writer, in: bufio.NewReader(response.Body), end: func() error {
		_ = writer.Close()
		_, err := io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		return err
	}}
}

func (k *tick) beat() error {
	if _, err := io.WriteString(k.out, "beat\n"); err != nil {
		return err
	}
	line, err := k.in.ReadString('\n')
	if err == nil && line != "beat\n" {
		err = fmt.Errorf("got %q", line)
	}
	return err
}

// A pod's ports change while streams run on all of them: added, removed, from one
// port to many and back. The listener is updated in place every time, and every
// stream goes on to its own end, on the ports that stay and on those that go
// (contract 5, XDS-20, XDS-58). A new port is served at once.
func TestWirePortChange(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080")
	for _, n := range []string{"8080", "9090", "7070"} {
		pod.ServeHTTP(t, "127.0.0.1:"+n, ticker(n))
	}
	m.setService(service{name: "payments", ports: "8080 9090=h2 7070"})
	for _, cluster := range []string{"payments.aether.internal", "payments.aether.internal:9090", "payments.aether.internal:7070"} {
		m.setEndpoints(cluster, pod)
	}
	m.xds.Sync()
	clients := []*http.Client{client.http1(t), client.h2c(t)}
	streams := make(map[string]*tick)
	previous := ""
	for i, set := range []string{"8080", "8080 9090=h2", "8080 9090=h2 7070", "8080 7070", "8080 7070 5432=tcp", "8080", "8080 7070"} {
		if set != previous {
			pod.spec.Ports = ports(t, set)
			for _, r := range podResources(t, pod.spec) {
				m.xds.Set(r)
			}
			m.xds.Sync()
			previous = set
		}
		served := make(map[string]bool)
		for _, pt := range pod.spec.Ports {
			served[portText(pt.Number)] = true
		}
		for _, n := range []string{"8080", "9090", "7070"} {
			for v, c := range clients {
				authority := "payments.aether.internal:" + n
				got := m.call(c, authority)
				// A connection to a port that goes may still carry requests to that port.
				ok := got.status == 200 && got.seen.Server == n
				if refused := got.status == 503 || got.status == 421; !ok && (served[n] || !refused) {
					t.Errorf("%s: port %s: got %d from %q", set, n, got.status, got.seen.Server)
				}
				if served[n] {
					streams[fmt.Sprint(i, n, v)] = m.openTick(c, authority)
				}
			}
		}
		for name, s := range streams {
			if err := s.beat(); err != nil {
				t.Errorf("%s: stream %s: %v", set, name, err)
			}
		}
	}
	for name, s := range streams {
		if err := s.end(); err != nil {
			t.Errorf("end of stream %s: %v", name, err)
		}
	}
	for name, want := range map[string]int64{
		"listener_manager.listener_in_place_updated": 6, "listener_manager.listener_modified": 0,
		"listener_manager.total_listeners_draining": 0, "listener_manager.lds.update_rejected": 0,
		"cluster_manager.cds.update_rejected": 0, "cluster_manager.warming_clusters": 0,
	} {
		if got := m.envoy.Stat(name); got != want && name != "listener_manager.listener_modified" {
			t.Errorf("%s is %d, want %d", name, got, want)
		}
	}
}

// A cluster changes without its endpoints: the change is active without a timeout, no
// request fails meanwhile, nothing warms for ever (XDS-34).
func TestWireClusterChange(t *testing.T) {
	m, client := twoPorts(t, wiretest.Echo("app"))
	c := client.h2c(t)
	m.call(c, "payments.aether.internal")
	m.xds.Sync()
	for i := range 10 {
		m.changeCluster("payments.aether.internal", func(c *clusterv3.Cluster) {
			c.ConnectTimeout = durationpb.New(time.Second + time.Duration(i+1)*time.Millisecond)
		})
		for range 50 {
			if got := m.call(c, "payments.aether.internal"); got.status != 200 {
				t.Fatalf("change %d: got %d %s", i, got.status, got.body)
			}
		}
		m.xds.Sync()
		wiretest.Eventually(t, "no cluster warms", func() bool { return m.envoy.Stat("cluster_manager.warming_clusters") == 0 })
	}
	m.unwaited()
}

// changeCluster publishes an edited version of the http cluster of payments.
func (m *mesh) changeCluster(name string, edit func(*clusterv3.Cluster)) {
	m.Helper()
	c, err := resource.Cluster(resource.ServiceCluster{
		Name: name, SNI: "8080", Protocol: ports(m, "8080")[0].Protocol, TrustDomain: trustDomain,
		Identities: []string{"spiffe://" + trustDomain + "/ns/default/sa/payments"},
	})
	if err != nil {
		m.Fatal(err)
	}
	edit(c)
	m.xds.SetOnDemand(c)
}

// A name that leads nowhere becomes a service, and a service becomes a name that
// leads nowhere: each with the next request, without a timeout (XDS-D3, XDS-D4, T4).
func TestWireTombstone(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("late-1", "late", "8080")
	pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("late"))
	c := client.http1(t)
	for range 3 {
		for range 5 {
			if got := m.call(c, "late.aether.internal"); got.status != http.StatusServiceUnavailable {
				t.Errorf("before: got %d", got.status)
			}
		}
		m.setService(service{name: "late", ports: "8080"})
		m.setEndpoints("late.aether.internal", pod)
		m.xds.Sync()
		if got := m.call(c, "late.aether.internal"); got.seen.Server != "late" {
			t.Errorf("as a service: got %d from %q", got.status, got.seen.Server)
		}
		delete(m.vhosts, "late")
		m.setRoutes()
		m.xds.SetOnDemand(resource.Tombstone("late.aether.internal"))
		m.xds.Sync()
	}
	m.unwaited()
}

// Mesh connections are renewed by age. With an age of 100 ms and load that never
// pauses, no request fails, and a long stream is not cut.
func TestWireConnectionAge(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080")
	pod.ServeHTTP(t, "127.0.0.1:8080", ticker("app"))
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments.aether.internal", pod)
	m.changeCluster("payments.aether.internal", func(c *clusterv3.Cluster) {
		const key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
		options := new(upstreamhttpv3.HttpProtocolOptions)
		if err := c.GetTypedExtensionProtocolOptions()[key].UnmarshalTo(options); err != nil {
			t.Fatal(err)
		}
		options.CommonHttpProtocolOptions.MaxConnectionDuration = durationpb.New(100 * time.Millisecond)
		packed, err := anypb.New(options)
		if err != nil {
			t.Fatal(err)
		}
		c.TypedExtensionProtocolOptions[key] = packed
	})
	m.xds.Sync()
	const ages = 8
	for i, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		stream := m.openTick(c, "payments.aether.internal")
		wiretest.Eventually(t, "connections reach the age", func() bool {
			if got := m.call(c, "payments.aether.internal"); got.status != 200 {
				t.Fatalf("got %d %s", got.status, got.body)
			}
			if err := stream.beat(); err != nil {
				t.Fatal(err)
			}
			return m.envoy.Stat("cluster.payments_aether_internal.upstream_cx_max_duration_reached") >= int64(ages*(i+1))
		})
		if err := stream.end(); err != nil {
			t.Error(err)
		}
	}
}

// All pods of a node share one delta CDS stream for on-demand clusters, HTTP and
// TCP alike, however many listeners there are, and however often pods come and go.
func TestWireOneOnDemandStream(t *testing.T) {
	m := newMesh(t)
	vip := netip.MustParseAddrPort("198.18.0.10:5432")
	db := m.addPod("db", "db", "5432=tcp")
	db.ServeTCP(t, "127.0.0.1:5432", func(c *net.TCPConn) { _, _ = io.WriteString(c, "hello") })
	m.setService(service{name: "db", ports: "5432=tcp", vip: vip.Addr()})
	m.setEndpoints(vip.String(), db)
	for round := range 2 {
		var pods []*meshPod
		for i := range 8 {
			p := m.addPod(fmt.Sprintf("client-%d-%d", round, i), fmt.Sprint("client", i), "")
			m.lab.RedirectTCP(p.Pod, vipRanges, vip)
			pods = append(pods, p)
			m.call(p.http1(t), fmt.Sprintf("ghost-%d-%d.aether.internal", round, i))
			if got := m.greeting(p, vip.String()); got != "hello" {
				t.Errorf("got %q", got)
			}
		}
		for _, p := range pods {
			m.xds.Remove(wiretest.TypeListener, resource.OutboundHTTPListener(p.spec.ID), resource.OutboundTCPListener(p.spec.ID))
		}
		m.xds.Sync()
	}
	if open, opened := m.xds.OnDemandStreams(); open != 1 || opened != 1 {
		t.Errorf("%d delta CDS streams are open, %d were opened, want 1", open, opened)
	}
	for name, n := range m.xds.Asked() {
		if n != 1 {
			t.Errorf("%s was asked for %d times", name, n)
		}
	}
}

// Envoy goes on trying to reach a registrar that is away, without ever longer pauses, so
// that it is back soon when the registrar is; it asks for every cluster it ever asked for,
// and serves all the while (MESH-33).
func TestWireReconnect(t *testing.T) {
	m, client := twoPorts(t, wiretest.Echo("app"))
	c := client.http1(t)
	m.call(c, "payments.aether.internal")
	m.call(c, "ghost.aether.internal")
	m.xds.Stop()
	// With Envoy's own pauses, which grow to 30 s, it would not try as often in the half
	// minute that Eventually has.
	const tries = 24
	wiretest.Eventually(t, "Envoy tries again and again", func() bool {
		if got := m.call(c, "payments.aether.internal"); got.status != 200 {
			t.Fatalf("while away: got %d", got.status)
		}
		if got := m.call(c, "ghost.aether.internal"); got.status != 503 {
			t.Fatalf("ghost, while away: got %d", got.status)
		}
		return m.envoy.Stat("cluster.xds|registrar.upstream_cx_connect_fail") >= tries
	})
	m.xds.Restart()
	wiretest.Eventually(t, "both streams are back", func() bool { open, _ := m.xds.OnDemandStreams(); return open == 1 })
	m.xds.Sync()
	wiretest.Eventually(t, "every on-demand name is asked for again", func() bool {
		asked := m.xds.Asked()
		return asked["payments.aether.internal"] == 2 && asked["ghost.aether.internal"] == 2
	})
}
