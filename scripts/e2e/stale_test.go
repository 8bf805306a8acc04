package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// httpAttempts and tcpAttempts are how often Envoy tries for one request or
// connection at most.
const (
	httpAttempts = 1 + 3
	tcpAttempts  = 10
)

// everything are servers on all ports that these tests know, whatever is annotated:
// what goes astray is answered, and the answer says by whom.
var everything = []string{"http:8080", "h2:9090", "tcp:5432"}

// stalePod is a pod of a service, with all servers, that has these ports annotated.
func stalePod(name, service, ports string) node.PodSpec {
	return node.PodSpec{
		Name:        name,
		Annotations: map[string]string{"endpoint.aether.io/service": service, "endpoint.aether.io/ports": ports},
		Servers:     []node.Server{{Listen: everything}},
	}
}

// stalePort is one port of payments and the cluster that leads there.
type stalePort struct {
	number  uint16
	cluster string
	tcp     bool
}

// staleView is a caller and the clusters of payments in its Envoy.
type staleView struct {
	node   *node.Node
	client *node.Pod
	ports  []stalePort
}

// newStaleView gives the caller's Envoy all three clusters of payments, with this pod
// alone. Servers may also have one of the identities.
func newStaleView(t *testing.T, n *node.Node, client, right *node.Pod, identities ...string) *staleView {
	t.Helper()
	found, err := client.Lookup(t.Context(), "payments.aether.internal")
	if err != nil || len(found.Addresses) == 0 {
		t.Fatalf("the address of payments: %+v (%v)", found, err)
	}
	v := &staleView{node: n, client: client, ports: []stalePort{
		{number: 8080, cluster: "payments.aether.internal"},
		{number: 9090, cluster: "payments.aether.internal:9090"},
		{number: 5432, cluster: found.Addresses[0] + ":5432", tcp: true},
	}}
	for _, p := range v.ports {
		for _, id := range identities {
			n.Relay.Admit(p.cluster, id)
		}
		v.assign(t, p, right)
		v.ask(t, p, 1)
	}
	return v
}

// assign makes the pods the endpoints of the port in the caller's Envoy.
func (v *staleView) assign(t *testing.T, p stalePort, pods ...*node.Pod) {
	t.Helper()
	var addrs []netip.Addr
	for _, pod := range pods {
		addrs = append(addrs, pod.IP())
	}
	if err := v.node.Relay.Assign(t.Context(), p.cluster, addrs...); err != nil {
		t.Fatal(err)
	}
}

// ask sends requests to the port, with these flags, or opens connections, and returns
// what answered.
func (v *staleView) ask(t *testing.T, p stalePort, requests int, flags ...string) map[string]int {
	t.Helper()
	if p.tcp {
		return v.connect(t, p, requests)
	}
	args := append([]string{"-n", strconv.Itoa(requests), "-c", "4"}, flags...)
	tally, err := v.client.Get(t.Context(), append(args, fmt.Sprintf("http://payments.aether.internal:%d/", p.number))...)
	if err != nil {
		t.Fatal(err)
	}
	return tally.Answers
}

