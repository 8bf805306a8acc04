package server

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/on_demand/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	meshresource "github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

const clusterJSON = `{
  "name": %q, "type": "EDS", "connect_timeout": "%ds",
  "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
  "eds_cluster_config": {"service_name": %[1]q,
    "eds_config": {"resource_api_version": "V3", "ads": {}, "initial_fetch_timeout": "1s"}}
}`

const assignmentJSON = `{"cluster_name": %q, "endpoints": [{"lb_endpoints": [
  {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": %d}}}}]}]}`

const listenerJSON = `{
  "name": "out", "address": {"socket_address": {"address": "127.0.0.1", "port_value": 15001}},
  "filter_chains": [{"filters": [{"name": "hcm", "typed_config": {
    "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
    "stat_prefix": "out",
    "rds": {"route_config_name": "routes", "config_source": {"resource_api_version": "V3", "ads": {}}},
    "http_filters": [
      {"name": "envoy.filters.http.on_demand", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.on_demand.v3.OnDemand",
        "odcds": {"timeout": "2s", "source": {"resource_api_version": "V3", "api_config_source": {
          "api_type": "DELTA_GRPC", "transport_api_version": "V3", "set_node_on_first_message_only": true,
          "grpc_services": [{"envoy_grpc": {"cluster_name": %q, "authority": "registrar"}}]}}}}},
      {"name": "envoy.filters.http.router", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]}}]}]
}`

const routesJSON = `{"name": "routes", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
  {"match": {"prefix": "/"}, "route": {"cluster_header": ":authority"}}]}]}`

// node is a real Envoy under the server, with an HTTP listener whose cluster is
// the request's authority, and an application.
type node struct {
	*fixture
	envoy  *wiretest.Envoy
	lab    *wiretest.Lab
	app    int
	client *http.Client
}

func newNode(t *testing.T, c *cache.Cache) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{fixture: serveAt(t, filepath.Join(dir, "xds.sock"), Config{Cache: c}), lab: wiretest.NewLab(t)}
	l := n.lab.Node.Listen(t, "127.0.0.1:0")
	n.app = l.Addr().(*net.TCPAddr).Port
	app := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })}
	go func() { _ = app.Serve(l) }()
	t.Cleanup(func() { _ = app.Close() })
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return n.lab.Node.DialContext(ctx, network, "127.0.0.1:15001")
	}}
	n.client = &http.Client{Transport: transport, Timeout: patience}
	admin := filepath.Join(dir, "admin.sock")
	bootstrap, err := meshresource.Bootstrap(meshresource.BootstrapParams{NodeID: "n1", Cluster: "test", XDSSocket: n.path, AdminSocket: admin})
	n.must(err)
	n.envoy = n.lab.StartEnvoy(wiretest.EnvoyConfig{Bootstrap: bootstrap, AdminSocket: admin})
	return n
}

// resource makes a resource from JSON.
func (n *node) resource(name string, m proto.Message, format string, args ...any) cache.Resource {
	n.Helper()
	n.must(protojson.Unmarshal(fmt.Appendf(nil, format, args...), m))
	r, err := cache.NewResource(name, m)
	n.must(err)
	return r
}

func (n *node) cluster(name string, connectTimeout time.Duration) cache.Resource {
	n.Helper()
	return n.resource(name, new(clusterv3.Cluster), clusterJSON, name, int(connectTimeout.Seconds()))
}

func (n *node) assignment(name string) cache.Resource {
	n.Helper()
	return n.resource(name, new(endpointv3.ClusterLoadAssignment), assignmentJSON, name, n.app)
}

func (n *node) empty(name string) cache.Resource {
	n.Helper()
	return n.resource(name, new(endpointv3.ClusterLoadAssignment), `{"cluster_name": %q}`, name)
}

// base gives Envoy the listener and its routes.
func (n *node) base() cache.Batch {
	n.Helper()
	return cache.Batch{Set: map[cache.Kind][]cache.Resource{
		cache.Listener: {n.resource("out", new(listenerv3.Listener), listenerJSON, meshresource.XDSCluster)},
		cache.Route:    {n.resource("routes", new(routev3.RouteConfiguration), routesJSON)},
	}}
}

// settled waits until the keys are acknowledged.
func (n *node) settled(keys ...cache.Key) {
	n.Helper()
	n.finished(n.Await, keys)
}

// asked waits until Envoy has asked for the keys as well.
func (n *node) asked(keys ...cache.Key) {
	n.Helper()
	n.finished(n.AwaitSubscribed, keys)
}

