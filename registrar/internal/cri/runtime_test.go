package cri

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// served answers as a runtime with these sandboxes.
type served struct {
	runtimev1.UnimplementedRuntimeServiceServer
	sandboxes map[string]*runtimev1.PodSandboxStatusResponse
	order     []string
}

func (s *served) ListPodSandbox(_ context.Context, req *runtimev1.ListPodSandboxRequest) (*runtimev1.ListPodSandboxResponse, error) {
	if req.GetFilter().GetState().GetState() != runtimev1.PodSandboxState_SANDBOX_READY {
		return nil, status.Error(codes.InvalidArgument, "all states are asked for")
	}
	out := &runtimev1.ListPodSandboxResponse{}
	for _, id := range s.order {
		out.Items = append(out.Items, &runtimev1.PodSandbox{Id: id, Metadata: &runtimev1.PodSandboxMetadata{Name: id}})
	}
	return out, nil
}

func (s *served) PodSandboxStatus(_ context.Context, req *runtimev1.PodSandboxStatusRequest) (*runtimev1.PodSandboxStatusResponse, error) {
	st, ok := s.sandboxes[req.GetPodSandboxId()]
	if !ok {
		return nil, status.Error(codes.NotFound, "no such sandbox")
	}
	if !req.GetVerbose() {
		st.Info = nil
	}
	return st, nil
}

func sandbox(id string, mode runtimev1.NamespaceMode, info string) *runtimev1.PodSandboxStatusResponse {
	return &runtimev1.PodSandboxStatusResponse{
		Status: &runtimev1.PodSandboxStatus{
			Id:          id,
			Metadata:    &runtimev1.PodSandboxMetadata{Namespace: "shop", Name: "pod-" + id, Uid: "u-" + id},
			Network:     &runtimev1.PodSandboxNetworkStatus{Ip: "10.1.0.2", AdditionalIps: []*runtimev1.PodIP{{Ip: "fd00::2"}}},
			Linux:       &runtimev1.LinuxPodSandboxStatus{Namespaces: &runtimev1.Namespace{Options: &runtimev1.NamespaceOption{Network: mode}}},
			Annotations: map[string]string{"endpoint.aether.io/ports": "8080"},
		},
		Info: map[string]string{"info": info},
	}
}

// Of the sandboxes of a node those with a network of their own are told; one that
// is gone or not understood keeps nothing from the others.
func TestList(t *testing.T) {
	const good = `{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":"/run/netns/cni-1"}]}}}`
	s := &served{order: []string{"gone", "node", "odd", "blank", "good"}, sandboxes: map[string]*runtimev1.PodSandboxStatusResponse{
		"node":  sandbox("node", runtimev1.NamespaceMode_NODE, good),
		"odd":   sandbox("odd", runtimev1.NamespaceMode_POD, `not JSON`),
		"blank": sandbox("blank", runtimev1.NamespaceMode_POD, `{"runtimeSpec":{"linux":{"namespaces":[{"type":"network"}]}}}`),
		"good":  sandbox("good", runtimev1.NamespaceMode_POD, good),
	}}
	socket := filepath.Join(t.TempDir(), "runtime.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	runtimev1.RegisterRuntimeServiceServer(srv, s)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)

	r, err := Open(socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	got, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []*cniv1.AddRequest{{
		Attachment: &cniv1.Attachment{ContainerId: "good", Ifname: "eth0"}, Network: "cri", Netns: "/run/netns/cni-1", RuntimeNetns: "/run/netns/cni-1",
		Addresses: []string{"10.1.0.2", "fd00::2"}, AnnotationsKnown: true,
		Annotations: map[string]string{"endpoint.aether.io/ports": "8080"},
		CniArgs:     map[string]string{"K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "pod-good", "K8S_POD_UID": "u-good"},
	}}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("sandboxes (-want +got):\n%s", d)
	}
	srv.Stop()
	if _, err := r.List(t.Context()); err == nil {
		t.Error("a runtime that is away is no error")
	}
}
