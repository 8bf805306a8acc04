package cnitest

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// Behaviour answers the calls. A nil function answers success: Add says that the
// pod is not meshed, Status that the node is ready. Requests were validated
// before. A function may block until ctx ends, as a hung registrar does.
type Behaviour struct {
	// Add sends its responses with send, then returns the stream's status.
	Add func(ctx context.Context, req *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error
	// Del answers Del.
	Del func(ctx context.Context, req *cniv1.DelRequest) (*cniv1.DelResponse, error)
	// Check answers Check.
	Check func(ctx context.Context, req *cniv1.CheckRequest) (*cniv1.CheckResponse, error)
	// GC answers GC.
	GC func(ctx context.Context, req *cniv1.GCRequest) (*cniv1.GCResponse, error)
	// Status answers Status.
	Status func(ctx context.Context) (*cniv1.StatusResponse, error)
}

// Registrar is a running fake. It records every request that it got.
type Registrar struct {
	// Socket is the path that it listens on.
	Socket string

	server *grpc.Server

	mu        sync.Mutex // guards what follows
	behaviour Behaviour
	requests  []proto.Message
}

// Start runs a fake registrar until the test ends.
func Start(tb testing.TB, b Behaviour) *Registrar {
	tb.Helper()
	dir, err := os.MkdirTemp("", "cnitest") //nolint:usetesting // a test's own folder may be too long for the 107 bytes of a socket path
	if err != nil {
		tb.Fatal(err)
	}
	r := StartAt(tb, filepath.Join(dir, "cni.sock"), b)
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return r
}

// StartAt is Start with a socket path of the test's choice.
func StartAt(tb testing.TB, socket string, b Behaviour) *Registrar {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", socket)
	if err != nil {
		tb.Fatal(err)
	}
	r := &Registrar{
		Socket: socket, behaviour: b,
		server: grpc.NewServer(grpc.MaxRecvMsgSize(cniv1.MaxMessage), grpc.MaxSendMsgSize(cniv1.MaxMessage)),
	}
	cniv1.RegisterRegistrarServiceServer(r.server, &service{r: r})
	done := make(chan error, 1)
	go func() { done <- r.server.Serve(l) }()
	tb.Cleanup(func() {
		r.Stop()
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			tb.Errorf("fake registrar at %s: %v", socket, err)
		}
	})
	return r
}

// Stop ends the fake before the test ends: calls in flight are cut and the
// socket file is removed.
func (r *Registrar) Stop() { r.server.Stop() }

// Set replaces the behaviour.
func (r *Registrar) Set(b Behaviour) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.behaviour = b
}

// Requests returns what arrived so far, in order.
func (r *Registrar) Requests() []proto.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]proto.Message(nil), r.requests...)
}

// RequestsOf returns the requests of one type, in order.
func RequestsOf[T proto.Message](r *Registrar) []T {
	var out []T
	for _, m := range r.Requests() {
		if req, ok := m.(T); ok {
			out = append(out, req)
		}
	}
	return out
}

func (r *Registrar) record(m proto.Message) Behaviour {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, m)
	return r.behaviour
}
