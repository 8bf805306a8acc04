package client_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
)

func request() *cniv1.AddRequest {
	return &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: "c1", Ifname: "eth0"}, Network: "net",
		Netns: "/run/netns/a", Addresses: []string{"10.0.0.2"},
	}
}

func open(t *testing.T, socket string) *client.Client {
	t.Helper()
	c, err := client.New(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func cniError(t *testing.T, err error) *types.Error {
	t.Helper()
	f, ok := errors.AsType[*client.Failure](err)
	if !ok {
		t.Fatalf("%v (%T) is no *Failure", err, err)
	}
	return f.CNI()
}

// The table of error codes: what the registrar says becomes the code of the
// contract, its first line the message and its rest the details; a registrar
// that judged is told from one that is away (contract 5).
func TestCodes(t *testing.T) {
	for _, tc := range []struct {
		name    string
		err     error
		code    uint
		msg     string
		details string
		refused bool
	}{
		{"bad annotation", status.Error(codes.InvalidArgument, "a=b: bad; write c\nd=e: bad; write f"), 102, "a=b: bad; write c", "d=e: bad; write f", true},
		{"refused for good", status.Error(codes.FailedPrecondition, "owned by x"), 103, "owned by x", "", true},
		{"kernel", status.Error(codes.Unimplemented, "kernel lacks nft redirect"), 104, "kernel lacks nft redirect", "", true},
		{"not proven", status.Error(codes.Unavailable, "listener 15008 is not proven: Envoy is not connected"), 11, "listener 15008 is not proven: Envoy is not connected", "", false},
		{"not proven in time", status.Error(codes.DeadlineExceeded, "secret x is not acknowledged"), 11, "secret x is not acknowledged", "", false},
		{"another uid", status.Error(codes.PermissionDenied, "uid 1000"), 5, "refuses this caller: run the plugin as root", "PermissionDenied: uid 1000", false},
		{"broken", status.Error(codes.Internal, "disk full"), 11, " failed: check the log of `registrar run` (DaemonSet portolan-registrar)", "Internal: disk full", false},
		{"older registrar", status.Error(codes.Unimplemented, "unknown method Add for service portolan.cni.v1.RegistrarService"), 11, "does not know this plugin's calls: update", "unknown method Add", false},
		{"bare method", status.Error(codes.Unimplemented, "method Add not implemented"), 11, "does not know this plugin's calls: update", "not implemented", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := cnitest.Start(t, cnitest.Behaviour{Add: func(context.Context, *cniv1.AddRequest, func(*cniv1.AddResponse) error) error { return tc.err }})
			_, err := open(t, r.Socket).Add(t.Context(), request(), false)
			got := cniError(t, err)
			if got.Code != tc.code || !strings.Contains(got.Msg, tc.msg) || !strings.Contains(got.Details, tc.details) {
				t.Errorf("CNI = %d %q %q, want %d %q %q", got.Code, got.Msg, got.Details, tc.code, tc.msg, tc.details)
			}
			if f, _ := errors.AsType[*client.Failure](err); f.Refused() != tc.refused {
				t.Errorf("Refused = %t", f.Refused())
			}
			if strings.ContainsRune(got.Msg, '\n') || len(got.Msg) > 200 {
				t.Errorf("message of %d bytes: %q", len(got.Msg), got.Msg)
			}
		})
	}
}

// CNI-19, CNI-21: what is wrong with the socket is named with its path, the
// kernel's word and a remedy, each of them once, also of a call that waited in vain.
func TestSocketErrors(t *testing.T) {
	dead := filepath.Join(t.TempDir(), "dead.sock")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", dead)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, socket, details string
		wait                  bool
	}{
		{"no file", "/run/none/cni.sock", "connect: no such file or directory", false},
		{"nobody listens", dead, "connect: connection refused", false},
		{"no file in time", "/run/none/cni.sock", "connect: no such file or directory", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := open(t, tc.socket)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			err := second(c.Add(ctx, request(), tc.wait))
			got := cniError(t, err)
			want := "registrar is away: nothing listens at " + tc.socket + ": check that `registrar run` (DaemonSet portolan-registrar) runs on this node and its socket folder exists"
			if got.Code != types.ErrTryAgainLater || got.Msg != want || got.Details != tc.details {
				t.Errorf("CNI = %d %q %q", got.Code, got.Msg, got.Details)
			}
			if want := "Add at " + tc.socket + ": " + tc.details; err.Error() != want {
				t.Errorf("error = %q, want %q", err, want)
			}
			if f, _ := errors.AsType[*client.Failure](err); f.Refused() || c.Connected() {
				t.Errorf("Refused = %t, Connected = %t", f.Refused(), c.Connected())
			}
		})
	}
	denied := &client.Failure{Method: "Add", Socket: "/s", Err: status.Error(codes.Unavailable, "x"), Dial: os.ErrPermission}
	if got := denied.CNI(); got.Code != types.ErrIOFailure || !strings.Contains(got.Msg, "/s: permission denied: run the plugin as root and check SELinux") {
		t.Errorf("CNI = %d %q", got.Code, got.Msg)
	}
}

