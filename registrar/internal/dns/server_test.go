package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const patience = 15 * time.Second

// fakePods serves every pod, but those whose path says otherwise.
type fakePods struct {
	mu sync.Mutex
	// gate, when not nil, is received from twice before each Apply.
	gate chan struct{}
	pods map[model.AttachmentKey]table.Pod
	// failing pods are reported as failed.
	failing map[model.AttachmentKey]string
}

func (f *fakePods) Apply(_ context.Context, remove []model.AttachmentKey, set []table.Pod) {
	f.mu.Lock()
	gate := f.gate
	f.mu.Unlock()
	if gate != nil {
		<-gate
		<-gate
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range remove {
		delete(f.pods, k)
	}
	for _, p := range set {
		f.pods[p.Key] = p
	}
}

func (f *fakePods) Status(k model.AttachmentKey) (pods.Status, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, ok := f.pods[k]
	switch {
	case !ok:
		return pods.Status{}, false
	case p.Disabled:
		return pods.Status{State: pods.Disabled}, true
	case f.failing[k] != "":
		return pods.Status{State: pods.Failed, Err: f.failing[k]}, true
	}
	return pods.Status{State: pods.Serving, Captured: true}, true
}

func (f *fakePods) setGate(gate chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gate = gate
}

func (f *fakePods) fail(k model.AttachmentKey, why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failing[k] = why
}

func (f *fakePods) keys() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]bool{}
	for k := range f.pods {
		out[k.String()] = true
	}
	return out
}

// end is a serving end on a unix socket.
type end struct {
	socket string
	table  *table.Table
	pods   *fakePods
	server *server
	rpc    *grpc.Server
	reg    *prometheus.Registry
	// streams counts the streams that ended.
	streams atomic.Int64
}

// metric returns the value of a metric without labels.
func metric(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func newEnd(t *testing.T) *end {
	t.Helper()
	e := &end{
		reg:    prometheus.NewRegistry(),
		socket: filepath.Join(t.TempDir(), "dns.sock"), table: table.New(),
		pods: &fakePods{pods: map[model.AttachmentKey]table.Pod{}, failing: map[model.AttachmentKey]string{}},
	}
	e.server = &server{
		table: e.table, pods: e.pods, changed: func() {}, log: slog.New(slog.DiscardHandler),
		metrics: newMetrics(e.reg, e.table, forward.NewLimiter(forward.DefaultLimits())),
	}
	e.start(t)
	t.Cleanup(func() { e.stop() })
	return e
}

func (e *end) start(t *testing.T) {
	t.Helper()
	l, err := listenSocket(t.Context(), e.socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	e.rpc = grpc.NewServer(grpc.MaxRecvMsgSize(dnsv1.MaxMessage),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			defer e.streams.Add(1)
			return handler(srv, ss)
		}))
	dnsv1.RegisterMeshDNSServiceServer(e.rpc, e.server)
	go func(rpc *grpc.Server) { _ = rpc.Serve(l) }(e.rpc)
}

func (e *end) stop() {
	e.rpc.Stop()
	e.server.receivers.Wait()
}

// dial opens a stream.
func (e *end) dial(t *testing.T) (dnsv1.MeshDNSService_SyncClient, context.CancelFunc) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", e.socket)
		}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	t.Cleanup(func() {
		cancel()
		_ = conn.Close()
	})
	stream, err := dnsv1.NewMeshDNSServiceClient(conn).Sync(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream, cancel
}

func send(t *testing.T, stream dnsv1.MeshDNSService_SyncClient, list ...*dnsv1.SyncRequest) {
	t.Helper()
	for _, m := range list {
		if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	}
}

// awaitAck reads until a revision holds, and returns the pods that were reported.
func awaitAck(t *testing.T, stream dnsv1.MeshDNSService_SyncClient, revision uint64) map[string]*dnsv1.PodStatus {
	t.Helper()
	got := map[string]*dnsv1.PodStatus{}
	for {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatalf("revision %d: %v", revision, err)
		}
		if err := resp.Validate(); err != nil {
			t.Fatal(err)
		}
		for _, p := range resp.GetPods() {
			got[model.KeyOf(p.GetAttachment()).String()] = p
		}
		if resp.GetRevision() > revision {
			t.Fatalf("revision %d is acknowledged, want %d", resp.GetRevision(), revision)
		}
		if resp.GetRevision() == revision {
			return got
		}
	}
}

// awaitEnd reads until the stream ends and returns how.
func awaitEnd(t *testing.T, stream dnsv1.MeshDNSService_SyncClient) *status.Status {
	t.Helper()
	for {
		if _, err := stream.Recv(); err != nil {
			return status.Convert(err)
		}
	}
}

func podMessage(i int) *dnsv1.Pod { return testPod(i).Message() }

func testPod(i int) Pod {
	return Pod{Key: testKey(i), Netns: fmt.Sprintf("/run/netns/c%d", i)}
}

func testKey(i int) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: fmt.Sprintf("c%d", i), IfName: "eth0"}
}

