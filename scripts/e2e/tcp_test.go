package e2e

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// Raw TCP reaches a tcp port, also when the server speaks first; on any other
// port it is reset at its first bytes, and closed when Envoy's patience with its silence
// is over, with no byte of HTTP in the stream (contract 2, dataplane decision 8).
func TestRawTCP(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 5432, 1)

	t.Run("tcp port", func(t *testing.T) {
		for _, name := range []string{"payments.aether.internal", "payments.default.aether.internal"} {
			got, err := client.TCP(t.Context(), name+":5432", "hello")
			if err != nil {
				t.Fatal(err)
			}
			want := answer.TCP{Banner: "hello from payments-1 port 5432", Echo: "hello", Lines: 1}
			if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(answer.TCP{}, "Millis")); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
		}
	})
	for name, port := range map[string]string{"http port": "8080", "h2 port": "9090", "unserved port": "7777"} {
		t.Run(name+", bytes", func(t *testing.T) {
			got, err := client.TCP(t.Context(), "-client-first", "payments.aether.internal:"+port, "\x16\x03hello")
			if err != nil {
				t.Fatal(err)
			}
			if got.Banner != "" || !strings.Contains(got.Error, "reset") {
				t.Errorf("%+v, want a reset and no byte", got)
			}
		})
	}
	if got := waited(t, n); len(got) > 0 {
		t.Errorf("Envoy waited before it reset: %v", got)
	}
	t.Run("http port, silence", func(t *testing.T) {
		got, err := client.TCP(t.Context(), "-timeout", "1m", "payments.aether.internal:8080")
		if err != nil {
			t.Fatal(err)
		}
		if got.Banner != "" || strings.Contains(got.Error, "timeout") {
			t.Errorf("%+v, want the connection closed and no byte", got)
		}
		if diff := cmp.Diff(map[string]int{"listener.out_http.downstream_pre_cx_timeout": 1}, waited(t, n)); diff != "" {
			t.Errorf("what Envoy waited for (-want +got):\n%s", diff)
		}
	})
}
