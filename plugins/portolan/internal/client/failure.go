package client

import (
	"errors"
	"io/fs"
	"net"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The CNI codes of this plugin beyond the specification's (100 and more are the
// plugin's own).
const (
	// CodeRulesMissing is CHECK's finding that the capture is not there.
	CodeRulesMissing uint = 100
	// CodeNotRegistered is CHECK's finding that the registrar does not know the pod.
	CodeNotRegistered uint = 101
	// CodeBadAnnotation is a pod whose annotations are not valid.
	CodeBadAnnotation uint = 102
	// CodeConflict is an attachment that something else owns.
	CodeConflict uint = 103
	// CodeKernelFeature is a kernel that lacks something.
	CodeKernelFeature uint = 104
)

// errNoDecision is a stream that ended before it began.
var errNoDecision = errors.New("the registrar ended the call without a decision")

// Failure is a call to the registrar that did not succeed.
type Failure struct {
	// Method is the call's name.
	Method string
	// Socket is where the registrar was sought.
	Socket string
	// Err is the gRPC status, or what was wrong with the answer.
	Err error
	// Dial is why the socket could not be opened at the last attempt; nil when
	// it could.
	Dial error
}

// fail wraps err, nil for nil.
func (c *Client) fail(method string, err error) error {
	if err == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &Failure{Method: method, Socket: c.socket, Err: err}
	if !c.dialed {
		f.Dial = c.dialErr
	}
	return f
}

// Error says what was asked of whom, and what came of it.
func (f *Failure) Error() string {
	return f.Method + " at " + f.Socket + ": " + f.detail()
}

// Unwrap returns the gRPC status.
func (f *Failure) Unwrap() error { return f.Err }

// Refused reports whether the registrar judged the request and said no. Anything
// else is a registrar that is away, whatever the reason (contract 5).
func (f *Failure) Refused() bool {
	switch f.code() {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.AlreadyExists, codes.NotFound, codes.Unimplemented:
		return true
	default:
		return false
	}
}

// code is the gRPC code; a method that the registrar does not have at all is a
// registrar of another version and so not there, which Unimplemented would hide.
func (f *Failure) code() codes.Code {
	st := status.Convert(f.Err)
	if st.Code() == codes.Unimplemented && (strings.HasPrefix(st.Message(), "unknown ") || strings.HasSuffix(st.Message(), " not implemented")) {
		return codes.Unavailable
	}
	return st.Code()
}

// CNI returns the error that the plugin prints. When the registrar said something
// itself, its first line is the message, so that it is seen in a pod's events,
// and the rest is in the details.
func (f *Failure) CNI() *types.Error {
	first, rest, _ := strings.Cut(status.Convert(f.Err).Message(), "\n")
	switch f.code() {
	case codes.InvalidArgument:
		return types.NewError(CodeBadAnnotation, first, rest)
	case codes.FailedPrecondition, codes.AlreadyExists:
		return types.NewError(CodeConflict, first, rest)
	case codes.Unimplemented:
		return types.NewError(CodeKernelFeature, first, rest)
	case codes.NotFound:
		return types.NewError(CodeNotRegistered, first, rest)
	case codes.PermissionDenied, codes.Unauthenticated:
		return types.NewError(types.ErrIOFailure, "registrar at "+f.Socket+" refuses this caller: run the plugin as root", f.detail())
	case codes.Unavailable, codes.DeadlineExceeded:
		if f.spoken() {
			return types.NewError(types.ErrTryAgainLater, first, rest)
		}
	default:
	}
	return f.away()
}

// away is the error about a registrar that gave no answer.
func (f *Failure) away() *types.Error {
	code, text := types.ErrTryAgainLater, "registrar at "+f.Socket+" failed: check the log of `registrar run` (DaemonSet portolan-registrar) on this node"
	switch {
	case errors.Is(f.Dial, fs.ErrPermission):
		code, text = types.ErrIOFailure, "registrar socket "+f.Socket+": permission denied: run the plugin as root and check SELinux or AppArmor labels"
	case f.Dial != nil:
		text = "registrar is away: nothing listens at " + f.Socket + ": check that `registrar run` (DaemonSet portolan-registrar) runs on this node and its socket folder exists"
	case f.code() == codes.DeadlineExceeded:
		text = "registrar at " + f.Socket + " did not answer in time: check the log of `registrar run` (DaemonSet portolan-registrar) on this node"
	case status.Code(f.Err) == codes.Unimplemented:
		text = "registrar at " + f.Socket + " does not know this plugin's calls: update `registrar run` (DaemonSet portolan-registrar)"
	}
	return types.NewError(code, text, f.detail())
}

// spoken reports whether the status is the registrar's own, whose text names
// what is missing, and not one that gRPC made on this side.
func (f *Failure) spoken() bool {
	if f.Dial != nil || f.code() != status.Code(f.Err) {
		return false
	}
	text := status.Convert(f.Err).Message()
	for _, own := range []string{
		"connection error", "error reading from server", "closing transport", "transport is closing", "the connection is",
		"the client connection", "context deadline exceeded", "name resolver", "latest balancer error", "RST_STREAM",
		"unexpected HTTP status",
	} {
		if strings.Contains(text, own) {
			return false
		}
	}
	return text != ""
}

// detail is the whole story on one line. Why the socket could not be opened is said once:
// the status of gRPC then only repeats it, by the path that everybody names already.
func (f *Failure) detail() string {
	text := f.Err.Error()
	if f.Dial != nil {
		text = f.Dial.Error()
		if op, ok := errors.AsType[*net.OpError](f.Dial); ok && op.Err != nil {
			text = op.Err.Error()
		}
	} else if st, ok := status.FromError(f.Err); ok {
		text = st.Code().String() + ": " + st.Message()
	}
	return strings.ReplaceAll(text, "\n", "; ")
}