// An Add that waits gets the registrar that comes back within its time (a rolling
// update), and code 11 when none does; one that does not wait fails at once.
func TestAddWaits(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	c := open(t, socket)
	if got := cniError(t, second(c.Add(ctx, request(), true))); got.Code != 11 || !strings.Contains(got.Msg, "nothing listens at "+socket) {
		t.Errorf("no registrar in time: %d %q", got.Code, got.Msg)
	}
	done := make(chan error, 1)
	go func() { done <- second(c.Add(t.Context(), request(), true)) }()
	cnitest.StartAt(t, socket, cnitest.Behaviour{})
	if err := <-done; err != nil {
		t.Errorf("the registrar came back: %v", err)
	}
	if !c.Connected() {
		t.Error("not connected")
	}
}

func second[T any](_ T, err error) error { return err }

// A registrar that takes the call and never answers, or takes the connection and
// never speaks, is code 11 when the time is over.
func TestHung(t *testing.T) {
	r := cnitest.Start(t, cnitest.Behaviour{Add: func(ctx context.Context, _ *cniv1.AddRequest, _ func(*cniv1.AddResponse) error) error {
		<-ctx.Done()
		return ctx.Err()
	}})
	mute := filepath.Join(t.TempDir(), "mute.sock")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", mute) // never accepts
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, socket := range []string{r.Socket, mute} {
		for _, wait := range []bool{true, false} {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			got := cniError(t, second(open(t, socket).Add(ctx, request(), wait)))
			cancel()
			if got.Code != 11 || !strings.Contains(got.Msg, "registrar at "+socket+" did not answer in time") {
				t.Errorf("%s: %d %q %q", socket, got.Code, got.Msg, got.Details)
			}
		}
	}
}

// Add gives the decision before the proof; Proven ends with the stream and with
// its error; an answer that breaks a limit is refused.
func TestAddThenProven(t *testing.T) {
	meshed := &cniv1.AddResponse{Meshed: true, Reason: "asked", Capture: &cniv1.Capture{VipRanges: []string{"198.18.0.0/15"}}}
	answer := func(ends error, responses ...*cniv1.AddResponse) *client.Client {
		return open(t, cnitest.Start(t, cnitest.Behaviour{
			Add: func(_ context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
				for _, r := range responses {
					if err := send(r); err != nil {
						return err
					}
				}
				return ends
			},
		}).Socket)
	}
	adding, err := answer(nil, meshed, meshed).Add(t.Context(), request(), false)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(meshed, adding.Decision, protocmp.Transform()); d != "" {
		t.Errorf("decision (-want +got):\n%s", d)
	}
	if err := adding.Proven(); err != nil {
		t.Errorf("Proven = %v", err)
	}
	adding, err = answer(status.Error(codes.Unavailable, "listener 15002 is not proven"), meshed).Add(t.Context(), request(), false)
	if err != nil {
		t.Fatal(err)
	}
	if got := cniError(t, adding.Proven()); got.Code != 11 || got.Msg != "listener 15002 is not proven" {
		t.Errorf("Proven: %d %q", got.Code, got.Msg)
	}
	if got := cniError(t, second(answer(nil).Add(t.Context(), request(), false))); got.Code != 11 || !strings.Contains(got.Details, "without a decision") {
		t.Errorf("no decision: %d %q %q", got.Code, got.Msg, got.Details)
	}
	if got := cniError(t, second(answer(nil, &cniv1.AddResponse{Meshed: true}).Add(t.Context(), request(), false))); got.Code != 11 || !strings.Contains(got.Details, "capture: present is false") {
		t.Errorf("bad decision: %d %q %q", got.Code, got.Msg, got.Details)
	}
}

// The other calls carry their requests and wrap their errors.
func TestCalls(t *testing.T) {
	r := cnitest.Start(t, cnitest.Behaviour{})
	c := open(t, r.Socket)
	key := request().GetAttachment()
	ctx := t.Context()
	status1, err := c.Status(ctx)
	if err != nil || !status1.GetReady() {
		t.Errorf("Status = %v, %v", status1, err)
	}
	_, checkErr := c.Check(ctx, &cniv1.CheckRequest{Attachment: key})
	_, gcErr := c.GC(ctx, &cniv1.GCRequest{Network: "net"})
	_, delErr := c.Del(ctx, &cniv1.DelRequest{Attachment: key, Network: "net"})
	if err := errors.Join(delErr, checkErr, gcErr); err != nil {
		t.Error(err)
	}
	if got := len(r.Requests()); got != 4 {
		t.Errorf("%d requests arrived, want 4", got)
	}
	fail := status.Error(codes.NotFound, "not attached")
	r.Set(cnitest.Behaviour{Check: func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) { return nil, fail }})
	_, err = c.Check(ctx, &cniv1.CheckRequest{Attachment: key})
	if got := cniError(t, err); got.Code != client.CodeNotRegistered || got.Msg != "not attached" {
		t.Errorf("Check: %d %q", got.Code, got.Msg)
	}
	if !strings.Contains(err.Error(), "Check at "+r.Socket+": NotFound: not attached") || !errors.Is(err, fail) && status.Code(errors.Unwrap(err)) != codes.NotFound {
		t.Errorf("error = %v", err)
	}
}
