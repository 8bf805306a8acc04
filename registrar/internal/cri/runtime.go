package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

const (
	// ifName is the interface that a CRI runtime makes in every sandbox.
	ifName = "eth0"
	// infoKey is where containerd and CRI-O put what they know of a sandbox.
	infoKey = "info"
	// network stands for the conflist's name, which the runtime does not say: no GC
	// of a network means such a pod, it ends by DEL or with its netns.
	network = "cri"
)

// Runtime is a connection to the runtime. Its methods are safe for concurrent use.
type Runtime struct {
	conn   *grpc.ClientConn
	client runtimev1.RuntimeServiceClient
	socket string
	log    *slog.Logger
}

// Open returns a Runtime at the unix socket, such as
// /run/containerd/containerd.sock. It connects when it is first asked.
func Open(socket string, log *slog.Logger) (*Runtime, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("container runtime at %s: %w", socket, err)
	}
	return &Runtime{conn: conn, client: runtimev1.NewRuntimeServiceClient(conn), socket: socket, log: log}, nil
}

// Close ends the connection.
func (r *Runtime) Close() error { return r.conn.Close() }

// List returns every ready sandbox with a network namespace of its own, as an ADD
// would have told of it; the netns is the runtime's path. One that ends meanwhile is
// left out, and so, with a warning, is one that the runtime describes in a way that
// is not understood.
func (r *Runtime) List(ctx context.Context) ([]*cniv1.AddRequest, error) {
	ready := &runtimev1.PodSandboxFilter{State: &runtimev1.PodSandboxStateValue{State: runtimev1.PodSandboxState_SANDBOX_READY}}
	list, err := r.client.ListPodSandbox(ctx, &runtimev1.ListPodSandboxRequest{Filter: ready})
	if err != nil {
		return nil, fmt.Errorf("list the sandboxes of the container runtime at %s: %w", r.socket, err)
	}
	out := make([]*cniv1.AddRequest, 0, len(list.GetItems()))
	for _, item := range list.GetItems() {
		s, err := r.client.PodSandboxStatus(ctx, &runtimev1.PodSandboxStatusRequest{PodSandboxId: item.GetId(), Verbose: true})
		if status.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("status of sandbox %s: %w", item.GetId(), err)
		}
		req, err := describe(s)
		switch {
		case errors.Is(err, errNodeNetwork):
		case err != nil:
			r.log.Warn("sandbox is left out", "sandbox", item.GetId(), "pod", item.GetMetadata().GetNamespace()+"/"+item.GetMetadata().GetName(), "error", err)
		default:
			out = append(out, req)
		}
	}
	return out, nil
}

// errNodeNetwork marks a sandbox that uses the node's network.
var errNodeNetwork = errors.New("it uses the node's network")

// describe turns a verbose status into what an ADD would have said.
func describe(s *runtimev1.PodSandboxStatusResponse) (*cniv1.AddRequest, error) {
	st := s.GetStatus()
	if st.GetLinux().GetNamespaces().GetOptions().GetNetwork() == runtimev1.NamespaceMode_NODE {
		return nil, errNodeNetwork
	}
	netns, err := netnsPath(s.GetInfo()[infoKey])
	if err != nil {
		return nil, err
	}
	req := &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: st.GetId(), Ifname: ifName},
		Network:    network,
		Netns:      netns, RuntimeNetns: netns,
		CniArgs: map[string]string{
			"K8S_POD_NAMESPACE": st.GetMetadata().GetNamespace(),
			"K8S_POD_NAME":      st.GetMetadata().GetName(),
			"K8S_POD_UID":       st.GetMetadata().GetUid(),
		},
		Annotations: st.GetAnnotations(), AnnotationsKnown: true,
	}
	if ip := st.GetNetwork().GetIp(); ip != "" {
		req.Addresses = append(req.Addresses, ip)
	}
	for _, ip := range st.GetNetwork().GetAdditionalIps() {
		req.Addresses = append(req.Addresses, ip.GetIp())
	}
	if err := req.Validate(); err != nil {
		return nil, fmt.Errorf("what the runtime says of it cannot be used: %w", err)
	}
	return req, nil
}

// netnsPath reads the path of the network namespace out of the OCI specification
// that runtimes put into a verbose status.
func netnsPath(info string) (string, error) {
	var spec struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string } `json:"namespaces"`
			} `json:"linux"`
		} `json:"runtimeSpec"`
	}
	if err := json.Unmarshal([]byte(info), &spec); err != nil {
		return "", fmt.Errorf("the runtime's verbose status is not understood: %w", err)
	}
	for _, ns := range spec.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" && ns.Path != "" {
			return ns.Path, nil
		}
	}
	return "", errors.New("the runtime's verbose status names no network namespace")
}
