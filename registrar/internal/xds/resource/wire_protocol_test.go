package resource_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// twoPorts is a service with an http and an h2 port served by handler, and a client.
func twoPorts(tb testing.TB, handler http.Handler) (m *mesh, client *meshPod) {
	tb.Helper()
	m = newMesh(tb)
	client = m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080 9090=h2")
	pod.ServeHTTP(tb, "127.0.0.1:8080", handler)
	pod.ServeHTTP(tb, "127.0.0.1:9090", handler)
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	m.setEndpoints("payments.aether.internal", pod)
	m.setEndpoints("payments.aether.internal:9090", pod)
	m.xds.Sync()
	return m, client
}

// An http port gets the protocol that the client speaks, an h2 port gets HTTP/2 from
// every client, with trailers both ways (contract 1, dataplane decision 7).
func TestWireProtocols(t *testing.T) {
	m, client := twoPorts(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-After")
		w.Header().Set("Content-Type", "application/json")
		_ = http.NewResponseController(w).EnableFullDuplex()
		_ = http.NewResponseController(w).Flush() // so that it has no length, which in HTTP/1.1 excludes trailers
		wiretest.Echo("app").ServeHTTP(w, r)
		w.Header().Set("X-After", "yes")
	}))
	for _, tt := range []struct {
		client *http.Client
		port   string
		want   string
	}{
		{client.http1(t), "8080", "HTTP/1.1"},
		{client.h2c(t), "8080", "HTTP/2.0"},
		{client.http1(t), "9090", "HTTP/2.0"},
		{client.h2c(t), "9090", "HTTP/2.0"},
	} {
		m.call(tt.client, "payments.aether.internal:"+tt.port)
		got := m.call(tt.client, "payments.aether.internal:"+tt.port, func(r *http.Request) {
			r.Method = http.MethodPost
			r.Body = io.NopCloser(io.LimitReader(zeros{}, 10))
			r.ContentLength = -1
			r.Trailer = http.Header{"X-Sum": {"10"}}
			r.Header.Set("X-Large", strings.Repeat("v", 100_000))
		})
		if got.status != 200 || got.seen.Proto != tt.want || got.seen.Trailer.Get("X-Sum") != "10" || got.trailer.Get("X-After") != "yes" {
			t.Errorf("port %s: got %d, %s with trailers %v, and trailers %v: %s", tt.port, got.status, got.seen.Proto, got.seen.Trailer, got.trailer, got.body)
		}
		if n := len(got.seen.Header.Get("X-Large")); n != 100_000 {
			t.Errorf("port %s: %d bytes of a large header arrive", tt.port, n)
		}
	}
}

// An application that does not speak its port's protocol is a 502 whose text says so,
// whoever of the two speaks first: what README says of it.
func TestWireOtherProtocol(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080 9090=h2 7070")
	answer := func(text string) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			_, _ = c.Read(make([]byte, 4096))
			_, _ = io.WriteString(c, text)
		}
	}
	pod.ServeTCP(t, "127.0.0.1:8080", answer("\x15\x03\x01\x00\x02\x02\x0a")) // an alert of TLS
	pod.ServeTCP(t, "127.0.0.1:9090", answer("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
	pod.ServeTCP(t, "127.0.0.1:7070", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "220 mail.example.test ESMTP\r\n")
		_, _ = io.Copy(io.Discard, c)
	})
	m.setService(service{name: "payments", ports: "8080 9090=h2 7070"})
	for _, cluster := range []string{"payments.aether.internal", "payments.aether.internal:9090", "payments.aether.internal:7070"} {
		m.setEndpoints(cluster, pod)
	}
	m.xds.Sync()
	c := client.http1(t)
	for _, port := range []string{"8080", "9090", "7070"} {
		if got := m.call(c, "payments.aether.internal:"+port); got.status != 502 || !strings.Contains(got.body, "protocol error") {
			t.Errorf("port %s: got %d %q, want 502 with protocol error", port, got.status, got.body)
		}
	}
}