func (n *node) finished(await func([]cache.Key, func(cache.Result)) func(), keys []cache.Key) {
	n.Helper()
	done := make(chan cache.Result, 1)
	await(keys, func(r cache.Result) { done <- r })
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case r := <-done:
		if !r.Acknowledged() {
			n.Fatalf("%v: %+v", keys, r)
		}
	case <-timer.C:
		n.Fatalf("%v not acknowledged: %+v", keys, n.Status())
	}
}

// get asks for a service and returns the status and the body.
func (n *node) get(authority string) (status int, body string) {
	n.Helper()
	req, err := http.NewRequestWithContext(n.Context(), http.MethodGet, "http://"+authority+"/", nil)
	n.must(err)
	resp, err := n.client.Do(req)
	n.must(err)
	text, err := io.ReadAll(resp.Body)
	n.must(err)
	_ = resp.Body.Close()
	return resp.StatusCode, string(text)
}

// wants checks the status of a service. A 503 is that of a cluster that Envoy has and that
// has no endpoint.
func (n *node) wants(authority string, status int) {
	n.Helper()
	body := ""
	if status == http.StatusServiceUnavailable {
		body = "no healthy upstream"
	}
	if got, text := n.get(authority); got != status || text != body {
		n.Errorf("%s: %d %q, want %d %q", authority, got, text, status, body)
	}
}

// clean checks that Envoy is content: nothing rejected, nothing warming, nothing
// that it had to wait for in vain.
func (n *node) clean() {
	n.Helper()
	stats := n.envoy.Stats(`update_rejected$|init_fetch_timeout$|warming_clusters$|total_listeners_warming$|^http\.out\.no_cluster$`)
	for name, value := range stats {
		if value != 0 {
			n.Errorf("Envoy: %s is %d", name, value)
		}
	}
	if len(stats) == 0 {
		n.Error("Envoy has none of the statistics")
	}
	for kind, c := range n.Metrics().Counters {
		if c.GateTimeouts != 0 || c.Rejected != 0 {
			n.Errorf("%s: %+v", kind, c)
		}
	}
	if got := n.Status().Rejections; len(got) != 0 {
		n.Errorf("rejections %+v", got)
	}
}

// answers serves demand from services until the test ends: one that exists gets
// cluster and assignment, one without endpoints an empty assignment.
func (n *node) answers(services map[string]bool) {
	done, ended := make(chan struct{}), make(chan struct{})
	n = &node{fixture: n.fixture, app: n.app} // the test may go on with another server
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			case <-n.DemandReady():
			}
			var b cache.Batch
			b.Set = make(map[cache.Kind][]cache.Resource)
			for _, k := range n.TakeDemand().Wanted {
				alive, known := services[k.Name]
				switch {
				case !known || (k.Kind != cache.OnDemandCluster && k.Kind != cache.Endpoints):
					b.Remove = append(b.Remove, k)
				case alive:
					b.Set[cache.OnDemandCluster] = append(b.Set[cache.OnDemandCluster], n.cluster(k.Name, time.Second))
					b.Set[cache.Endpoints] = append(b.Set[cache.Endpoints], n.assignment(k.Name))
				default:
					b.Set[cache.OnDemandCluster] = append(b.Set[cache.OnDemandCluster], n.cluster(k.Name, time.Second))
					b.Set[cache.Endpoints] = append(b.Set[cache.Endpoints], n.empty(k.Name))
				}
			}
			n.Apply(b)
		}
	}()
	n.Cleanup(func() { close(done); <-ended })
}

