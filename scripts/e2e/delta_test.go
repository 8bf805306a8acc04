package e2e

import (
	"context"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const xdsSocket = "unix:///run/portolan/xds/xds.sock"

// deltaClient is a raw delta client on the registrar's socket that acknowledges
// everything it gets. It stands beside the node's Envoy, so it sees what any
// Envoy would be told, at the time it is told.
type deltaClient struct {
	mu     sync.Mutex // guards the sending side
	stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// watchDelta calls see with every response, one after the other, before it is
// acknowledged, until the test ends.
func watchDelta(t *testing.T, see func(*discoveryv3.DeltaDiscoveryResponse)) *deltaClient {
	t.Helper()
	conn, err := grpc.NewClient(xdsSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	c := &deltaClient{stream: stream}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			resp, err := stream.Recv()
			if err != nil {
				return
			}
			see(resp)
			if c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resp.GetTypeUrl(), ResponseNonce: resp.GetNonce()}) != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func (c *deltaClient) send(req *discoveryv3.DeltaDiscoveryRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	req.Node = &corev3.Node{Id: "watcher"}
	return c.stream.Send(req)
}

// subscribe asks for names of a type; with none, for all.
func (c *deltaClient) subscribe(t *testing.T, typeURL string, names ...string) {
	t.Helper()
	if err := c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names}); err != nil {
		t.Fatal(err)
	}
}
