package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// atRest waits until these are Envoy's clusters of the mesh domain: exactly one for
// every port that was asked for, and none that is named after the default port (I2).
func atRest(t *testing.T, n *node.Node, names ...string) {
	t.Helper()
	want := make(map[string]bool)
	for _, name := range names {
		want[name] = true
	}
	eventually(t, readyTime, func() string { return cmp.Diff(want, clusters(t, n)) })
}

// 100 requests at once to an Envoy that knows no cluster, in every spelling of the
// default port: all reach it, and one cluster comes of them, whether the pod asks for
// the name first or only sends it as an authority (I2, MESH-3).
func TestColdRequests(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	found, err := client.Lookup(t.Context(), "payments.aether.internal")
	if err != nil || len(found.Addresses) == 0 {
		t.Fatalf("the address of payments: %+v (%v)", found, err)
	}
	spellings := []string{
		"http://payments.aether.internal/", "http://payments.aether.internal:8080/",
		"http://payments.default.aether.internal/", "http://payments.default.aether.internal:8080/",
	}
	tests := []struct {
		name  string
		flags []string
	}{
		{"by name", nil},
		{"by name, HTTP/2", []string{"-h2"}},
		{"without DNS", []string{"-dial", found.Addresses[0] + ":80"}},
		{"without DNS, HTTP/2", []string{"-h2", "-dial", found.Addresses[0] + ":8080"}},
	}
	waitRoutes(t, n)
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if i > 0 {
				restartEnvoy(t, n)
				// Without its Envoy the pod was not healthy.
				waitHealthy(t, n, 8080, 1)
			}
			if got := clusters(t, n); len(got) > 0 {
				t.Fatalf("Envoy is not cold: %v", got)
			}
			flags := append([]string{"-n", "25", "-c", "100", "-keepalive=false"}, tt.flags...)
			got, err := client.Get(t.Context(), append(flags, spellings...)...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(map[string]int{"200 payments-1:8080": 100}, got.Answers); diff != "" {
				t.Errorf("answers (-want +got):\n%s", diff)
			}
			atRest(t, n, "payments.aether.internal")
		})
	}
}

