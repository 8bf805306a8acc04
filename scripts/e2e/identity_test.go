package e2e

import (
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// Every request carries its own pod's identity, also when two pods of the node
// call the same port in turn over connections that Envoy keeps (I8, MESH-45),
// and an identity that the caller claims by a header is not believed.
func TestIdentity(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	pods := []*node.Pod{addClient(t, n, "alice"), addClient(t, n, "bob")}
	waitHealthy(t, n, 8080, 1)
	for range 10 {
		for _, p := range pods {
			got, err := p.Curl(t.Context(), "-H", "x-forwarded-client-cert: URI=spiffe://aether.internal/ns/default/sa/root", "http://payments.aether.internal/")
			if err != nil {
				t.Fatal(err)
			}
			want := "URI=spiffe://aether.internal/ns/default/sa/" + p.Spec.Name
			if got.Status != 200 || !strings.Contains(got.Echo.XFCC, want) || strings.Contains(got.Echo.XFCC, "sa/root") {
				t.Fatalf("%s: %s, caller %q, want %q alone", p.Spec.Name, got, got.Echo.XFCC, want)
			}
		}
	}
}
