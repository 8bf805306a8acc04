// Package delta is a raw delta xDS client, such as for a registrar's socket. It stands beside
// the node's Envoy and acknowledges everything, so it sees what any Envoy would be
// told, at the time it is told.
package delta

import (
	"context"
	"fmt"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// EndpointType is the type of load assignments.
const EndpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

// Client is one stream, from Watch to Close.
type Client struct {
	conn   *grpc.ClientConn
	cancel context.CancelFunc
	done   chan struct{} // closed when the stream has ended

	node *corev3.Node

	mu     sync.Mutex // guards the sending side
	stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// Watcher is the node ID of a client that no server knows.
const Watcher = "watcher"

// Watch calls see with every response that the server at target has for a node ID, one
// after the other, before it is acknowledged, until ctx ends or Close.
func Watch(ctx context.Context, target, node string, see func(*discoveryv3.DeltaDiscoveryResponse)) (*Client, error) {
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("delta client: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		cancel()
		_ = conn.Close()
		return nil, fmt.Errorf("delta client: %w", err)
	}
	c := &Client{conn: conn, cancel: cancel, done: make(chan struct{}), node: &corev3.Node{Id: node}, stream: stream}
	go c.receive(see)
	return c, nil
}

func (c *Client) receive(see func(*discoveryv3.DeltaDiscoveryResponse)) {
	defer close(c.done)
	for {
		resp, err := c.stream.Recv()
		if err != nil {
			return
		}
		see(resp)
		if c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resp.GetTypeUrl(), ResponseNonce: resp.GetNonce()}) != nil {
			return
		}
	}
}

func (c *Client) send(req *discoveryv3.DeltaDiscoveryRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	req.Node = c.node
	return c.stream.Send(req)
}

// Subscribe asks for names of a type; with none, for all.
func (c *Client) Subscribe(typeURL string, names ...string) error {
	return c.send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names})
}

// Close ends the stream; see is not called after it.
func (c *Client) Close() error {
	c.cancel()
	<-c.done
	return c.conn.Close()
}
