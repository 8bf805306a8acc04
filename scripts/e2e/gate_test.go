package e2e

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/portolan-mesh/portolan/scripts/delta"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// The publication gate, seen from outside: whenever a load assignment names a pod,
// that pod's 15008 listens and so does the port, in the same moment (contract 4.3,
// 4.4, XDS-21). Pods come, and one has its 9090 three seconds late.
func TestPublicationGate(t *testing.T) {
	n := startNode(t, node.Options{})
	var mu sync.Mutex
	pods := map[string]*node.Pod{} // by address
	seen := map[string]map[string]bool{}
	var early []string

	watcher := watchDelta(t, func(resp *discoveryv3.DeltaDiscoveryResponse) {
		mu.Lock()
		defer mu.Unlock()
		for _, r := range resp.GetResources() {
			if resp.GetTypeUrl() != delta.EndpointType {
				continue
			}
			var la endpointv3.ClusterLoadAssignment
			if err := r.GetResource().UnmarshalTo(&la); err != nil {
				t.Errorf("load assignment %s: %v", r.GetName(), err)
				return
			}
			port := "8080"
			if strings.HasSuffix(r.GetName(), ":9090") {
				port = "9090"
			}
			for _, group := range la.GetEndpoints() {
				for _, ep := range group.GetLbEndpoints() {
					ip := ep.GetEndpoint().GetAddress().GetSocketAddress().GetAddress()
					if seen[ip] == nil {
						seen[ip] = map[string]bool{}
					}
					if seen[ip][port] {
						continue
					}
					seen[ip][port] = true
					for _, must := range []string{"15008", port} {
						if !listens(t, ip, must) {
							early = append(early, fmt.Sprintf("%s names %s before its %s listens", r.GetName(), ip, must))
						}
					}
				}
			}
		}
	})
	// What proves a pod is awaited from every Envoy, so this one asks for it, too.
	watcher.subscribe(t, "type.googleapis.com/envoy.config.cluster.v3.Cluster")
	watcher.subscribe(t, "type.googleapis.com/envoy.config.listener.v3.Listener")
	watcher.subscribe(t, "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
		"in|spiffe://aether.internal/ns/default/sa/payments", "spiffe://aether.internal")
	watcher.subscribe(t, delta.EndpointType, "payments.aether.internal", "payments.aether.internal:9090")

	for i := range 6 {
		spec := payments(fmt.Sprintf("payments-%d", i), "8080,9090=h2", "http:8080", "h2:9090")
		if i == 5 {
			spec = payments("payments-5", "8080,9090=h2", "http:8080", "h2:9090,delay=3s")
		}
		p := addPod(t, n, spec)
		mu.Lock()
		pods[p.IP().String()] = p
		mu.Unlock()
	}
	waitHealthy(t, n, 8080, 6)
	mu.Lock()
	nines := 0
	for _, ports := range seen {
		if ports["9090"] {
			nines++
		}
	}
	mu.Unlock()
	if nines > 5 {
		t.Error("9090 of the late pod was published while it did not listen")
	}
	waitHealthy(t, n, 9090, 6)
	eventually(t, 5*time.Second, func() string {
		mu.Lock()
		defer mu.Unlock()
		for ip := range pods {
			if !seen[ip]["8080"] || !seen[ip]["9090"] {
				return "load assignments do not name " + ip
			}
		}
		return ""
	})
	mu.Lock()
	defer mu.Unlock()
	for _, e := range early {
		t.Error(e)
	}
}

// listens reports whether a connection to the pod's port is accepted now. The
// servers of these pods listen on every address.
func listens(t *testing.T, ip, port string) bool {
	t.Helper()
	conn, err := net.DialTimeout("tcp", net.JoinHostPort(ip, port), time.Second)
	if err != nil {
		return false
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	return true
}
