package xdstest

import (
	"context"
	"fmt"
	"math"

	clusterservice "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Conn is a connection on which streams are opened.
type Conn struct {
	conn *grpc.ClientConn
}

// Dial returns a connection to target, such as "unix:///run/portolan/xds/xds.sock".
// It connects with the first stream.
func Dial(target string, opts ...grpc.DialOption) (*Conn, error) {
	opts = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.WaitForReady(true)),
	}, opts...)
	conn, err := grpc.NewClient(target, opts...)
	if err != nil {
		return nil, fmt.Errorf("xds client of %s: %w", target, err)
	}
	return &Conn{conn: conn}, nil
}

// ADS opens a delta ADS stream. It lives until ctx ends or the client is closed.
func (c *Conn) ADS(ctx context.Context, opts Options) (*Client, error) {
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(c.conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return nil, fmt.Errorf("open delta ads stream: %w", err)
	}
	return New(stream, opts), nil
}

// Clusters opens a delta CDS stream of its own. It lives until ctx ends or the
// client is closed.
func (c *Conn) Clusters(ctx context.Context, opts Options) (*Client, error) {
	stream, err := clusterservice.NewClusterDiscoveryServiceClient(c.conn).DeltaClusters(ctx)
	if err != nil {
		return nil, fmt.Errorf("open delta cds stream: %w", err)
	}
	return New(stream, opts), nil
}

// Close ends the connection with all its streams.
func (c *Conn) Close() error {
	if err := c.conn.Close(); err != nil {
		return fmt.Errorf("close xds connection: %w", err)
	}
	return nil
}