// connect opens connections to the port, four at a time, and returns the banners
// that came, or how a connection ended without one.
func (v *staleView) connect(t *testing.T, p stalePort, connections int) map[string]int {
	t.Helper()
	var (
		mu    sync.Mutex
		found = make(map[string]int)
		group sync.WaitGroup
	)
	for worker := range min(4, connections) {
		group.Go(func() {
			for i := worker; i < connections; i += 4 {
				got, err := v.client.TCP(t.Context(), fmt.Sprintf("payments.aether.internal:%d", p.number))
				what := strings.TrimPrefix(got.Banner, "hello from ")
				switch {
				case err != nil:
					what = err.Error()
				case got.Banner == "":
					what = got.Error
				case got.Echo != "ping":
					what += ", then " + got.Error
				}
				mu.Lock()
				found[what]++
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return found
}

// tried is how often Envoy tried this pod for the port since it is an endpoint.
func (v *staleView) tried(t *testing.T, p stalePort, pod *node.Pod) int {
	t.Helper()
	out, err := v.node.EnvoyAdmin(t.Context(), "/clusters")
	if err != nil {
		t.Fatal(err)
	}
	most := 0
	for _, counter := range []string{"rq_total", "cx_total"} {
		prefix := fmt.Sprintf("%s::%s:15008::%s::", p.cluster, pod.IP(), counter)
		for line := range strings.Lines(out) {
			if value, ok := strings.CutPrefix(strings.TrimSpace(line), prefix); ok {
				count, err := strconv.Atoi(value)
				if err != nil {
					t.Fatal(err)
				}
				most = max(most, count)
			}
		}
	}
	return most
}

// check proves I1 for one stale endpoint: beside the right pod every request reaches
// the right port of the right pod, although the stale one is tried; alone there is a
// clean refusal, after a bounded number of attempts.
func (v *staleView) check(t *testing.T, p stalePort, right, stale *node.Pod) {
	t.Helper()
	protocols, attempts := map[string][]string{"HTTP/1.1": nil, "HTTP/2": {"-h2"}}, httpAttempts
	if p.tcp {
		protocols, attempts = map[string][]string{"TCP": nil}, tcpAttempts
	}
	for name, flags := range protocols {
		const requests, alone = 32, 4
		v.assign(t, p, right)
		v.assign(t, p, right, stale)
		want := fmt.Sprintf("200 %s:%d", right.Spec.Name, p.number)
		if p.tcp {
			want = fmt.Sprintf("%s port %d", right.Spec.Name, p.number)
		}
		if got := v.ask(t, p, requests, flags...); got[want] != requests {
			t.Errorf("port %d over %s beside %s: %v, want %d x %s", p.number, name, stale.Spec.Name, got, requests, want)
		}
		if v.tried(t, p, stale) == 0 {
			t.Errorf("port %d over %s: %s was never tried, which proves nothing", p.number, name, stale.Spec.Name)
		}

		v.assign(t, p, right)
		v.assign(t, p, stale)
		refused := v.ask(t, p, alone, flags...)
		for what := range refused {
			clean := what == "503" || what == "421"
			if p.tcp {
				clean = what == "EOF" || strings.HasSuffix(what, "connection reset by peer")
			}
			if !clean {
				t.Errorf("port %d over %s, %s alone: %v, want a clean refusal", p.number, name, stale.Spec.Name, refused)
			}
		}
		if count := v.tried(t, p, stale); count == 0 || count > alone*attempts {
			t.Errorf("port %d over %s, %s alone: tried %d times for %d requests", p.number, name, stale.Spec.Name, count, alone)
		}
	}
	v.assign(t, p, right)
}

// A caller's view is stale in every way it can be. Never is there an answer from
// another port or another service; with a right pod beside the stale one no request
// fails (I1, contract section 5, MESH-1, MESH-32).
func TestStaleEndpoints(t *testing.T) {
	n := startNode(t, node.Options{Relay: true})
	right := addPod(t, n, stalePod("right", "payments", "8080,9090=h2,5432=tcp"))
	tests := []struct {
		name, service, ports string
		serves               []uint16 // of payments
	}{
		{"single-port", "payments", "8080", []uint16{8080}},
		{"multi-port", "payments", "8080,7070", []uint16{8080}},
		{"single-h2", "payments", "9090=h2", []uint16{9090}},
		{"only-tcp", "payments", "5432=tcp", []uint16{5432}},
		{"other-account", "orders", "8080,9090=h2,5432=tcp", nil},
		{"other-account-single", "stock", "8080", nil},
		{"same-account", "refunds", "8080,9090=h2,5432=tcp", nil},
		{"same-account-single", "refunds2", "8080", nil},
	}
	var stale []*node.Pod
	for _, tt := range tests {
		stale = append(stale, addPod(t, n, stalePod(tt.name, tt.service, tt.ports)))
	}
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 3)
	waitHealthy(t, n, 9090, 2)
	waitHealthy(t, n, 5432, 2)
	// Standalone, every service has an account of its own. To the caller's Envoy these
	// two are the account of payments.
	v := newStaleView(t, n, client, right,
		"spiffe://aether.internal/ns/default/sa/refunds", "spiffe://aether.internal/ns/default/sa/refunds2")
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, p := range v.ports {
				if !slices.Contains(tt.serves, p.number) {
					v.check(t, p, right, stale[i])
				}
			}
		})
	}
	t.Run("gRPC", func(t *testing.T) {
		v.assign(t, v.ports[1], right, stale[0], stale[6])
		for range 12 {
			got, err := client.GRPC(t.Context(), "payments.aether.internal:9090")
			if want := (answer.Origin{Pod: "right", Port: 9090}); err != nil || got.Code != "OK" || got.Origin != want {
				t.Errorf("%+v (%v), want OK from %v", got, err, want)
			}
		}
		v.assign(t, v.ports[1], stale[0], stale[6])
		got, err := client.GRPC(t.Context(), "payments.aether.internal:9090")
		if err != nil || got.Code != "Unavailable" && got.Code != "Unknown" || got.Origin != (answer.Origin{}) {
			t.Errorf("with stale endpoints alone: %+v (%v), want a refusal", got, err)
		}
	})
}

// A pod is made again with other ports, then its address goes to another service,
// while the caller's Envoy still has what the first pod served (I1).
func TestAddressUsedAgain(t *testing.T) {
	n := startNode(t, node.Options{Relay: true})
	right := addPod(t, n, stalePod("right", "payments", "8080,9090=h2,5432=tcp"))
	old := addPod(t, n, stalePod("old", "payments", "8080,9090=h2,5432=tcp"))
	client := addClient(t, n, "client")
	for _, port := range []uint16{8080, 9090, 5432} {
		waitHealthy(t, n, port, 2)
	}
	v := newStaleView(t, n, client, right)
	for _, p := range v.ports {
		v.assign(t, p, right, old)
		if got := v.ask(t, p, 8); len(got) != 2 {
			t.Errorf("port %d: answers %v, want both pods", p.number, got)
		}
	}
	replace := func(name, service, ports string) *node.Pod {
		t.Helper()
		spec := stalePod(name, service, ports)
		spec.IP = old.IP()
		if err := old.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
		old = addPod(t, n, spec)
		if old.IP() != spec.IP {
			t.Fatalf("%s has %v, want the address %v again", name, old.IP(), spec.IP)
		}
		return old
	}
	// Nobody waits for readiness here: to the caller's Envoy the endpoint never went.
	for _, tt := range []struct {
		name, service, ports string
		lost                 []stalePort
	}{
		{"lost-9090", "payments", "8080,5432=tcp", v.ports[1:2]},
		{"lost-all-but-9090", "payments", "9999,9090=h2", []stalePort{v.ports[0], v.ports[2]}},
		{"another-service", "orders", "8080,9090=h2,5432=tcp", v.ports},
	} {
		again := replace(tt.name, tt.service, tt.ports)
		t.Run(tt.name, func(t *testing.T) {
			for _, p := range tt.lost {
				v.check(t, p, right, again)
				v.assign(t, p, right, again) // as before, for the next pod
			}
		})
	}
}
