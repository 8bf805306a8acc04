package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// Client is a connection to one registrar. The first call opens it.
type Client struct {
	socket string
	conn   *grpc.ClientConn
	api    cniv1.RegistrarServiceClient

	mu      sync.Mutex // guards what follows
	dialed  bool       // the socket could be opened at least once
	dialErr error      // of the last attempt
}

// New returns a client for the registrar at socket, an absolute path. The caller
// closes it.
func New(socket string) (*Client, error) {
	c := &Client{socket: socket}
	conn, err := grpc.NewClient("passthrough:registrar",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // a unix socket in a 0700 folder; the registrar checks our uid
		grpc.WithContextDialer(c.dial),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			// A registrar that is being replaced is back within a second.
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 250 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(cniv1.MaxMessage), grpc.MaxCallSendMsgSize(cniv1.MaxMessage)),
	)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", socket, err)
	}
	c.conn, c.api = conn, cniv1.NewRegistrarServiceClient(conn)
	return c, nil
}

// Close ends the connection and every call on it.
func (c *Client) Close() error { return c.conn.Close() }

// dial opens the socket and remembers how that went: the errors of gRPC do not
// say which of them is meant.
func (c *Client) dial(ctx context.Context, _ string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dialErr = err
	c.dialed = c.dialed || err == nil
	return conn, err
}

// Connected reports whether the registrar's socket could be opened at least once,
// so that it may have got a request.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dialed
}

// Adding is an Add of which the registrar's decision is known.
type Adding struct {
	// Decision is valid.
	Decision *cniv1.AddResponse

	client *Client
	stream grpc.ServerStreamingClient[cniv1.AddResponse]
}

// Add asks the registrar about a pod and returns its decision. With wait it
// waits for a registrar that is away until ctx ends; without, it fails at once.
// The error is a *Failure. When ctx ends before Proven returned, the registrar
// forgets the pod.
func (c *Client) Add(ctx context.Context, req *cniv1.AddRequest, wait bool) (*Adding, error) {
	stream, err := c.api.Add(ctx, req, grpc.WaitForReady(wait))
	if err != nil {
		return nil, c.fail("Add", err)
	}
	decision, err := stream.Recv()
	switch {
	case errors.Is(err, io.EOF):
		return nil, c.fail("Add", errNoDecision)
	case err != nil:
		return nil, c.fail("Add", err)
	}
	if err := decision.Validate(); err != nil {
		return nil, c.fail("Add", fmt.Errorf("its answer: %w", err))
	}
	return &Adding{Decision: decision, client: c, stream: stream}, nil
}

// Proven waits until the registrar has proven the pod's listeners (contract 4.2).
// The error is a *Failure.
func (a *Adding) Proven() error {
	for {
		_, err := a.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return a.client.fail("Add", err)
		}
		// A later registrar may send more than the decision: progress.
	}
}

// Del detaches a pod and says what the registrar did of it; the error is a *Failure.
func (c *Client) Del(ctx context.Context, req *cniv1.DelRequest) (*cniv1.DelResponse, error) {
	answer, err := c.api.Del(ctx, req)
	return answer, c.fail("Del", err)
}

// Check asks what the registrar knows of a pod; the error is a *Failure.
func (c *Client) Check(ctx context.Context, req *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
	answer, err := c.api.Check(ctx, req)
	if err == nil {
		err = answer.Validate()
	}
	return answer, c.fail("Check", err)
}

// GC gives the registrar the list of live attachments; the error is a *Failure.
func (c *Client) GC(ctx context.Context, req *cniv1.GCRequest) (*cniv1.GCResponse, error) {
	answer, err := c.api.GC(ctx, req)
	return answer, c.fail("GC", err)
}

// Status asks whether an Add could succeed now; the error is a *Failure.
func (c *Client) Status(ctx context.Context) (*cniv1.StatusResponse, error) {
	answer, err := c.api.Status(ctx, &cniv1.StatusRequest{})
	return answer, c.fail("Status", err)
}
