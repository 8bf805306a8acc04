package xdstest

import (
	"context"
	"errors"
	"io"
	"sync"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
)

// requestBuffer is how many requests a pipe takes while the server is busy, as
// the buffers of a connection would: a client that cannot send cannot receive.
const requestBuffer = 1024

// ServerStream is the server's end of a Pipe; a delta server takes it for a gRPC
// stream.
type ServerStream interface {
	grpc.ServerStream
	Send(*discoveryv3.DeltaDiscoveryResponse) error
	Recv() (*discoveryv3.DeltaDiscoveryRequest, error)
}

// Pipe runs handle on the server's end of an in-process stream and returns the
// client's end. The stream ends when ctx does, when the client closes it, or when
// handle returns. A client that does not receive makes the server's Send wait, as
// flow control does.
func Pipe(ctx context.Context, handle func(ServerStream) error) Stream {
	ctx, cancel := context.WithCancel(ctx)
	p := &pipe{
		requests:  make(chan *discoveryv3.DeltaDiscoveryRequest, requestBuffer),
		responses: make(chan *discoveryv3.DeltaDiscoveryResponse),
		closed:    make(chan struct{}),
		ended:     make(chan struct{}),
		cancel:    cancel,
	}
	go func() {
		p.err = handle(serverEnd{pipe: p, done: ctx})
		if p.err == nil {
			p.err = io.EOF
		}
		cancel()
		close(p.ended)
	}()
	return clientEnd{pipe: p}
}

type pipe struct {
	requests  chan *discoveryv3.DeltaDiscoveryRequest
	responses chan *discoveryv3.DeltaDiscoveryResponse
	closed    chan struct{} // the client sends no more
	closing   sync.Once
	ended     chan struct{} // the handler returned err
	err       error
	cancel    context.CancelFunc
}

type clientEnd struct{ *pipe }

// Send implements Stream.
func (p clientEnd) Send(req *discoveryv3.DeltaDiscoveryRequest) error {
	select {
	case <-p.closed:
		return errors.New("stream is closed")
	case <-p.ended:
		return io.EOF
	case p.requests <- req:
		return nil
	}
}

// Recv implements Stream.
func (p clientEnd) Recv() (*discoveryv3.DeltaDiscoveryResponse, error) {
	select {
	case resp := <-p.responses:
		return resp, nil
	case <-p.ended:
		return nil, p.err
	}
}

// CloseSend implements Stream.
func (p clientEnd) CloseSend() error {
	p.closing.Do(func() { close(p.closed) })
	return nil
}

type serverEnd struct {
	grpc.ServerStream // no metadata, no messages of other types
	*pipe
	done context.Context //nolint:containedctx // a gRPC stream has one
}

// Context implements grpc.ServerStream.
func (p serverEnd) Context() context.Context { return p.done }

// Send hands a response over.
func (p serverEnd) Send(resp *discoveryv3.DeltaDiscoveryResponse) error {
	select {
	case p.responses <- resp:
		return nil
	case <-p.done.Done():
		return p.done.Err()
	}
}

// Recv takes a request.
func (p serverEnd) Recv() (*discoveryv3.DeltaDiscoveryRequest, error) {
	select {
	case req := <-p.requests:
		return req, nil
	default:
	}
	select {
	case req := <-p.requests:
		return req, nil
	case <-p.closed:
		return nil, io.EOF
	case <-p.done.Done():
		return nil, p.done.Err()
	}
}