// gRPC through an h2 port, and through an http port: unary, streams in both
// directions that stay quiet, metadata, and statuses with details in trailers.
// Where nobody serves, the client sees UNAVAILABLE, and UNIMPLEMENTED for a name
// that is no mesh name, at once.
func TestWireGRPC(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080 9090=h2 7070=h2")
	server := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		_ = grpc.SetTrailer(ctx, metadata.Pairs("authority", md.Get(":authority")[0], "xfcc", strings.Join(md.Get("x-forwarded-client-cert"), "|")))
		return h(ctx, req)
	}))
	checks := health.NewServer()
	healthpb.RegisterHealthServer(server, checks)
	for _, port := range []string{"8080", "9090"} {
		l := pod.Listen(t, "127.0.0.1:"+port)
		go func() { _ = server.Serve(l) }()
	}
	t.Cleanup(server.Stop)
	m.setService(service{name: "payments", ports: "8080 9090=h2 7070=h2"})
	for _, cluster := range []string{"payments.aether.internal", "payments.aether.internal:9090", "payments.aether.internal:7070"} {
		m.setEndpoints(cluster, pod)
	}
	m.xds.Sync()
	dial := func(target string) healthpb.HealthClient {
		c, err := grpc.NewClient("passthrough:///"+target, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return client.DialContext(ctx, "tcp", "127.0.0.1:15001")
			}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return healthpb.NewHealthClient(c)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, target := range []string{"payments.aether.internal:8080", "payments.aether.internal:9090"} {
		c := dial(target)
		var trailer metadata.MD
		if got, err := c.Check(ctx, &healthpb.HealthCheckRequest{}, grpc.Trailer(&trailer)); err != nil || got.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("%s: Check: %v, %v", target, got, err)
		}
		if a, x := trailer.Get("authority"), trailer.Get("xfcc"); len(a) != 1 || a[0] != target || len(x) != 1 || !hasURI(x[0], client.spec.Identity.SPIFFE()) {
			t.Errorf("%s: trailers are %v", target, trailer)
		}
		if _, err := c.Check(ctx, &healthpb.HealthCheckRequest{Service: "absent"}); status.Code(err) != codes.NotFound || status.Convert(err).Message() != "unknown service" {
			t.Errorf("%s: Check of an absent service: %v", target, err)
		}
		watch, err := c.Watch(ctx, &healthpb.HealthCheckRequest{Service: target})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_SERVICE_UNKNOWN, healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING} {
			if want != healthpb.HealthCheckResponse_SERVICE_UNKNOWN {
				checks.SetServingStatus(target, want)
			}
			if got, err := watch.Recv(); err != nil || got.GetStatus() != want {
				t.Errorf("%s: Watch: %v, %v, want %v", target, got, err, want)
			}
		}
	}
	for target, want := range map[string]codes.Code{
		"payments.aether.internal:7777": codes.Unavailable, "payments.aether.internal:7070": codes.Unavailable,
		"ghost.aether.internal:9090": codes.Unavailable, "evil.com:9090": codes.Unimplemented,
	} {
		if _, err := dial(target).Check(ctx, &healthpb.HealthCheckRequest{}); status.Code(err) != want {
			t.Errorf("%s: got %v, want %v", target, err, want)
		}
	}
	m.unwaited()
}

// A WebSocket crosses the mesh to an http port and stays open while it is quiet.
func TestWireWebSocket(t *testing.T) {
	m, client := twoPorts(t, websocket.Server{Handler: func(c *websocket.Conn) { _, _ = io.Copy(c, c) }})
	for _, authority := range []string{"payments.aether.internal", "payments.aether.internal:8080"} {
		config, err := websocket.NewConfig("ws://"+authority+"/chat", "http://"+authority)
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.DialContext(t.Context(), "tcp", "127.0.0.1:15001")
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		ws, err := websocket.NewClient(config, c)
		if err != nil {
			t.Fatalf("%s: %v", authority, err)
		}
		for i := range 3 {
			want := fmt.Sprint("message ", i)
			var got string
			if err := websocket.Message.Send(ws, want); err != nil {
				t.Fatal(err)
			}
			if err := websocket.Message.Receive(ws, &got); err != nil || got != want {
				t.Errorf("%s: got %q, %v, want %q", authority, got, err, want)
			}
		}
		_ = ws.Close()
	}
	_ = m
}

