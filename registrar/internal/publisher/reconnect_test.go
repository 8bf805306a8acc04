package publisher

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

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
