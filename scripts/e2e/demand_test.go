package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
		if name, _, _ := strings.Cut(line, "::"); strings.Contains(name, "aether.internal") && !strings.Contains(name, "|") { // "|" is in local names
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

// randomURLs are so many different URLs that a pod makes up, each with what it must
// get: 503 for a name under the mesh domain that leads nowhere, 404 for any other,
// one in capitals among them.
func randomURLs(random *rand.Rand, count int) (urls []string, want map[string]int) {
	want = make(map[string]int)
	for i := range count {
		// The number makes it different from all others.
		name := strings.Repeat(string(rune('a'+random.IntN(26))), 1+random.IntN(30)) + fmt.Sprint(i)
		port := 10_000 + random.IntN(50_000)
		status := "503"
		var authority string
		switch random.IntN(7) {
		case 0:
			status, authority = "404", fmt.Sprintf("%s.example.com:%d", name, port)
		case 1:
			status, authority = "404", fmt.Sprintf("%s.aether.internal:%d", strings.ToUpper(name), port)
		case 2:
			authority = fmt.Sprintf("%s.default.aether.internal:%d", name, port)
		case 3:
			authority = fmt.Sprintf("payments.aether.internal:%d", 10_000+i)
		case 4:
			authority = fmt.Sprintf("payments.%s.aether.internal:%d", name, port)
		case 5:
			authority = name + ".aether.internal"
		default:
			authority = fmt.Sprintf("%s.aether.internal:%d", name, port)
		}
		urls = append(urls, "http://"+authority+"/")
		want[status]++
	}
	return urls, want
}

// growth is what must not grow with names that pods make up.
type growth struct {
	clusters, unknown        int
	envoyBytes, registrarRSS int
}

func (g growth) String() string {
	return fmt.Sprintf("%d clusters, %d unknown names, Envoy has %d KiB allocated, the registrar %d KiB resident",
		g.clusters, g.unknown, g.envoyBytes>>10, g.registrarRSS>>10)
}

func measureGrowth(t *testing.T, n *node.Node) growth {
	t.Helper()
	var memory struct {
		Allocated int `json:"allocated,string"`
	}
	out, err := n.EnvoyAdmin(t.Context(), "/memory")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &memory); err != nil {
		t.Fatalf("Envoy's memory %q: %v", out, err)
	}
	metric := func(series string) int {
		t.Helper()
		text, err := n.Metric(t.Context(), series)
		if err != nil {
			t.Fatal(err)
		}
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatalf("metric %s %q: %v", series, text, err)
		}
		return int(value)
	}
	return growth{
		clusters: len(clusters(t, n)), unknown: metric("portolan_unknown_names"),
		envoyBytes: memory.Allocated, registrarRSS: metric("process_resident_memory_bytes"),
	}
}

// One pod asks for 10,000 names and ports that it makes up, and for 10,000 others:
// each is refused at once, neither Envoy nor the registrar grows with them past the
// cap, and everybody else is served meanwhile and afterwards (I9).
func TestUnknownNamesAreBounded(t *testing.T) {
	const count, limit = 10_000, 1000 // the limit is the default one
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client, other := addClient(t, n, "client"), addClient(t, n, "other")
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	waitRoutes(t, n)
	found, err := client.Lookup(t.Context(), "payments.aether.internal")
	if err != nil || len(found.Addresses) == 0 {
		t.Fatalf("the address of payments: %+v (%v)", found, err)
	}
	served := stream(t, other, n, "stream", "-rate", "100", "-c", "4", "http://payments.aether.internal/", "http://payments.aether.internal:9090/")

	random := rand.New(rand.NewPCG(1, 9)) // the same names each time
	measured := []growth{measureGrowth(t, n)}
	for round := range 2 {
		urls, want := randomURLs(random, count)
		args := append([]string{"-c", "8", "-dial", found.Addresses[0] + ":80"}, urls...)
		got, err := client.Get(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got.Answers); diff != "" {
			t.Errorf("answers of round %d (-want +got):\n%s", round, diff)
		}
		measured = append(measured, measureGrowth(t, n))
	}
	for _, g := range measured {
		t.Log(g)
	}
	first, second := measured[1], measured[2]
	if first.unknown != limit || second.unknown != limit {
		t.Errorf("%d and %d unknown names are remembered, want the limit, %d", first.unknown, second.unknown, limit)
	}
	// The service's own two, and the limit.
	if most := limit + 2; first.clusters > most || second.clusters > most {
		t.Errorf("Envoy has %d and %d clusters, want at most %d", first.clusters, second.clusters, most)
	}
	// A name that Envoy asks for leaves 0.2 KB there even when it is refused, so 10,000
	// are 2 MB; at the limit the route table refuses them and nobody is asked.
	if grown := second.envoyBytes - first.envoyBytes; grown > 1<<20 {
		t.Errorf("Envoy grew by %d KiB with names past the limit", grown>>10)
	}
	if grown := second.registrarRSS - first.registrarRSS; grown > 16<<20 {
		t.Errorf("the registrar grew by %d KiB with names past the limit", grown>>10)
	}

	// A service that comes now is found all the same.
	addPod(t, n, node.PodSpec{
		Name:        "late",
		Annotations: map[string]string{"endpoint.aether.io/ports": "8080,9090"},
		Servers:     []node.Server{{Listen: []string{"http:8080", "http:9090"}}},
	})
	if err := n.WaitHealthy(t.Context(), "default/late", 9090, 1); err != nil {
		t.Fatal(err)
	}
	got, err := client.Get(t.Context(), "http://late.aether.internal/", "http://late.default.aether.internal:9090/")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int{"200 late:8080": 1, "200 late:9090": 1}, got.Answers); diff != "" {
		t.Errorf("a new service (-want +got):\n%s", diff)
	}
	tally := served()
	for what, requests := range tally.Answers {
		if what != "200 payments-1:8080" && what != "200 payments-1:9090" {
			t.Errorf("another pod got %d x %s", requests, what)
		}
	}
	if tally.Requests < 100 {
		t.Errorf("another pod sent %d requests meanwhile: that proves nothing", tally.Requests)
	}
}
