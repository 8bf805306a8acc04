package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// Every authority on a mesh connection gets what the table of contract 2 says,
// with the table of the proposal's spike (whose unknown names are 503 here), on the first
// request and on the next: exactly that port, or a clean refusal at once (I1,
// MESH-3, MESH-4).
func TestAuthorities(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	waitRoutes(t, n)

	const port8080, port9090 = "200 payments-1:8080", "200 payments-1:9090"
	tests := []struct{ authority, want string }{
		{"payments.aether.internal", port8080},
		{"payments.aether.internal:8080", port8080},
		{"payments.aether.internal:9090", port9090},
		{"payments.default.aether.internal", port8080},
		{"payments.default.aether.internal:8080", port8080},
		{"payments.default.aether.internal:9090", port9090},
		{"PAYMENTS.aether.internal", port8080},
		{"Payments.Aether.Internal:9090", port9090},
		{"payments.aether.internal.", port8080},
		{"payments.aether.internal.:9090", port9090},
		{"payments.aether.internal:5432", "503"},
		{"payments.aether.internal:7777", "503"},
		{"ghost.aether.internal", "503"},
		{"ghost.aether.internal:9090", "503"},
		{"ghost.default.aether.internal", "503"},
		{"payments.ghost.aether.internal:8080", "503"},
		{"evil.com", "404"},
		{"evil.com:9090", "404"},
		{"payments.aether.internal:0", "404"},
		{"payments.aether.internal:08080", "404"},
		{"payments.aether.internal:65536", "404"},
		{"payments.aether.internal:", "404"},
		{"payments.aether.internal:http", "404"},
		{"pay_ments.aether.internal", "404"},
		{"-payments.aether.internal", "404"},
		{"user@payments.aether.internal", "404"},
		{"a.payments.default.aether.internal", "404"},
		{"aether.internal", "404"},
		{"[::1]:8080", "404"},
		{"10.88.0.2:8080", "404"},
	}
	for _, tt := range tests {
		t.Run(tt.authority, func(t *testing.T) {
			for _, which := range []string{"first", "second"} {
				got, err := client.Curl(t.Context(), "-H", "Host: "+tt.authority, "http://payments.aether.internal/")
				if err != nil {
					t.Fatal(err)
				}
				if got.String() != tt.want {
					t.Errorf("%s request: %s, want %s", which, got, tt.want)
				}
			}
		})
	}
	if got := waited(t, n); len(got) > 0 {
		t.Errorf("Envoy waited before it answered: %v", got)
	}
	noDefaultPortCluster(t, n)
}

// waitRoutes waits until Envoy knows payments: I2 excepts names that it is asked
// for before.
func waitRoutes(t *testing.T, n *node.Node) {
	t.Helper()
	eventually(t, readyTime, func() string {
		routes, err := n.EnvoyAdmin(t.Context(), "/config_dump?resource=dynamic_route_configs")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(routes, `"payments.aether.internal:8080"`) {
			return "Envoy has no route to payments"
		}
		return ""
	})
}

// noDefaultPortCluster fails when Envoy has a cluster of the default port's
// explicit name (I2).
func noDefaultPortCluster(t *testing.T, n *node.Node) {
	t.Helper()
	clusters, err := n.EnvoyAdmin(t.Context(), "/clusters")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(clusters, "payments.aether.internal::") {
		t.Errorf("Envoy has no cluster of payments:\n%s", clusters)
	}
	if strings.Contains(clusters, "payments.aether.internal:8080::") {
		t.Errorf("Envoy has a cluster of the default port's explicit name:\n%s", clusters)
	}
}

