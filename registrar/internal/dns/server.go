package dns

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// podSet is what the server does with pods; *pods.Set is one.
type podSet interface {
	Apply(ctx context.Context, remove []model.AttachmentKey, set []table.Pod)
	Status(k model.AttachmentKey) (pods.Status, bool)
}

// server is the serving end of the table's stream.
type server struct {
	dnsv1.UnimplementedMeshDNSServiceServer
	table   *table.Table
	pods    podSet
	changed func()
	metrics *metrics
	log     *slog.Logger

	// receivers are the goroutines that read streams; they outlive their
	// handlers by one revision at most.
	receivers sync.WaitGroup

	// applying is held while a revision is applied, so that a session that is
	// replaced has finished before the new one begins.
	applying sync.Mutex

	mu sync.Mutex
	// owner is the session whose table this is; nil while none is connected.
	// Guarded by mu; written only with applying held too, but for its end.
	owner *session
}

// Sync implements the service. The handler writes; a goroutine of its own reads,
// since only the end of the handler ends a read.
func (s *server) Sync(stream dnsv1.MeshDNSService_SyncServer) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	sess := newSession(cancel)
	defer s.release(sess)
	s.receivers.Go(func() { cancel(s.receive(stream, sess)) })
	for {
		select {
		case <-ctx.Done():
			return endOf(ctx)
		case <-sess.wake:
		}
		for _, resp := range sess.responses(s.pods.Status) {
			if err := stream.Send(resp); err != nil {
				return err
			}
		}
	}
}

// endOf returns how a session ended: nil when the client closed it.
func endOf(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, io.EOF) {
		return nil
	}
	if errors.Is(cause, context.Canceled) {
		return status.FromContextError(cause).Err()
	}
	return cause
}

// receive applies what comes until something is wrong.
func (s *server) receive(stream dnsv1.MeshDNSService_SyncServer, sess *session) error {
	var in assembly
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		change, err := in.add(req)
		if sess.order == 0 {
			sess.order = in.session
		}
		if err != nil {
			s.metrics.refused.Inc()
			s.log.Warn("table refused", "error", err)
			return status.Error(codes.InvalidArgument, err.Error())
		}
		if change == nil {
			continue
		}
		if err := s.apply(stream.Context(), sess, *change); err != nil {
			return err
		}
		sess.ack(in.revision, change)
	}
}

// apply makes the revision hold, and the session the owner of the table.
func (s *server) apply(ctx context.Context, sess *session, change table.Change) error {
	s.applying.Lock()
	defer s.applying.Unlock()
	if err := s.own(sess, change.Full); err != nil {
		return err
	}
	removed, err := s.table.Apply(change)
	if err != nil {
		s.metrics.refused.Inc()
		s.log.Warn("table refused", "error", err)
		return status.Error(codes.InvalidArgument, err.Error())
	}
	set := make([]table.Pod, 0, len(change.SetPods))
	for _, p := range change.SetPods {
		set = append(set, p)
	}
	s.pods.Apply(ctx, removed, set)
	s.changed()
	s.metrics.revisions.Inc()
	return nil
}

// own lets a full state take the table over, and a change pass only from its owner.
func (s *server) own(sess *session, full bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owner == sess {
		return nil
	}
	// It ended while it waited for another revision; nobody would end it again.
	if sess.ended {
		return status.Error(codes.Aborted, "the stream ended")
	}
	if !full {
		return status.Error(codes.Aborted, "another registrar has taken the table over")
	}
	if s.owner != nil && s.owner.order > sess.order {
		return status.Errorf(codes.FailedPrecondition, "a registrar that started later owns the table (%d, this one is %d); stop the older one", s.owner.order, sess.order)
	}
	if s.owner != nil {
		s.owner.cancel(status.Error(codes.Aborted, "another registrar has taken the table over"))
	}
	s.owner = sess
	s.metrics.sessions.Inc()
	s.metrics.connected.Set(1)
	s.log.Info("registrar connected", "session", sess.order)
	return nil
}

// release ends a session. One that was replaced leaves the newer one alone (CNI-68).
func (s *server) release(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sess.ended = true
	if s.owner == sess {
		s.owner = nil
		s.metrics.connected.Set(0)
		s.log.Info("registrar disconnected; serving on with the table as it is")
	}
}

// podChanged tells the owner that a pod's status changed. It never blocks.
func (s *server) podChanged(k model.AttachmentKey) {
	s.mu.Lock()
	owner := s.owner
	s.mu.Unlock()
	if owner != nil {
		owner.podChanged(k)
	}
}
