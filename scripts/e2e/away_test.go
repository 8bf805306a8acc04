package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// awayTime is how long the registrar is away: longer than every timeout of Envoy's
// and of the plugin's.
const awayTime = 20 * time.Second

// bystanders adds pods without processes, each of a service of its own that nobody
// has asked for: bystander-0 and so on.
func bystanders(t *testing.T, n *node.Node, count int) []*node.Pod {
	t.Helper()
	pods := make([]*node.Pod, count)
	var group sync.WaitGroup
	for i := range pods {
		group.Go(func() {
			p, err := n.NewPod(t.Context(), node.PodSpec{
				Name: fmt.Sprintf("bystander-%d", i), Annotations: map[string]string{"endpoint.aether.io/ports": "8080,9090=h2,5432=tcp"},
			})
			if err == nil {
				err = p.Add(t.Context())
			}
			if err != nil {
				t.Errorf("bystander %d: %v", i, err)
			}
			pods[i] = p
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return pods
}

// heldLookup is a resolver in the pod that holds its socket and asks for one name
// again and again.
type heldLookup struct{ process *node.Process }

func holdLookup(t *testing.T, p *node.Pod, n *node.Node, name string) heldLookup {
	t.Helper()
	process, err := p.Start("held-"+name, n.Binary("podserver"), "lookup", "-every", "50ms", "-timeout", "500ms", name)
	if err != nil {
		t.Fatal(err)
	}
	h := heldLookup{process}
	h.await(t, 0, "NOERROR")
	return h
}

// answers are all so far; one that failed has no Rcode.
func (h heldLookup) answers(t *testing.T) []answer.DNS {
	t.Helper()
	var all []answer.DNS
	for line := range strings.Lines(h.process.Log()) {
		var got answer.DNS
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatalf("%s printed %q: %v", h.process.Name, line, err)
		}
		all = append(all, got)
	}
	return all
}

// await waits for an answer with this code after the first so many.
func (h heldLookup) await(t *testing.T, after int, rcode string) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		all := h.answers(t)
		if !slices.ContainsFunc(all[min(after, len(all)):], func(a answer.DNS) bool { return a.Rcode == rcode }) {
			return fmt.Sprintf("%s: no %s in %d answers since", h.process.Name, rcode, len(all)-after)
		}
		return ""
	})
}

// traffic is load on two ports of payments, over connections that are kept and over
// new ones, each of which looks the name up: 200 requests a second.
func traffic(t *testing.T, client *node.Pod, duration time.Duration) func() {
	t.Helper()
	finish := map[string]func() answer.Tally{}
	for want, url := range map[string]string{
		"200 payments-1:8080": "http://payments.aether.internal/", "200 payments-1:9090": "http://payments.aether.internal:9090/",
	} {
		finish[want] = load(t, client, duration, "-c", "8", "-rate", "50", url)
		finish[want+" "] = load(t, client, duration, "-c", "8", "-rate", "50", "-keepalive=false", url)
	}
	return func() {
		t.Helper()
		for want, wait := range finish {
			tally := wait()
			if diff := cmp.Diff(map[string]int{strings.TrimSpace(want): tally.Requests}, tally.Answers); diff != "" {
				t.Errorf("answers (-want +got):\n%s", diff)
			}
			t.Logf("%d x %s, the slowest in %d ms", tally.Requests, want, tally.MaxMillis)
		}
	}
}

// xdsTotals waits until every stream has what it should have, and returns what was
// sent since the registrar started, and what there is, each by type.
func xdsTotals(t *testing.T, n *node.Node) (sent, held footprint) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		metrics, err := n.Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sent, held = footprint{}, footprint{}
		now := footprint{}
		for into, name := range map[string]footprint{"portolan_xds_sent_resources_total": sent, "portolan_xds_resources": held} {
			if err := name.gauges(metrics, into); err != nil {
				t.Fatal(err)
			}
		}
		if err := now.gauges(metrics, "portolan_xds_pending_resources", "portolan_xds_streams"); err != nil {
			t.Fatal(err)
		}
		for series, count := range now {
			if strings.HasPrefix(series, "portolan_xds_pending") && count > 0 || strings.HasPrefix(series, "portolan_xds_streams") && count != 1 {
				return fmt.Sprintf("%s is %d", series, count)
			}
		}
		return ""
	})
	return sent, held
}

func (f footprint) total() int {
	sum := 0
	for count := range maps.Values(f) {
		sum += count
	}
	return sum
}

