package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// clusters are the names of Envoy's clusters of the mesh domain.
func clusters(t *testing.T, n *node.Node) map[string]bool {
	t.Helper()
	out, err := n.EnvoyAdmin(t.Context(), "/clusters")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]bool)
	for line := range strings.Lines(out) {
		if name, _, _ := strings.Cut(line, "::"); strings.Contains(name, "aether.internal") {
			found[name] = true
		}
	}
	return found
}

// Envoy is given a service's cluster when somebody asks for it, and before that
// only to a pod that declares it as an upstream (contract 4.5).
func TestUpstreams(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	addClient(t, n, "plain")
	waitHealthy(t, n, 9090, 1)
	waitRoutes(t, n)
	if got := clusters(t, n); len(got) != 0 {
		t.Errorf("Envoy has clusters that nobody asked for: %v", got)
	}
	client := addPod(t, n, node.PodSpec{Name: "client", Annotations: map[string]string{
		"endpoint.aether.io/ports":   "none",
		"config.aether.io/upstreams": "payments",
	}})
	eventually(t, readyTime, func() string {
		if got := clusters(t, n); !got["payments.aether.internal"] {
			return fmt.Sprintf("no cluster of the upstream: %v", got)
		}
		return ""
	})
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
		t.Errorf("%s (%v)", got, err)
	}
	noDefaultPortCluster(t, n)
}

// A pod that asks for ever new names is refused each time, and neither Envoy nor
// the registrar grows with it past the cap (I9).
func TestUnknownNamesAreBounded(t *testing.T) {
	const bound = 20
	n := startNode(t, node.Options{RegistrarFlags: []string{"--unknown-names", fmt.Sprint(bound)}})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	out, err := client.Exec(t.Context(), "sh", "-c", `
		for i in $(seq 100); do
			curl -s -m 5 -o /dev/null -w '%{http_code}\n' -H "Host: ghost$i.aether.internal:9090" http://payments.aether.internal/
		done`)
	if err != nil {
		t.Fatal(err)
	}
	if refused := strings.Count(out, "503\n"); refused != 100 {
		t.Errorf("%d of 100 unknown names were refused with 503:\n%s", refused, out)
	}
	if got := clusters(t, n); len(got) > bound+1 {
		t.Errorf("Envoy has %d clusters after 100 unknown names, want at most %d and the service's", len(got), bound)
	}
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal:9090/"); err != nil || got.String() != "200 payments-1:9090" {
		t.Errorf("a known name at the cap: %s (%v)", got, err)
	}
}
