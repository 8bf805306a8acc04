package publisher

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// Contract 5: an Envoy that starts again gets everything in one reconnect.
func TestFreshEnvoy(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	f.upsert("a", "10.1.0.2", 8080, "8080")
	f.AddPod(clientPod("c1"))
	waitFor(t, ads, resourcev3.ListenerType, "listeners", func(st *xdstest.State) bool { return len(st.Names()) == 2 })
	waitFor(t, ads, resourcev3.RouteType, "route", has(resource.RoutesName))
	must(t, ads.Close())
	must(t, odcds.Close())
	// Only when the loss was noticed can anything have been thrown away.
	for f.Missing() == "" {
		runtime.Gosched()
	}
	ads, _ = f.envoy(t, nil)
	waitFor(t, ads, resourcev3.ListenerType, "listeners", func(st *xdstest.State) bool { return len(st.Names()) == 2 })
	waitFor(t, ads, resourcev3.RouteType, "route", has(resource.RoutesName))
}

// Contract 4.2: a proof that does not come in time names what is missing.
func TestMissingProofIsNamed(t *testing.T) {
	f := start(t)
	f.envoy(t, func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
		if resp.GetTypeUrl() == resourcev3.ListenerType && len(resp.GetResources()) > 0 {
			return xdstest.Withhold()
		}
		return xdstest.Ack()
	})
	must(t, f.AwaitReady(t.Context()))
	f.AddPod(clientPod("c1"))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := f.AwaitListeners(ctx, model.AttachmentKey{ContainerID: "c1", IfName: "eth0"})
	if err == nil || !strings.Contains(err.Error(), "listener/out-http|c1-eth0") {
		t.Errorf("error %v, want one that names the listener", err)
	}
}

// XDS-54: taking an endpoint away waits for nothing, also not for a disk that hangs.
func TestRemovalWaitsForNoDisk(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	name := "payments.aether.internal"
	f.upsert("a", "10.1.0.2", 8080, "8080")
	f.upsert("b", "10.1.0.3", 8080, "8080")
	must(t, odcds.Subscribe(resourcev3.ClusterType, name))
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "both", func(st *xdstest.State) bool { return len(hosts(st, name)) == 2 })
	hang := make(chan struct{})
	defer close(hang)
	f.saved.hang(hang)
	f.remove("a")
	f.remove("b") // the last one also changes what is saved
	waitFor(t, ads, resourcev3.EndpointType, "none", func(st *xdstest.State) bool { return len(hosts(st, name)) == 0 })
}

// XDS-78: a record that comes again with a higher generation and the same content
// is not sent again.
func TestSameContentIsNoChange(t *testing.T) {
	f := start(t)
	ads, odcds := f.envoy(t, nil)
	name := "payments.aether.internal"
	f.upsert("a", "10.1.0.2", 8080, "8080")
	must(t, odcds.Subscribe(resourcev3.ClusterType, name))
	must(t, ads.Subscribe(resourcev3.EndpointType, name))
	waitFor(t, ads, resourcev3.EndpointType, "the endpoint", func(st *xdstest.State) bool { return len(hosts(st, name)) == 1 })
	waitFor(t, ads, resourcev3.RouteType, "the route", func(st *xdstest.State) bool { return routes(st)[name] == name })
	for range 50 {
		f.upsert("a", "10.1.0.2", 8080, "8080")
	}
	// A change that is one comes after all that were none.
	f.upsert("b", "10.1.0.3", 8080, "8080")
	waitFor(t, ads, resourcev3.EndpointType, "the second", func(st *xdstest.State) bool { return len(hosts(st, name)) == 2 })
	if n := ads.State(resourcev3.EndpointType).Received[name]; n > 3 {
		t.Errorf("the load assignment came %d times, want 2, or 3 if its cluster was acknowledged in between", n)
	}
	if n := len(ads.State(resourcev3.RouteType).Responses); n > 2 {
		t.Errorf("the route table came %d times, want once empty and once with the service", n)
	}
}

// I9: the names that one Envoy asked for do not count any more when it goes, whoever stays.
func TestUnknownNamesGoWithTheirEnvoy(t *testing.T) {
	f := start(t)
	f.envoy(t, nil)
	_, going := f.envoy(t, nil)
	for i := range 5 { // the cap
		name := fmt.Sprintf("gone%d.aether.internal:1", i)
		must(t, going.Subscribe(resourcev3.ClusterType, name))
		waitFor(t, going, resourcev3.ClusterType, name, has(name))
	}
	must(t, going.Close())
	_, next := f.envoy(t, nil)
	const name = "ghost.aether.internal:1"
	must(t, next.Subscribe(resourcev3.ClusterType, name))
	waitFor(t, next, resourcev3.ClusterType, "an answer", func(st *xdstest.State) bool { return st.Received[name]+st.Removed[name] > 0 })
	if !has(name)(next.State(resourcev3.ClusterType)) || f.Asked() != 1 {
		t.Errorf("%d names are remembered after their Envoy has gone", f.Asked())
	}
}

// A client that takes everything and answers nothing is no Envoy that works: it has
// no veto on pods.
func TestSilentClientHasNoVeto(t *testing.T) {
	f := start(t)
	f.envoy(t, nil)
	silent, err := f.conn.ADS(t.Context(), xdstest.Options{Node: &corev3.Node{Id: "silent", UserAgentName: "envoy"}, Judge: func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { return xdstest.Withhold() }})
	must(t, err)
	must(t, silent.Subscribe(resourcev3.ClusterType))
	must(t, silent.Subscribe(resourcev3.ListenerType))
	waitFor(t, silent, resourcev3.ListenerType, "a response", func(st *xdstest.State) bool { return st.Withheld > 0 })
	must(t, f.AwaitReady(t.Context()))
	f.clock.advance(10 * time.Second)
	f.AddPod(clientPod("c1"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	must(t, f.AwaitListeners(ctx, model.AttachmentKey{ContainerID: "c1", IfName: "eth0"}))
}

// A client that is no Envoy is served, but makes no node ready, and its
// acknowledgements prove no pod's listeners.
func TestToolIsNoEnvoy(t *testing.T) {
	f := start(t)
	tool, err := f.conn.ADS(t.Context(), xdstest.Options{Node: &corev3.Node{Id: "node1", UserAgentName: "tool"}})
	must(t, err)
	must(t, tool.Subscribe(resourcev3.ClusterType))
	must(t, tool.Subscribe(resourcev3.ListenerType))
	must(t, tool.Subscribe(resourcev3.RouteType, resource.RoutesName))
	f.AddPod(clientPod("c1"))
	waitFor(t, tool, resourcev3.ListenerType, "listeners", func(st *xdstest.State) bool { return len(st.Names()) == 2 })
	if got := f.Missing(); !strings.Contains(got, "no Envoy is connected") {
		t.Errorf("missing is %q, want an Envoy", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := f.AwaitListeners(ctx, model.AttachmentKey{ContainerID: "c1", IfName: "eth0"}); err == nil || !strings.Contains(err.Error(), "no Envoy is connected") {
		t.Errorf("the tool proved listeners: %v", err)
	}
	f.envoy(t, nil)
	must(t, f.AwaitReady(t.Context()))
	must(t, f.AwaitListeners(ctx, model.AttachmentKey{ContainerID: "c1", IfName: "eth0"}))
}