// restartEnvoy makes the node's Envoy forget everything.
func restartEnvoy(t *testing.T, n *node.Node) {
	t.Helper()
	if err := n.Envoy.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := n.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// stream sends requests from the pod until the function that it returns is called,
// which returns what came of them.
func stream(t *testing.T, from *node.Pod, n *node.Node, name string, args ...string) func() answer.Tally {
	t.Helper()
	p, err := from.Start(name, append([]string{n.Binary("podserver"), "get", "-duration", "10m"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return func() answer.Tally {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), readyTime)
		defer cancel()
		if err := p.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		var tally answer.Tally
		if err := json.Unmarshal([]byte(p.LogTail(1)), &tally); err != nil {
			t.Fatalf("read the tally of %s, %q: %v", name, p.Log(), err)
		}
		return tally
	}
}

// The default port changes, there and back, by pods that come and go, under 3 x 200
// requests a second and with an Envoy that learns everything late: no request fails, an explicit port is never another one, and at
// rest no cluster has the default port's name (I2, contract 2).
func TestDefaultPortChange(t *testing.T) {
	n := startNode(t, node.Options{Relay: true})
	// Between any two responses there is time for requests.
	n.Relay.Delay(50 * time.Millisecond)
	// All serve both ports, so that each request can be answered at every moment.
	pod := func(name, primary string) node.PodSpec {
		spec := payments(name, "8080,9090", "http:8080", "http:9090")
		spec.Annotations["endpoint.aether.io/port"] = primary
		return spec
	}
	addPod(t, n, pod("payments-1", "8080"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	waitRoutes(t, n)

	const rate = 200
	flags := []string{"-rate", fmt.Sprint(rate), "-c", "8"}
	streams := []struct {
		url    string
		answer map[string]bool // ports
		finish func() answer.Tally
	}{
		{url: "http://payments.aether.internal/", answer: map[string]bool{"8080": true, "9090": true}},
		{url: "http://payments.aether.internal:8080/", answer: map[string]bool{"8080": true}},
		{url: "http://payments.default.aether.internal:9090/", answer: map[string]bool{"9090": true}},
	}
	for i := range streams {
		streams[i].finish = stream(t, client, n, fmt.Sprintf("stream-%d", i), append(flags, streams[i].url)...)
	}
	portless := func(want string) {
		t.Helper()
		got, err := client.Get(t.Context(), "-n", "20", streams[0].url, "http://payments.default.aether.internal/")
		if err != nil {
			t.Fatal(err)
		}
		for what := range got.Answers {
			if !strings.HasPrefix(what, "200 ") || !strings.HasSuffix(what, ":"+want) {
				t.Errorf("without a port, while %s is the default: %v", want, got.Answers)
			}
		}
	}

	const bare = "payments.aether.internal"
	atRest(t, n, bare, bare+":9090")
	portless("8080")
	// Two of three pods then declare 9090.
	addPod(t, n, pod("payments-2", "9090"))
	going := addPod(t, n, pod("payments-3", "9090"))
	atRest(t, n, bare, bare+":8080")
	portless("9090")
	// One each: the lower number.
	if err := going.Del(t.Context()); err != nil {
		t.Fatal(err)
	}
	atRest(t, n, bare, bare+":9090")
	portless("8080")

	for _, s := range streams {
		tally := s.finish()
		ports := make(map[string]bool)
		for what, count := range tally.Answers {
			from, ok := strings.CutPrefix(what, "200 ")
			_, port, _ := strings.Cut(from, ":")
			if !ok || !s.answer[port] {
				t.Errorf("%s: %d x %s", s.url, count, what)
			}
			ports[port] = true
		}
		if len(ports) != len(s.answer) || tally.Requests < rate {
			t.Errorf("%s: %d requests, ports %v: that proves nothing", s.url, tally.Requests, ports)
		}
		t.Logf("%s: %d requests, the slowest took %d ms", s.url, tally.Requests, tally.MaxMillis)
	}
}

const (
	// replacement is how long the registrar is away: longer than a pod of its DaemonSet
	// takes to be replaced on a busy node.
	replacement = 6 * time.Second
	// lag is how much later than the clusters on demand the load assignments can be asked
	// for again: longer than Envoy's pauses between two attempts.
	lag = 2 * time.Second
)

// warming waits until one cluster of Envoy's has no load assignment yet.
func warming(t *testing.T, n *node.Node) {
	t.Helper()
	eventually(t, readyTime, func() string {
		got, err := n.EnvoyAdmin(t.Context(), "/stats?filter=^cluster_manager.warming_clusters$")
		if err != nil {
			t.Fatal(err)
		}
		return cmp.Diff("cluster_manager.warming_clusters: 1", strings.TrimSpace(got))
	})
}

// What is asked for the first time is answered however far the registrar is with its
// end and its return: while it is away, when Envoy got the cluster of the old one and no
// load assignment, and when Envoy gets the cluster of the new one long before it asks for
// load assignments again (contract section 5).
func TestColdOverRestart(t *testing.T) {
	n := startNode(t, node.Options{Relay: true})
	addPod(t, n, payments("payments-1", "8080,8081,8082,8083,5432=tcp", "http:8080", "http:8081", "http:8082", "http:8083", "tcp:5432"))
	client := addClient(t, n, "client")
	for _, port := range []uint16{8080, 8081, 8082, 8083, 5432} {
		waitHealthy(t, n, port, 1)
	}
	waitRoutes(t, n)
	var requests sync.WaitGroup
	ask := func(port string) {
		requests.Go(func() {
			if got, err := client.Curl(t.Context(), "http://payments.aether.internal:"+port+"/"); err != nil || got.String() != "200 payments-1:"+port {
				t.Errorf("port %s: %s (%v)", port, got, err)
			}
		})
	}
	ask("8080") // brings the certificates
	requests.Wait()

	n.Relay.Sever()
	ask("8081")
	warming(t, n)
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	n.Relay.Restore()
	ask("8082")
	requests.Go(func() {
		if got, err := client.TCP(t.Context(), "payments.aether.internal:5432"); err != nil || got.Banner != "hello from payments-1 port 5432" {
			t.Errorf("port 5432: %+v (%v)", got, err)
		}
	})
	time.Sleep(replacement)
	if err := n.StartRegistrar(t.Context()); err != nil {
		t.Fatal(err)
	}
	requests.Wait()

	if err := n.Registrar.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Relay.Sever()
	if err := n.StartRegistrar(t.Context()); err != nil {
		t.Fatal(err)
	}
	ask("8083")
	warming(t, n)
	time.Sleep(lag)
	n.Relay.Restore()
	requests.Wait()
}
