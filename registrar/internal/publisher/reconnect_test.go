package publisher

import (
	"runtime"
	"testing"

	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"

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
