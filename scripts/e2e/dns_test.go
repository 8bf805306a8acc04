package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// In a meshed pod a mesh name resolves to its service's address, in each
// spelling and over UDP and TCP; an unknown mesh name does not exist, for one
// second; every other name is its resolver's affair, which never hears of the
// mesh's (contract 2, dataplane decision 9).
func TestDNS(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	n.Outside.ForgetQueries()
	lookup := func(args ...string) answer.DNS {
		t.Helper()
		got, err := client.Lookup(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}

	vip := lookup("payments.aether.internal")
	if len(vip.Addresses) != 1 || !netip.MustParsePrefix("198.18.0.0/15").Contains(netip.MustParseAddr(vip.Addresses[0])) {
		t.Fatalf("payments is %+v, want one address of 198.18.0.0/15", vip)
	}
	for _, args := range [][]string{{"payments.default.aether.internal"}, {"Payments.Aether.Internal"}, {"-network", "tcp", "payments.aether.internal"}} {
		if got := lookup(args...); !slices.Equal(got.Addresses, vip.Addresses) {
			t.Errorf("%v is %v, want %v", args, got.Addresses, vip.Addresses)
		}
	}
	vip6 := lookup("-type", "AAAA", "payments.aether.internal")
	if len(vip6.Addresses) != 1 || !netip.MustParsePrefix("fd70:6f72:746f::/64").Contains(netip.MustParseAddr(vip6.Addresses[0])) {
		t.Errorf("payments by AAAA is %+v, want one address of fd70:6f72:746f::/64", vip6)
	}
	for _, name := range []string{"ghost.aether.internal", "payments.ghost.aether.internal", "a.b.c.aether.internal"} {
		if got := lookup(name); got.Rcode != "NXDOMAIN" || got.TTL > 1 {
			t.Errorf("%s: %+v, want NXDOMAIN for 1 s", name, got)
		}
	}
	for _, network := range []string{"udp", "tcp"} {
		want := answer.DNS{Name: node.OutsideName, Type: "A", Rcode: "NOERROR", Addresses: []string{node.WebIP}, TTL: 77}
		if diff := cmp.Diff(want, lookup("-network", network, node.OutsideName)); diff != "" {
			t.Errorf("outside the mesh over %s (-want +got):\n%s", network, diff)
		}
	}
	if got := lookup("unknown.test"); got.Rcode != "NXDOMAIN" || got.TTL != 77 {
		t.Errorf("unknown name outside the mesh: %+v, want the resolver's answer", got)
	}
	for _, name := range n.Outside.Queries() {
		if strings.HasSuffix(name, "aether.internal") {
			t.Errorf("the resolver was asked for %s", name)
		}
	}
	if got, err := client.Curl(t.Context(), "-6", "http://payments.aether.internal:9090/"); err != nil || got.String() != "200 payments-1:9090" {
		t.Errorf("over IPv6: %s (%v)", got, err)
	}
}

// The first look-up of a pod, right after its ADD, is already the mesh's: an
// application that starts at once gets no NXDOMAIN that it might remember
// (contract 4.2, MESH-46).
func TestDNSFromTheStart(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	waitHealthy(t, n, 8080, 1)
	for i := range 10 {
		client := addClient(t, n, fmt.Sprintf("client-%d", i))
		if got, err := client.Lookup(t.Context(), "payments.aether.internal"); err != nil || got.Rcode != "NOERROR" {
			t.Errorf("%s: %+v (%v), want the service's address", client.Spec.Name, got, err)
		}
	}
}

// While `registrar run` is away mesh names and others resolve as before; with
// `registrar dns` gone too, names outside the mesh resolve again within 5 s
// (contract section 5).
func TestDNSWhileAway(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"payments.aether.internal": "NOERROR", "ghost.aether.internal": "NXDOMAIN", node.OutsideName: "NOERROR"} {
		if got, err := client.Lookup(t.Context(), name); err != nil || got.Rcode != want {
			t.Errorf("%s with the registrar away: %+v (%v), want %s", name, got, err, want)
		}
	}
	awaitTable(t, client)
	held, heldMesh := holdLookup(t, client, n, node.OutsideName), holdLookup(t, client, n, "payments.aether.internal")
	// What bounds the outage is the time-out of the capture, which nobody refreshes.
	if set, err := client.Exec(t.Context(), "nft", "list", "set", "inet", "portolan", "alive"); err != nil || !strings.Contains(set, "timeout 5s") {
		t.Errorf("the capture of look-ups lives for %q (%v), want 5 s", set, err)
	}
	asked, askedMesh := len(held.answers(t)), len(heldMesh.answers(t))
	if err := n.DNS.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, func() string {
		got, err := client.Lookup(t.Context(), "-timeout", "500ms", node.OutsideName)
		if err != nil {
			return err.Error()
		}
		if !slices.Equal(got.Addresses, []string{node.WebIP}) {
			return "another answer"
		}
		return ""
	})
	// The answer that was under way may still be the mesh's.
	held.await(t, asked+1, "NOERROR")
	heldMesh.await(t, askedMesh+1, "NXDOMAIN")
	askedMesh = len(heldMesh.answers(t))
	if err := n.StartDNS(t.Context()); err != nil {
		t.Fatal(err)
	}
	// From its last table, before `registrar run` is back.
	eventually(t, 10*time.Second, func() string {
		got, err := client.Lookup(t.Context(), "-timeout", "500ms", "payments.aether.internal")
		if err != nil {
			return err.Error()
		}
		if got.Rcode != "NOERROR" {
			return "a mesh name is " + got.Rcode
		}
		return ""
	})
	heldMesh.await(t, askedMesh, "NOERROR")
}

// awaitTable waits until the table on disk has payments and the pod: it is written at
// most once a second.
func awaitTable(t *testing.T, p *node.Pod) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		table, err := os.ReadFile("/var/lib/portolan/dns.json")
		if err != nil || !strings.Contains(string(table), "payments") || !strings.Contains(string(table), p.ContainerID) {
			return fmt.Sprintf("the table on disk is %s (%v)", table, err)
		}
		return ""
	})
}