// No request and no look-up fails while the registrar is killed, is away for long
// and starts again; what Envoy has is not sent to it again, and what it was never
// asked for works once it is back (contract 4.8, section 5, MESH-14, XDS-41, XDS-42).
func TestRegistrarRestart(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	others := bystanders(t, n, 40)
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	// What is on demand is asked for before: the registrar alone can give it.
	for _, port := range []string{"8080", "9090"} {
		if got, err := client.Curl(t.Context(), "http://payments.aether.internal:"+port+"/"); err != nil || got.String() != "200 payments-1:"+port {
			t.Fatalf("before: %s (%v)", got, err)
		}
	}
	mesh := holdLookup(t, client, n, "payments.aether.internal")
	outside := holdLookup(t, client, n, node.OutsideName)
	finish := traffic(t, client, awayTime+10*time.Second)

	for _, away := range []time.Duration{awayTime, 0} {
		if err := n.Registrar.Kill(); err != nil {
			t.Fatal(err)
		}
		back := time.NewTimer(away)
		for i, p := range others { // names that nobody has looked up yet
			if got, err := client.Lookup(t.Context(), p.Spec.Name+".aether.internal"); err != nil || got.Rcode != "NOERROR" {
				t.Errorf("first look-up of %s while away: %+v (%v)", p.Spec.Name, got, err)
			}
			if i%2 == 1 && away > 0 {
				time.Sleep(awayTime / time.Duration(len(others))) // spread over the time away
			}
		}
		<-back.C
		if err := n.StartRegistrar(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := n.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		sent, held := xdsTotals(t, n)
		t.Logf("away for %v: %d of %d resources sent again", away, sent.total(), held.total())
		if sent.total()*100 >= held.total() {
			t.Errorf("away for %v: sent again:\n%v\nof\n%v\nwant fewer than 1 %%", away, sent, held)
		}
	}
	finish()
	for _, h := range []heldLookup{mesh, outside} {
		all := h.answers(t)
		for i, got := range all {
			if got.Rcode != "NOERROR" {
				t.Errorf("look-up %d of %d: %+v", i, len(all), got)
			}
		}
		t.Logf("%d look-ups of %s", len(all), h.process.Name)
	}
	waitHealthy(t, n, 5432, 1)
	if got, err := client.TCP(t.Context(), "payments.aether.internal:5432"); err != nil || got.Error != "" || got.Banner != "hello from payments-1 port 5432" {
		t.Errorf("a port that nobody asked for before: %+v (%v)", got, err)
	}
}

// A pod's first request needs no registrar when Envoy has the cluster, as that of a
// declared upstream: the certificate to make it with came before ADD returned. It is the
// pod's own (README, Decisions).
func TestFirstRequestWhileAway(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	declared := func(name string) *node.Pod {
		return addPod(t, n, node.PodSpec{Name: name, Annotations: map[string]string{
			"endpoint.aether.io/ports": "none", "config.aether.io/upstreams": "payments",
		}})
	}
	waitHealthy(t, n, 8080, 1)
	waitRoutes(t, n)
	other := declared("other")
	eventually(t, readyTime, func() string {
		if got, err := other.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
			return fmt.Sprintf("another pod: %s (%v)", got, err)
		}
		return ""
	})
	client := declared("client")
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	got, err := client.Curl(t.Context(), "http://payments.aether.internal/")
	if err != nil || got.String() != "200 payments-1:8080" || !strings.HasSuffix(got.Echo.XFCC, ";URI=spiffe://aether.internal/ns/default/sa/client") {
		t.Errorf("while away: %s, caller %q (%v)", got, got.Echo.XFCC, err)
	}
}

