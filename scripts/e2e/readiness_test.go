package e2e

import (
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// A port that begins to listen 3 s late joins its own set then and not before:
// until then a request for it is a 503, never an answer of another port, and
// the pod's other port serves; afterwards it answers (contract 4.3).
func TestLatePort(t *testing.T) {
	n := startNode(t, node.Options{})
	client := addClient(t, n, "client")
	late := addPod(t, n, payments("payments-1", "8080,9090=h2", "http:8080", "h2:9090,delay=3s"))
	waitHealthy(t, n, 8080, 1)
	listens := func() bool { return strings.Contains(late.Servers()[0].Log(), "protocol=h2") }

	served := false
	eventually(t, readyTime, func() string {
		before := listens()
		got, err := client.Curl(t.Context(), "--http2-prior-knowledge", "http://payments.aether.internal:9090/")
		if err != nil {
			t.Fatal(err)
		}
		switch got.String() {
		case "200 payments-1:9090":
			if !listens() {
				t.Fatal("an answer came before the server listened")
			}
			served = true
			return ""
		case "503":
			// Before it listens this is right; after, the set may take a moment.
		default:
			t.Fatalf("%s (server listens: %v), want 503 or 200 payments-1:9090", got, before)
		}
		if !before {
			if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
				t.Fatalf("the other port: %s (%v)", got, err)
			}
			status, err := n.RegistrarStatus(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if healthy := status.Healthy("default/payments", 9090); healthy != 0 && !listens() {
				t.Fatalf("%d pods are healthy on a port that nothing listens on", healthy)
			}
		}
		return "no answer of 9090 yet"
	})
	if !served {
		t.Error("9090 never served")
	}
	if got := waited(t, n); len(got) > 0 {
		t.Errorf("Envoy waited before it refused: %v", got)
	}
}

// A server that listens on the pod's address only cannot be reached by the app
// hop: its port is not published, and the status says why (contract 4.3).
func TestMisboundPort(t *testing.T) {
	n := startNode(t, node.Options{})
	client := addClient(t, n, "client")
	spec := payments("payments-1", "8080,9090", "http:8080")
	p := addPod(t, n, spec)
	if _, err := p.Serve(t.Context(), node.Server{Container: "misbound", Listen: []string{"http:9090,bind=" + p.IP().String()}}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, n, 8080, 1)
	eventually(t, readyTime, func() string {
		out, err := n.StatusText(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "9090") || !strings.Contains(out, p.IP().String()) {
			return "the status does not name the port and the address:\n" + out
		}
		return ""
	})
	got, err := client.Curl(t.Context(), "http://payments.aether.internal:9090/")
	if err != nil || got.String() != "503" {
		t.Errorf("%s (%v), want 503", got, err)
	}
}

// A service's port that goes away leaves the set, and the next request for it
// is refused at once while the other port serves (contract 5, port removed).
func TestPortStops(t *testing.T) {
	n := startNode(t, node.Options{})
	client := addClient(t, n, "client")
	spec := payments("payments-1", "8080,9090", "http:8080")
	spec.Servers = append(spec.Servers, node.Server{Container: "other", Listen: []string{"http:9090"}})
	p := addPod(t, n, spec)
	waitHealthy(t, n, 9090, 1)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal:9090/"); err != nil || got.String() != "200 payments-1:9090" {
		t.Fatalf("before: %s (%v)", got, err)
	}
	if err := p.Servers()[1].Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, n, 9090, 0)
	for url, want := range map[string]string{"http://payments.aether.internal:9090/": "503", "http://payments.aether.internal/": "200 payments-1:8080"} {
		if got, err := client.Curl(t.Context(), url); err != nil || got.String() != want {
			t.Errorf("%s: %s (%v), want %s", url, got, err, want)
		}
	}
}