// A stock Envoy takes what the server gives: a wildcard cluster with its
// assignment, a listener, its routes, and clusters on demand; a changed cluster is
// active again without a timeout because its assignment follows, on the wildcard and on
// demand (XDS-34, XDS-35, XDS-36, XDS-D7; dataplane decision 5).
func TestEnvoy(t *testing.T) {
	n := newNode(t, released())
	n.answers(map[string]bool{"cold.test": true, "empty.test": false})
	b := n.base()
	b.Set[cache.WildcardCluster] = []cache.Resource{n.cluster("warm.test", time.Second), n.cluster("none.test", time.Second)}
	b.Set[cache.Endpoints] = []cache.Resource{n.assignment("warm.test"), n.empty("none.test")}
	n.Apply(b)
	n.envoy.Eventually("Envoy connects", func() bool { return len(n.Status().Streams) == 1 })
	n.settled(key(cache.Listener, "out"), key(cache.WildcardCluster, "warm.test"))
	n.asked(key(cache.Route, "routes")) // an acknowledged listener waits for it before it listens
	n.envoy.Eventually("Envoy is live", func() bool { return strings.Contains(n.envoy.Get("/ready"), "LIVE") })
	n.wants("warm.test", http.StatusOK)
	n.wants("none.test", http.StatusServiceUnavailable)
	n.wants("cold.test", http.StatusOK)
	n.wants("empty.test", http.StatusServiceUnavailable)
	n.wants("empty.test", http.StatusServiceUnavailable)

	for _, service := range []struct {
		kind cache.Kind
		name string
	}{{cache.WildcardCluster, "warm.test"}, {cache.OnDemandCluster, "cold.test"}} {
		t.Run(service.kind.String(), func(t *testing.T) {
			for i := range 10 {
				n.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
					service.kind: {n.cluster(service.name, time.Duration(2+i)*time.Second)},
				}})
				n.settled(key(service.kind, service.name))
				n.settled(key(cache.Endpoints, service.name))
				want := fmt.Sprintf(`"connect_timeout": "%ds"`, 2+i)
				dump := n.envoy.Get("/config_dump?resource=dynamic_active_clusters&name_regex=" + service.name)
				if !strings.Contains(dump, want) {
					t.Errorf("change %d is acknowledged and not active:\n%s", i, dump)
				}
				n.wants(service.name, http.StatusOK)
			}
		})
	}

	t.Run("last endpoint goes", func(*testing.T) {
		for _, name := range []string{"warm.test", "cold.test"} {
			n.Apply(cache.Batch{Remove: []cache.Key{key(cache.Endpoints, name)}})
			n.settled(key(cache.Endpoints, name))
			n.wants(name, http.StatusServiceUnavailable)
			n.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Endpoints: {n.assignment(name)}}})
			n.settled(key(cache.Endpoints, name))
			n.wants(name, http.StatusOK)
		}
	})
	n.clean()
}

// A registrar that restarts, with content that is not complete for a while and
// then the same, takes nothing from Envoy and sends nothing again but what
// changed; what went in between is removed (XDS-41, XDS-42, MESH-14; contract
// 4.8).
func TestEnvoyOverRestart(t *testing.T) {
	n := newNode(t, released())
	n.answers(map[string]bool{"cold.test": true})
	b := n.base()
	b.Set[cache.WildcardCluster] = []cache.Resource{n.cluster("warm.test", time.Second), n.cluster("gone.test", time.Second)}
	b.Set[cache.Endpoints] = []cache.Resource{n.assignment("warm.test"), n.assignment("gone.test")}
	n.Apply(b)
	n.envoy.Eventually("Envoy connects", func() bool { return len(n.Status().Streams) == 1 })
	n.asked(key(cache.Listener, "out"), key(cache.Route, "routes"))
	n.envoy.Eventually("Envoy is live", func() bool { return strings.Contains(n.envoy.Get("/ready"), "LIVE") })
	n.wants("cold.test", http.StatusOK)
	n.stop()

	n.fixture = serveAt(t, n.path, Config{Cache: cache.New(cache.Config{})})
	n.envoy.Eventually("Envoy connects again", func() bool { return len(n.Status().Streams) == 2 })
	for range 20 {
		n.wants("warm.test", http.StatusOK)
		n.wants("cold.test", http.StatusOK)
	}
	b = n.base()
	b.Set[cache.WildcardCluster] = []cache.Resource{n.cluster("warm.test", time.Second)}
	b.Set[cache.Endpoints] = []cache.Resource{n.assignment("warm.test"), n.assignment("gone.test")}
	n.Apply(b)
	n.answers(map[string]bool{"cold.test": true}) // what is still wanted
	n.Release()
	n.settled(key(cache.Listener, "out"), key(cache.WildcardCluster, "gone.test"), key(cache.OnDemandCluster, "cold.test"))
	for _, name := range []string{"warm.test", "cold.test"} {
		// To await a load assignment would have it sent again, as a proof.
		n.envoy.Eventually("Envoy asks for "+name, func() bool { return n.Subscribed(key(cache.Endpoints, name)) })
		n.wants(name, http.StatusOK)
	}
	if dump := n.envoy.Get("/clusters"); strings.Contains(dump, "gone.test::") {
		t.Error("what went while nobody was connected is still there")
	}
	for kind, c := range n.Metrics().Counters {
		want := uint64(0)
		if kind == cache.WildcardCluster {
			want = 1 // the removal
		}
		if c.Resources != want {
			t.Errorf("%s: %d resources sent after the restart, want %d", kind, c.Resources, want)
		}
	}
	n.clean()
}

func key(kind cache.Kind, name string) cache.Key { return cache.Key{Kind: kind, Name: name} }
