package kubetest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// reusePod is a pod of a service, on node1.
func reusePod(service, name string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: %[2]s
  annotations: {endpoint.aether.io/ports: "8080,9090=h2", endpoint.aether.io/service: %[1]s}
spec:
  nodeSelector: {kubernetes.io/hostname: node1}
  terminationGracePeriodSeconds: 2
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=%[2]s, "http:8080", "h2:9090"]}
---
`, service, name)
}

// TestAddressReuse: a pod of another service gets the address of one that went while
// node2 does not hear of it. Nobody's request reaches the wrong pod, and none fails.
func TestAddressReuse(t *testing.T) {
	const namespace = "reuse"
	c := scenario(t, namespace)
	c.apply(t, namespace, reusePod("first", "first-a")+reusePod("first", "first-b")+clients)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	address := c.awaitAddress(t, namespace, "first-a")
	stays := c.awaitAddress(t, namespace, "first-b")
	c.awaitServing(t, namespace, "first", 2)
	urls := []string{"http://first.reuse.aether.internal/", "http://first.reuse.aether.internal:9090/"}
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], append([]string{"-n", "10"}, urls...)...)); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
	}
	near, far := on(t, callers, "node1"), on(t, callers, "node2")
	loads := []*load{c.startLoad(t, near, 50, urls...)}

	// node2's clients and the API server no longer hear each other; a server may still
	// call node2's kubelet, which the clients' requests need. The output is dropped after
	// the Service's address was translated, the input before.
	c.inNode(t, "node2", "nft", `
add table inet cut
add chain inet cut output { type filter hook output priority 100; }
add rule inet cut output tcp dport 6443 drop
add chain inet cut input { type filter hook prerouting priority -300; }
add rule inet cut input tcp sport 6443 drop
`)
	reconnect := func(ctx context.Context) error {
		return c.nodeCommand(ctx, "node2", "nft", "delete table inet cut").Run()
	}
	t.Cleanup(func() { _ = reconnect(context.WithoutCancel(t.Context())) })

	if err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), "first-a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, func() string {
		_, err := c.client.CoreV1().Pods(namespace).Get(t.Context(), "first-a", metav1.GetOptions{})
		if got := c.attachments(t, 1, namespace, "first-a"); !apierrors.IsNotFound(err) || len(got) != 0 {
			return fmt.Sprintf("first-a is not gone: %v, attachments %v", err, got)
		}
		return ""
	})
	// Only now, since node2 was not told that first-a would end: a request on its way to
	// an application that closes its connections is never sent again, so it may fail.
	loads = append(loads, c.startLoad(t, far, 50, urls...))
	// The next address that host-local gives is the one after the last.
	c.inNode(t, "node1", "sh", "-c", "printf %s "+netip.MustParseAddr(address).Prev().String()+" > /var/lib/cni/networks/lab/last_reserved_ip.0")
	c.apply(t, namespace, reusePod("second", "second"))
	if got := c.awaitAddress(t, namespace, "second"); got != address {
		t.Fatalf("second has the address %s, want first-a's %s", got, address)
	}
	eventually(t, patience, func() string {
		s, err := c.registrarStatus(t.Context(), 1)
		if err != nil {
			return err.Error()
		}
		return s.unhealthy(namespace+"/second", 1)
	})
	tally := c.get(t, near, "-n", "40", "http://second.reuse.aether.internal/", "http://second.reuse.aether.internal:9090/")
	if want := []string{"200 second:8080", "200 second:9090"}; !slices.Equal(keys(tally.Answers), want) {
		t.Errorf("node1: got %v of second, want %v", tally.Answers, want)
	}
	checked(t, "node1: second has first-a's address %s and all of its own requests", address)

	clusters, err := c.envoyClusters(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	const cluster = "first.reuse.aether.internal"
	if stale := clusters[cluster]; !slices.ContainsFunc(stale, func(a string) bool { return strings.HasPrefix(a, address) }) {
		t.Fatalf("node2's Envoy has %v in %s, want %s still: its view is not stale", stale, cluster, address)
	}
	tally = c.get(t, far, append([]string{"-n", "100", "-c", "4"}, urls...)...)
	if want := []string{"200 first-b:8080", "200 first-b:9090"}; !slices.Equal(keys(tally.Answers), want) {
		t.Errorf("node2, whose view is stale: got %v of first, want %v", tally.Answers, want)
	}
	checked(t, "node2: its view of first still has %s, which is second's now: %d requests, all answered by first-b", address, tally.Requests)

	if err := reconnect(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, func() string {
		for i := 1; i <= nodes; i++ {
			clusters, err := c.envoyClusters(t.Context(), i)
			if err != nil {
				return err.Error()
			}
			if got := clusters[cluster]; !slices.Equal(got, []string{stays}) {
				return fmt.Sprintf("node%d's Envoy has %v in %s, want %s", i, got, cluster, stays)
			}
		}
		return c.unhealthyAnywhere(t.Context(), namespace+"/second", 1)
	})
	for _, l := range loads {
		tally := l.stop(t)
		for answer, n := range tally.Answers {
			if !strings.HasPrefix(answer, "200 first-") {
				t.Errorf("%s: %d of %d requests to first got %q", l.name, n, tally.Requests, answer)
			}
		}
		checked(t, "%s: %d requests to first in the meantime, none failed, none went to second: %v", l.name, tally.Requests, tally.Answers)
	}
}
