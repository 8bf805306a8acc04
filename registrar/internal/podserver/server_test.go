package podserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// scripted answers every request as the test says.
type scripted struct {
	err      error
	decision attach.Decision
	missing  string
	deadline chan time.Duration
}

func (s scripted) Add(ctx context.Context, _ *cniv1.AddRequest, decided func(attach.Decision) error) error {
	if s.deadline != nil {
		d, _ := ctx.Deadline()
		s.deadline <- time.Until(d)
	}
	if s.err != nil {
		return s.err
	}
	return decided(s.decision)
}

func (s scripted) Del(context.Context, model.AttachmentKey) (bool, error) {
	return s.decision.Meshed, s.err
}
func (s scripted) Check(model.AttachmentKey) (model.Pod, error) { return s.decision.Pod, s.err }
func (s scripted) GC(_ context.Context, _ string, valid []model.AttachmentKey) ([]model.AttachmentKey, error) {
	return valid, s.err
}
func (s scripted) Missing() string { return s.missing }

func serve(t *testing.T, a Attachments) cniv1.RegistrarServiceClient {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cni.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	cniv1.RegisterRegistrarServiceServer(srv, New(a, func(model.Pod) capture.Config { return capture.Config{DNS: true} }, slog.New(slog.DiscardHandler)))
	go func() { _ = srv.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		srv.Stop()
	})
	return cniv1.NewRegistrarServiceClient(conn)
}

func request() *cniv1.AddRequest {
	return &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: "c1", Ifname: "eth0"}, Network: "podnet",
		Netns: "/run/portolan/netns/c1-eth0", RuntimeNetns: "/run/netns/x", Addresses: []string{"10.1.0.2"}, AnnotationsKnown: true,
	}
}

func add(ctx context.Context, c cniv1.RegistrarServiceClient, req *cniv1.AddRequest) (*cniv1.AddResponse, error) {
	stream, err := c.Add(ctx, req)
	if err != nil {
		return nil, err
	}
	resp, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if _, err := stream.Recv(); status.Code(err) != codes.OK && err.Error() != "EOF" {
		return resp, err
	}
	return resp, nil
}

// Each meaning of an error has the code that api/cni/v1 promises, and its text
// arrives whole.
func TestCodes(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want codes.Code
	}{
		{"bad annotation", &attach.Error{Kind: attach.BadInput, Err: errors.New("endpoint.aether.io/port=\"0\"")}, codes.InvalidArgument},
		{"not ready", &attach.Error{Kind: attach.NotReady, Err: errors.New("no Envoy")}, codes.Unavailable},
		{"wrapped", fmt.Errorf("add: %w", &attach.Error{Kind: attach.NotReady, Err: errors.New("no Envoy")}), codes.Unavailable},
		{"not registered", &attach.Error{Kind: attach.NotFound, Err: errors.New("unknown")}, codes.NotFound},
		{"kernel (CNI-51)", &capture.FeatureError{Feature: "nft redirect", Err: errors.New("ENOENT")}, codes.Unimplemented},
		{"fault", errors.New("disk"), codes.Internal},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := serve(t, scripted{err: tt.err})
			_, err := add(t.Context(), c, request())
			if status.Code(err) != tt.want || !strings.Contains(status.Convert(err).Message(), tt.err.Error()) {
				t.Errorf("ADD: %v, want %s with %q", err, tt.want, tt.err)
			}
			if _, err := c.Del(t.Context(), &cniv1.DelRequest{Attachment: request().GetAttachment(), Network: "podnet"}); status.Code(err) != tt.want {
				t.Errorf("DEL: %v, want %s", err, tt.want)
			}
			if _, err := c.Check(t.Context(), &cniv1.CheckRequest{Attachment: request().GetAttachment()}); status.Code(err) != tt.want {
				t.Errorf("CHECK: %v, want %s", err, tt.want)
			}
			if _, err := c.GC(t.Context(), &cniv1.GCRequest{Network: "podnet"}); status.Code(err) != tt.want {
				t.Errorf("GC: %v, want %s", err, tt.want)
			}
		})
	}
}

// A request past a limit of the contract is refused by name, and reaches nobody.
func TestLimits(t *testing.T) {
	c := serve(t, scripted{err: errors.New("must not be asked")})
	req := request()
	req.Addresses = nil
	_, err := add(t.Context(), c, req)
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "addresses") {
		t.Errorf("ADD without addresses: %v, want InvalidArgument naming the field", err)
	}
	if _, err := c.Del(t.Context(), &cniv1.DelRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("DEL without key: %v", err)
	}
	if _, err := c.Check(t.Context(), &cniv1.CheckRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("CHECK without key: %v", err)
	}
	if _, err := c.GC(t.Context(), &cniv1.GCRequest{Network: "podnet", Valid: []*cniv1.Attachment{{}}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("GC with an empty key: %v", err)
	}
}

// What the plugin is told: the decision with the capture, who is missing, what GC
// removed.
func TestAnswers(t *testing.T) {
	meshed := serve(t, scripted{decision: attach.Decision{Meshed: true, Reason: "joined"}})
	resp, err := add(t.Context(), meshed, request())
	if err != nil || !resp.GetMeshed() || !resp.GetCapture().GetDns() {
		t.Errorf("meshed: %v, %v", resp, err)
	}
	if check, err := meshed.Check(t.Context(), &cniv1.CheckRequest{Attachment: request().GetAttachment()}); err != nil || !check.GetMeshed() || !check.GetCapture().GetDns() {
		t.Errorf("check: %v, %v", check, err)
	}
	if del, err := meshed.Del(t.Context(), &cniv1.DelRequest{Attachment: request().GetAttachment(), Network: "podnet"}); err != nil || !del.GetCaptureRemoved() {
		t.Errorf("del: %v, %v", del, err)
	}
	gc, err := meshed.GC(t.Context(), &cniv1.GCRequest{Network: "podnet", Valid: []*cniv1.Attachment{request().GetAttachment()}})
	if err != nil || len(gc.GetRemoved()) != 1 || gc.GetRemoved()[0].GetContainerId() != "c1" {
		t.Errorf("gc: %v, %v", gc, err)
	}
	out := serve(t, scripted{decision: attach.Decision{Reason: "no annotation"}, missing: "no Envoy"})
	resp, err = add(t.Context(), out, request())
	if err != nil || resp.GetMeshed() || resp.GetCapture() != nil || resp.GetReason() != "no annotation" {
		t.Errorf("unmeshed: %v, %v", resp, err)
	}
	if del, err := out.Del(t.Context(), &cniv1.DelRequest{Attachment: request().GetAttachment(), Network: "podnet"}); err != nil || del.GetCaptureRemoved() {
		t.Errorf("del of an unknown pod: %v, %v", del, err)
	}
	if st, err := out.Status(t.Context(), &cniv1.StatusRequest{}); err != nil || st.GetReady() || st.GetReason() != "no Envoy" {
		t.Errorf("status: %v, %v", st, err)
	}
}

// What is missing must reach the caller before its own deadline does (contract 5:
// "code 11 that says which").
func TestAnswerBeforeTheDeadline(t *testing.T) {
	left := make(chan time.Duration, 1)
	c := serve(t, scripted{deadline: left})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := add(ctx, c, request()); err != nil {
		t.Fatal(err)
	}
	if d := <-left; d > 5*time.Second-answerMargin {
		t.Errorf("works until %v before the caller's deadline, want %v", 5*time.Second-d, answerMargin)
	}
}