// HTTP/1.1 arrives as it was sent: the case of header names and the reason phrase,
// the path with all its oddities, an interim 100 that the application decides on,
// many and large headers.
func TestWireTransparent(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080")
	seen := make(chan string, 1)
	pod.ServeTCP(t, "127.0.0.1:8080", func(c *net.TCPConn) {
		r := textproto.NewReader(bufio.NewReader(c))
		head := ""
		for {
			line, err := r.ReadLine()
			if err != nil {
				return
			}
			if line == "" {
				break
			}
			head += line + "\n"
		}
		seen <- head
		_, _ = io.WriteString(c, "HTTP/1.1 200 Quite Fine\r\nsErVer: app\r\nX-ODD-Case: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
	})
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments.aether.internal", pod)
	m.xds.Sync()

	const line = "GET //a/../b/./%2f%2E%41?x=%20&y=;z HTTP/1.1"
	many := ""
	for i := range 200 {
		many += fmt.Sprintf("X-Many-%d: %s\r\n", i, strings.Repeat("v", 500))
	}
	c, err := client.DialContext(t.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(c, line+"\r\nHost: payments.aether.internal\r\nX-WeIrD-cAsE: 1\r\nx_under_score: 1\r\n"+many+"\r\n")
	head := ""
	select {
	case head = <-seen:
	case <-time.NewTimer(10 * time.Second).C:
		t.Fatal("the request does not reach the application")
	}
	if !strings.HasPrefix(head, line+"\n") {
		t.Errorf("request line became %q", head[:min(len(head), 100)])
	}
	for _, want := range []string{"\nX-WeIrD-cAsE: 1\n", "\nx_under_score: 1\n", "\nX-Many-0: vvv", "\nX-Many-199: vvv", "\nHost: payments.aether.internal\n"} {
		if !strings.Contains(head, want) {
			t.Errorf("the application does not see %q in\n%s", want, head[:min(len(head), 500)])
		}
	}
	for _, unwanted := range []string{"x-request-id", "x-envoy", "x-forwarded-for", "via:"} {
		if strings.Contains(strings.ToLower(head), unwanted) {
			t.Errorf("the application sees %q", unwanted)
		}
	}
	answer := ""
	for r := bufio.NewReader(c); !strings.HasSuffix(answer, "\r\n\r\n"); {
		got, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("after %q: %v", answer, err)
		}
		answer += got
	}
	for _, want := range []string{"HTTP/1.1 200 Quite Fine\r\n", "\r\nsErVer: app\r\n", "\r\nX-ODD-Case: 1\r\n"} {
		if !strings.Contains(answer, want) {
			t.Errorf("the client does not see %q in\n%s", want, answer)
		}
	}
	if strings.Contains(strings.ToLower(answer), "x-envoy") {
		t.Errorf("the client sees %s", answer)
	}
}

// Expect: 100-continue is the application's to answer: it may refuse before the body.
func TestWireExpectContinue(t *testing.T) {
	m, client := twoPorts(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		wiretest.Echo("app").ServeHTTP(w, r)
	}))
	for path, want := range map[string]string{"/refuse": "403", "/take": "100"} {
		c, err := client.DialContext(t.Context(), "tcp", "127.0.0.1:15001")
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = io.WriteString(c, "POST "+path+" HTTP/1.1\r\nHost: payments.aether.internal\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
		first, err := bufio.NewReader(c).ReadString('\n')
		if err != nil || !strings.HasPrefix(first, "HTTP/1.1 "+want) {
			t.Errorf("%s: got %q, %v, want %s", path, first, err, want)
		}
		_ = c.Close()
	}
	_ = m
}

// An idle connection to the application is given up for being idle, so that no request
// meets one that the application is closing. How soon is in the golden files: common
// servers close it after 2 s and more.
func TestWireApplicationConnectionIdle(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080")
	closed := make(chan struct{})
	pod.ServeTCP(t, "127.0.0.1:8080", func(c *net.TCPConn) {
		r := bufio.NewReader(c)
		if _, err := http.ReadRequest(r); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		_, _ = io.Copy(io.Discard, r)
		close(closed)
	})
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments.aether.internal", pod)
	m.xds.Sync()
	if got := m.call(client.http1(t), "payments.aether.internal"); got.status != http.StatusOK {
		t.Fatalf("got %d", got.status)
	}
	select {
	case <-closed:
	case <-time.NewTimer(30 * time.Second).C:
		t.Fatal("the connection is still there")
	}
	wiretest.Eventually(t, "Envoy says why", func() bool { return m.envoy.Stat("cluster.app|payments-1|8080.upstream_cx_idle_timeout") == 1 })
}

// 64 MiB go both ways, over all four combinations, byte for byte; so does a body on
// a cold request, which waits while the cluster is fetched.
func TestWireLargeBodies(t *testing.T) {
	const size = 64 << 20
	m, client := twoPorts(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		sum := sha256.New()
		w.WriteHeader(http.StatusOK)
		_, _ = io.Copy(w, io.TeeReader(r.Body, sum))
		w.Header().Set(http.TrailerPrefix+"X-Sum", hex.EncodeToString(sum.Sum(nil)))
	}))
	_ = m
	for _, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		for _, port := range []string{"8080", "9090"} {
			sent, received := sha256.New(), sha256.New()
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://payments.aether.internal:"+port+"/",
				io.TeeReader(io.LimitReader(zeros{}, size), sent))
			if err != nil {
				t.Fatal(err)
			}
			request.ContentLength = size
			response, err := c.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			n, err := io.Copy(received, response.Body)
			_ = response.Body.Close()
			if err != nil || n != size || string(sent.Sum(nil)) != string(received.Sum(nil)) || response.Trailer.Get("X-Sum") != hex.EncodeToString(sent.Sum(nil)) {
				t.Errorf("port %s: %d bytes came back, %v, %v", port, n, err, response.Trailer)
			}
		}
	}
}