// An Envoy that was killed and starts again gets everything in one connection with
// one stream of each kind, each resource once; its listeners are back in every pod,
// and requests are served (contract section 5).
func TestEnvoyRestart(t *testing.T) {
	n := startNode(t, node.Options{})
	pods := []*node.Pod{addPod(t, n, multiPort("payments-1")), addClient(t, n, "client")}
	client := pods[1]
	pods = append(pods, bystanders(t, n, 20)...)
	waitHealthy(t, n, 8080, 1)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
		t.Fatalf("before: %s (%v)", got, err)
	}
	finish := load(t, client, 8*time.Second, "-c", "8", "-rate", "100", "-keepalive=false", "http://payments.aether.internal/")
	before, _ := xdsTotals(t, n)
	if err := n.Envoy.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := n.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods {
		eventually(t, 30*time.Second, func() string {
			sockets, err := p.Exec(t.Context(), "ss", "-Hltn")
			if err != nil {
				t.Fatal(err)
			}
			for _, port := range []string{":15001 ", ":15002 ", ":15008 "} {
				if p.Spec.Annotations["endpoint.aether.io/ports"] == "none" && port == ":15008 " {
					continue
				}
				if !strings.Contains(sockets, port) {
					return fmt.Sprintf("%s: nothing listens on %s:\n%s", p.Spec.Name, port, sockets)
				}
			}
			return ""
		})
	}
	// Under load until the end: served again, not only for a moment.
	eventually(t, 30*time.Second, func() string {
		if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
			return fmt.Sprintf("%s (%v)", got, err)
		}
		return ""
	})
	tally := load(t, client, 2*time.Second, "-c", "8", "-rate", "100", "-keepalive=false", "http://payments.aether.internal/")()
	if diff := cmp.Diff(map[string]int{"200 payments-1:8080": tally.Requests}, tally.Answers); diff != "" {
		t.Errorf("answers once it is back (-want +got):\n%s", diff)
	}
	if tally := finish(); tally.Answers["200 payments-1:8080"] == tally.Requests {
		t.Errorf("answers %v: Envoy was not away under load, which proves nothing", tally.Answers)
	}
	after, held := xdsTotals(t, n)
	subscribed := footprint{}
	metrics, err := n.Metrics(t.Context())
	if err := errors.Join(err, subscribed.gauges(metrics, "portolan_xds_subscriptions")); err != nil {
		t.Fatal(err)
	}
	for series, total := range after {
		kind := strings.TrimPrefix(series, "portolan_xds_sent_resources_total")
		want := subscribed["portolan_xds_subscriptions"+kind]
		if kind == `{type="listener"}` || kind == `{type="cluster"}` {
			want = held["portolan_xds_resources"+kind]
		}
		// The load assignment of payments changes once meanwhile, and then comes twice:
		// with the old Envoy the pod's inbound listener was gone, so the pod is no
		// endpoint until the new one's is proven (contract 4.3; TestPublicationGate). Of
		// what does not change one copy is sent: package cache's TestAssignmentFollowsAfterReconnect, TestFlapping.
		most := want
		if kind == `{type="endpoints"}` {
			most = want + 1
		}
		if sent := total - before[series]; sent < want || sent > most {
			t.Errorf("%s: %d sent to the new Envoy, want each of %d once (%d before)", kind, sent, want, before[series])
		}
	}
	stats, err := n.EnvoyAdmin(t.Context(), "/stats?filter=^cluster.xds.registrar.upstream_(cx|rq)_total")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(stats) {
		_, count, _ := strings.Cut(strings.TrimSpace(line), ": ")
		got = append(got, count)
	}
	// Aggregated discovery and the clusters on demand.
	if !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("the new Envoy's connections and streams to the registrar:\n%swant 1 and 2", stats)
	}
}

// An Envoy that starts again while the network namespace of one pod is gone for good
// serves all others: the one listener that cannot be bound is rejected alone (XDS-60).
func TestEnvoyRestartWithoutAPod(t *testing.T) {
	// Nobody sweeps meanwhile, so that the new Envoy is given the listeners of the pod
	// that is gone.
	n := startNode(t, node.Options{RegistrarFlags: []string{"--sweep-interval=1h"}})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	gone := bystanders(t, n, 1)[0]
	waitHealthy(t, n, 8080, 1)
	if err := errors.Join(n.Envoy.Kill(), gone.Vanish()); err != nil {
		t.Fatal(err)
	}
	pins, err := filepath.Glob("/run/portolan/netns/" + gone.ContainerID + "*")
	if err != nil || len(pins) == 0 {
		t.Fatalf("pins of the pod that is gone: %v (%v)", pins, err)
	}
	unpinned := 0
	for _, pin := range pins {
		if syscall.Unmount(pin, syscall.MNT_DETACH) == nil {
			unpinned++
			if err := os.Remove(pin); err != nil {
				t.Fatal(err)
			}
		}
	}
	if unpinned != 1 {
		t.Fatalf("%d of %v were mounts, want 1", unpinned, pins)
	}
	if err := n.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, func() string {
		status, err := n.RegistrarStatus(t.Context())
		if err != nil {
			return err.Error()
		}
		for _, nack := range status.NACKs {
			if !strings.Contains(nack.Name, gone.ContainerID) {
				t.Errorf("Envoy rejected %s %s: %s", nack.Kind, nack.Name, nack.Reason)
			}
		}
		if len(status.NACKs) == 0 {
			return "Envoy rejected nothing"
		}
		return ""
	})
	for _, want := range []string{"8080", "9090"} {
		eventually(t, 30*time.Second, func() string {
			if got, err := client.Curl(t.Context(), "http://payments.aether.internal:"+want+"/"); err != nil || got.String() != "200 payments-1:"+want {
				return fmt.Sprintf("port %s: %s (%v)", want, got, err)
			}
			return ""
		})
	}
	addClient(t, n, "later")
	if err := gone.Del(t.Context()); err != nil {
		t.Error(err)
	}
	eventually(t, 30*time.Second, func() string {
		status, err := n.RegistrarStatus(t.Context())
		if err != nil || len(status.NACKs) > 0 {
			return fmt.Sprintf("after DEL still rejected: %+v (%v)", status.NACKs, err)
		}
		return ""
	})
}