// A port is only asked of pods that advertise it: of two pods of a service the
// one without 9090 never gets a request for 9090, and both get those for the
// default port (contract 2).
func TestPodWithoutThePort(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	// This pod would answer on 9090 if it were asked.
	addPod(t, n, payments("payments-2", "8080", "http:8080", "h2:9090"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 2)
	waitHealthy(t, n, 9090, 1)
	tests := []struct {
		url  string
		want []string
	}{
		{"http://payments.aether.internal/", []string{"200 payments-1:8080", "200 payments-2:8080"}},
		{"http://payments.aether.internal:8080/", []string{"200 payments-1:8080", "200 payments-2:8080"}},
		{"http://payments.aether.internal:9090/", []string{"200 payments-1:9090"}},
	}
	for _, tt := range tests {
		got, err := client.Get(t.Context(), "-h2", "-n", "200", "-c", "4", "-keepalive=false", tt.url)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, slices.Sorted(maps.Keys(got.Answers))); diff != "" {
			t.Errorf("%s: answers (-want +got):\n%s", tt.url, diff)
		}
	}
}

// A gRPC client that dials service:port reaches that port with its authority
// untouched; on a port that nobody serves it gets Unavailable at once.
func TestGRPC(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 9090, 1)
	got, err := client.GRPC(t.Context(), "payments.aether.internal:9090")
	if err != nil {
		t.Fatal(err)
	}
	want := answer.GRPC{
		Code: "OK", Health: "SERVING", Origin: answer.Origin{Pod: "payments-1", Container: "app", Port: 9090},
		Authority: "payments.aether.internal:9090", XFCC: got.XFCC,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
	got, err = client.GRPC(t.Context(), "payments.aether.internal:7777")
	if err != nil {
		t.Fatal(err)
	}
	if got.Code != "Unavailable" {
		t.Errorf("on an unserved port: %+v, want Unavailable", got)
	}
}

// Each port speaks its own protocol from end to end: HTTP/1.1 and h2c on an
// http port as the client chose, HTTP/2 on an h2 port whatever the client
// speaks, and an upgrade passes (dataplane decision 7).
func TestProtocols(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	tests := []struct {
		name string
		args []string
		want string
	}{
		{name: "http/1.1 to http", args: []string{"http://payments.aether.internal/"}, want: "HTTP/1.1"},
		{name: "h2c to http", args: []string{"--http2-prior-knowledge", "http://payments.aether.internal/"}, want: "HTTP/2.0"},
		{name: "http/1.1 to h2", args: []string{"http://payments.aether.internal:9090/"}, want: "HTTP/2.0"},
		{name: "h2c to h2", args: []string{"--http2-prior-knowledge", "http://payments.aether.internal:9090/"}, want: "HTTP/2.0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := client.Curl(t.Context(), tt.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got.Status != 200 || got.Echo.Protocol != tt.want {
				t.Errorf("%s over %s, want 200 over %s", got, got.Echo.Protocol, tt.want)
			}
		})
	}
	t.Run("upgrade", func(t *testing.T) {
		out, err := client.Exec(t.Context(), "sh", "-c", `{ printf 'GET / HTTP/1.1\r\nHost: payments.aether.internal\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n'
			sleep 1; echo ping; sleep 1; } | curl -sS --max-time 5 telnet://payments.aether.internal:80`)
		if !strings.HasPrefix(out, "HTTP/1.1 101 ") || !strings.HasSuffix(out, "ping\n") {
			t.Errorf("got %q (%v), want 101 and the echo", out, err)
		}
	})
}

// Two containers of one pod each own a port, and each port reaches its own.
func TestTwoContainers(t *testing.T) {
	n := startNode(t, node.Options{})
	spec := payments("payments-1", "8080,9090", "http:8080")
	spec.Servers = append(spec.Servers, node.Server{Container: "sidecar", Listen: []string{"http:9090"}})
	addPod(t, n, spec)
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	for port, want := range map[int]string{8080: "app", 9090: "sidecar"} {
		got, err := client.Curl(t.Context(), fmt.Sprintf("http://payments.aether.internal:%d/", port))
		if err != nil {
			t.Fatal(err)
		}
		if got.Echo.Container != want {
			t.Errorf("port %d: %s by container %q, want %q", port, got, got.Echo.Container, want)
		}
	}
}
