package e2e

import (
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/portolan-mesh/portolan/scripts/delta"
)

// deltaClient is a client of the node's registrar beside its Envoy.
type deltaClient struct{ client *delta.Client }

// watchDelta calls see with every response, one after the other, before it is
// acknowledged, until the test ends.
func watchDelta(t *testing.T, see func(*discoveryv3.DeltaDiscoveryResponse)) deltaClient {
	t.Helper()
	c, err := delta.Watch(t.Context(), "unix:///run/portolan/xds/xds.sock", delta.Watcher, see)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return deltaClient{c}
}

// subscribe asks for names of a type; with none, for all.
func (c deltaClient) subscribe(t *testing.T, typeURL string, names ...string) {
	t.Helper()
	if err := c.client.Subscribe(typeURL, names...); err != nil {
		t.Fatal(err)
	}
}
