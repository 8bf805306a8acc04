// Package podserver is the gRPC service that the CNI plugin calls. It checks every
// limit of the request and maps errors to the codes that api/cni/v1 promises; what
// a request does is attach's business, and who may call is the socket's.
package podserver

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Attachments is the part of attach.Manager that requests need.
type Attachments interface {
	Add(ctx context.Context, req *cniv1.AddRequest, decided func(attach.Decision) error) error
	Del(ctx context.Context, key model.AttachmentKey) (uncaptured bool, err error)
	Check(key model.AttachmentKey) (model.Pod, error)
	GC(ctx context.Context, network string, valid []model.AttachmentKey) ([]model.AttachmentKey, error)
	Missing() string
}

// Settings turns a pod into the capture that its netns must have now.
type Settings func(model.Pod) capture.Config

// Server implements cniv1.RegistrarServiceServer. It is safe for concurrent use.
type Server struct {
	cniv1.UnimplementedRegistrarServiceServer

	attachments Attachments
	settings    Settings
	log         *slog.Logger
}

// New returns a Server over attachments.
func New(attachments Attachments, settings Settings, log *slog.Logger) *Server {
	return &Server{attachments: attachments, settings: settings, log: log}
}

// Add implements the first walk of contract 8.
func (s *Server) Add(req *cniv1.AddRequest, stream cniv1.RegistrarService_AddServer) error {
	if err := req.Validate(); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	ctx, cancel := answerInTime(stream.Context())
	defer cancel()
	err := s.attachments.Add(ctx, req, func(d attach.Decision) error {
		resp := &cniv1.AddResponse{Meshed: d.Meshed, Reason: d.Reason}
		if d.Meshed {
			resp.Capture = s.settings(d.Pod).ToProto()
		}
		return stream.Send(resp)
	})
	if err != nil {
		s.log.Warn("ADD refused", "container", req.GetAttachment().GetContainerId(), "pod", req.GetCniArgs()["K8S_POD_NAME"], "error", err)
	}
	return toStatus(err)
}

// answerMargin is how long before the caller's deadline an answer is given: what
// is missing must reach the caller, not only our log.
const answerMargin = 300 * time.Millisecond

// answerInTime bounds ctx to just before the caller's deadline.
func answerInTime(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-answerMargin))
}

// Del detaches; an unknown attachment is success.
func (s *Server) Del(ctx context.Context, req *cniv1.DelRequest) (*cniv1.DelResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	uncaptured, err := s.attachments.Del(ctx, model.KeyOf(req.GetAttachment()))
	if err != nil {
		return nil, toStatus(err)
	}
	return &cniv1.DelResponse{CaptureRemoved: uncaptured}, nil
}

// Check repeats what ADD answered.
func (s *Server) Check(_ context.Context, req *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	pod, err := s.attachments.Check(model.KeyOf(req.GetAttachment()))
	if err != nil {
		return nil, toStatus(err)
	}
	return &cniv1.CheckResponse{Meshed: true, Capture: s.settings(pod).ToProto()}, nil
}

// GC forgets what the runtime no longer has.
func (s *Server) GC(ctx context.Context, req *cniv1.GCRequest) (*cniv1.GCResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	valid := make([]model.AttachmentKey, 0, len(req.GetValid()))
	for _, a := range req.GetValid() {
		valid = append(valid, model.KeyOf(a))
	}
	removed, err := s.attachments.GC(ctx, req.GetNetwork(), valid)
	if err != nil {
		return nil, toStatus(err)
	}
	resp := &cniv1.GCResponse{}
	for _, k := range removed {
		resp.Removed = append(resp.Removed, &cniv1.Attachment{ContainerId: k.ContainerID, Ifname: k.IfName})
	}
	return resp, nil
}

// Status says whether an Add could succeed now.
func (s *Server) Status(context.Context, *cniv1.StatusRequest) (*cniv1.StatusResponse, error) {
	missing := s.attachments.Missing()
	return &cniv1.StatusResponse{Ready: missing == "", Reason: missing}, nil
}

// toStatus maps an error's kind to the code that api/cni/v1 promises.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	if _, ok := errors.AsType[*capture.FeatureError](err); ok {
		return status.Error(codes.Unimplemented, err.Error())
	}
	switch attach.KindOf(err) {
	case attach.BadInput:
		return status.Error(codes.InvalidArgument, err.Error())
	case attach.NotReady:
		return status.Error(codes.Unavailable, err.Error())
	case attach.NotFound:
		return status.Error(codes.NotFound, err.Error())
	case attach.Internal:
	}
	return status.Error(codes.Internal, err.Error())
}