// fullState is a first message.
func fullState(session uint64, list ...int) *dnsv1.SyncRequest {
	m := &dnsv1.SyncRequest{
		Session: session, Revision: 1, Full: true,
		Settings: &dnsv1.Settings{MeshDomain: "aether.internal"},
		SetNames: []*dnsv1.Name{{Name: "a.aether.internal", Vip4: "198.18.0.1"}},
	}
	for _, i := range list {
		m.SetPods = append(m.SetPods, podMessage(i))
	}
	return m
}

// What breaks the contract ends the stream with InvalidArgument and a reason,
// and leaves the table as it was.
func TestServerRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		list func() []*dnsv1.SyncRequest
		want string
	}{
		{name: "begins with a change", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{{Session: 1, Revision: 1}}
		}, want: "session: the first message of a stream carries its session and begins a full state"},
		{name: "no session", list: func() []*dnsv1.SyncRequest { return []*dnsv1.SyncRequest{fullState(0)} }, want: "session: the first message"},
		{name: "no settings", list: func() []*dnsv1.SyncRequest {
			m := fullState(1)
			m.Settings = nil
			return []*dnsv1.SyncRequest{m}
		}, want: "settings: missing from the first chunk of a full state"},
		{name: "revision does not grow", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{fullState(1), {Revision: 1, RemoveNames: []string{"a.aether.internal"}}}
		}, want: "revision: 1 follows 1"},
		{name: "chunk of another revision", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{fullState(1), {Revision: 2, More: true}, {Revision: 3}}
		}, want: "revision: 3 follows a chunk of 2, which is not complete"},
		{name: "chunk of another kind", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{fullState(1), {Revision: 2, More: true}, {Revision: 2, Full: true}}
		}, want: "revision: 2 follows a chunk of 2, which is not complete"},
		{name: "limit", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{fullState(1), {Revision: 2, SetNames: []*dnsv1.Name{{Name: "localhost", Vip4: "198.18.0.1"}}}}
		}, want: `set_names[0].name: "localhost" has one label`},
		{name: "domain in a change", list: func() []*dnsv1.SyncRequest {
			return []*dnsv1.SyncRequest{fullState(1), {Revision: 2, Settings: &dnsv1.Settings{MeshDomain: "mesh.example"}}}
		}, want: `mesh domain "mesh.example" replaces "aether.internal"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEnd(t)
			stream, _ := e.dial(t)
			list := tc.list()
			send(t, stream, list...)
			st := awaitEnd(t, stream)
			if st.Code() != codes.InvalidArgument || !strings.Contains(st.Message(), tc.want) {
				t.Errorf("ended with %v, want InvalidArgument: %s", st, tc.want)
			}
			want := 0
			if len(list) > 1 {
				want = 1
			}
			if names, _ := e.table.Size(); names != want {
				t.Errorf("%d names, want %d", names, want)
			}
		})
	}
}

// A revision holds as a whole and is acknowledged after its pods were tried, with
// the state of each; later changes of a state come unasked. More pods than fit
// one response are spread, and only the last response carries the revision.
func TestServerAcknowledges(t *testing.T) {
	e := newEnd(t)
	e.pods.fail(testKey(3), strings.Repeat("long ü", 200))
	stream, _ := e.dial(t)
	first := fullState(1)
	first.More = true
	send(t, stream, first)
	var all []int
	for i := range 3 * 400 {
		all = append(all, i)
	}
	for part := range 3 {
		m := fullState(1, all[400*part:400*part+400]...)
		m.Settings, m.SetNames, m.More = nil, nil, part < 2
		if names, _ := e.table.Size(); names != 0 {
			t.Fatal("a part of the revision is applied")
		}
		send(t, stream, m)
	}
	got := awaitAck(t, stream, 1)
	if len(got) != len(all) {
		t.Errorf("%d pods are reported, want %d", len(got), len(all))
	}
	if st := got["c3-eth0"]; st.GetState() != dnsv1.PodState_POD_STATE_FAILED || !strings.HasPrefix(st.GetError(), "long ü") || len(st.GetError()) > dnsv1.MaxError {
		t.Errorf("failed pod: %v", st)
	}
	if st := got["c4-eth0"]; st.GetState() != dnsv1.PodState_POD_STATE_SERVING || !st.GetCaptured() {
		t.Errorf("served pod: %v", st)
	}
	// What did not change is reported again when it is set again.
	send(t, stream, &dnsv1.SyncRequest{Revision: 5, SetPods: []*dnsv1.Pod{podMessage(7)}})
	if d := cmp.Diff(1, len(awaitAck(t, stream, 5))); d != "" {
		t.Errorf("pods of a change (-want +got):\n%s", d)
	}
	e.pods.fail(testKey(7), "socket broke")
	e.server.podChanged(testKey(7))
	resp, err := stream.Recv()
	if err != nil || resp.GetRevision() != 5 || len(resp.GetPods()) != 1 || resp.GetPods()[0].GetError() != "socket broke" {
		t.Errorf("unasked report %v, %v", resp, err)
	}
	send(t, stream, &dnsv1.SyncRequest{Revision: 6, RemoveNames: []string{"a.aether.internal", "never.was"}})
	awaitAck(t, stream, 6)
	if names, n := e.table.Size(); names != 0 || n != len(all) {
		t.Errorf("%d names and %d pods, want 0 and %d", names, n, len(all))
	}
}

// CNI-68: a newer session takes the table over with its whole state, never with a
// part of it; the older one ends; its late end leaves the newer one alone.
func TestServerSessions(t *testing.T) {
	e := newEnd(t)
	s1, end1 := e.dial(t)
	send(t, s1, fullState(1, 1))
	awaitAck(t, s1, 1)

	s2, _ := e.dial(t)
	part := fullState(2, 2)
	part.More = true
	send(t, s2, part)
	// While the newer state is not complete, the older session goes on.
	send(t, s1, &dnsv1.SyncRequest{Revision: 2, SetPods: []*dnsv1.Pod{podMessage(10)}})
	awaitAck(t, s1, 2)
	if d := cmp.Diff(map[string]bool{"c1-eth0": true, "c10-eth0": true}, e.pods.keys()); d != "" {
		t.Errorf("pods of the older session (-want +got):\n%s", d)
	}
	send(t, s2, &dnsv1.SyncRequest{Revision: 1, Full: true})
	awaitAck(t, s2, 1)
	if st := awaitEnd(t, s1); st.Code() != codes.Aborted || !strings.Contains(st.Message(), "another registrar has taken the table over") {
		t.Errorf("the older session ended with %v", st)
	}
	end1()
	send(t, s2, &dnsv1.SyncRequest{Revision: 2, SetPods: []*dnsv1.Pod{podMessage(20)}})
	awaitAck(t, s2, 2)
	if d := cmp.Diff(map[string]bool{"c2-eth0": true, "c20-eth0": true}, e.pods.keys()); d != "" {
		t.Errorf("pods of the newer session (-want +got):\n%s", d)
	}
}

// Two registrars that overlap do not fight: the one that started earlier is
// refused while the other is connected, and may come back when it is gone. The
// same one may connect again while its old stream is not ended yet.
func TestServerSessionOrder(t *testing.T) {
	e := newEnd(t)
	newer, endNewer := e.dial(t)
	send(t, newer, fullState(200, 1))
	awaitAck(t, newer, 1)
	older, _ := e.dial(t)
	send(t, older, fullState(100, 2))
	if st := awaitEnd(t, older); st.Code() != codes.FailedPrecondition || !strings.Contains(st.Message(), "a registrar that started later owns the table (200, this one is 100); stop the older one") {
		t.Errorf("the older registrar ended with %v", st)
	}
	again, endAgain := e.dial(t)
	send(t, again, fullState(200, 3))
	awaitAck(t, again, 1)
	if st := awaitEnd(t, newer); st.Code() != codes.Aborted {
		t.Errorf("the old stream of the same registrar ended with %v", st)
	}
	endNewer()
	endAgain()
	deadline := time.Now().Add(patience)
	for {
		back, _ := e.dial(t)
		send(t, back, fullState(100, 4))
		resp, err := back.Recv()
		if err == nil && resp.GetRevision() == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the older registrar alone: %v, %v", resp, err)
		}
	}
	if d := cmp.Diff(map[string]bool{"c4-eth0": true}, e.pods.keys()); d != "" {
		t.Errorf("pods (-want +got):\n%s", d)
	}
}

// A session that ends while its state waits for another revision takes nothing
// over: the one that is there stays.
func TestServerEndedSession(t *testing.T) {
	e := newEnd(t)
	s1, _ := e.dial(t)
	send(t, s1, fullState(1, 1))
	awaitAck(t, s1, 1)
	gate := make(chan struct{})
	e.pods.setGate(gate)
	send(t, s1, &dnsv1.SyncRequest{Revision: 2, SetPods: []*dnsv1.Pod{podMessage(10)}})
	gate <- struct{}{} // revision 2 is being applied
	s2, end2 := e.dial(t)
	send(t, s2, fullState(2, 2))
	before := e.streams.Load()
	end2()
	deadline := time.Now().Add(patience)
	for e.streams.Load() == before {
		if time.Now().After(deadline) {
			t.Fatal("the stream does not end")
		}
		time.Sleep(time.Millisecond)
	}
	e.pods.setGate(nil)
	close(gate)
	awaitAck(t, s1, 2)
	send(t, s1, &dnsv1.SyncRequest{Revision: 3, SetPods: []*dnsv1.Pod{podMessage(11)}})
	awaitAck(t, s1, 3)
	if d := cmp.Diff(map[string]bool{"c1-eth0": true, "c10-eth0": true, "c11-eth0": true}, e.pods.keys()); d != "" {
		t.Errorf("pods (-want +got):\n%s", d)
	}
	if got := metric(t, e.reg, "portolan_dns_table_sessions_total"); got != 1 {
		t.Errorf("%v sessions took the table over, want 1", got)
	}
}
