package cnitest

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// service is the gRPC side of a Registrar: it validates like a real one.
type service struct {
	cniv1.UnimplementedRegistrarServiceServer
	r *Registrar
}

func refuse(err error) error { return status.Error(codes.InvalidArgument, err.Error()) }

func (s *service) Add(req *cniv1.AddRequest, stream grpc.ServerStreamingServer[cniv1.AddResponse]) error {
	if err := req.Validate(); err != nil {
		return refuse(err)
	}
	if b := s.r.record(req); b.Add != nil {
		return b.Add(stream.Context(), req, stream.Send)
	}
	return stream.Send(&cniv1.AddResponse{Reason: "not in the mesh"})
}

func (s *service) Del(ctx context.Context, req *cniv1.DelRequest) (*cniv1.DelResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, refuse(err)
	}
	if b := s.r.record(req); b.Del != nil {
		return b.Del(ctx, req)
	}
	return &cniv1.DelResponse{}, nil
}

func (s *service) Check(ctx context.Context, req *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, refuse(err)
	}
	if b := s.r.record(req); b.Check != nil {
		return b.Check(ctx, req)
	}
	return &cniv1.CheckResponse{}, nil
}

func (s *service) GC(ctx context.Context, req *cniv1.GCRequest) (*cniv1.GCResponse, error) {
	if err := req.Validate(); err != nil {
		return nil, refuse(err)
	}
	if b := s.r.record(req); b.GC != nil {
		return b.GC(ctx, req)
	}
	return &cniv1.GCResponse{}, nil
}

func (s *service) Status(ctx context.Context, req *cniv1.StatusRequest) (*cniv1.StatusResponse, error) {
	if b := s.r.record(req); b.Status != nil {
		return b.Status(ctx)
	}
	return &cniv1.StatusResponse{Ready: true}, nil
}
