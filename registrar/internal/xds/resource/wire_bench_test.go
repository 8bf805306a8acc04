package resource_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// A small request over a warm connection, pod to pod through one Envoy twice:
// without the mesh, with the protocol kept (an http port), and with HTTP/2 forced on
// the mesh hop and to the application (an h2 port).
func BenchmarkWire(b *testing.B) {
	m, client := twoPorts(b, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("ok"))
	}))
	direct := m.lab.AddPod()
	direct.ServeHTTP(b, "0.0.0.0:8080", wiretest.Echo("direct"))
	for _, bb := range []struct {
		name      string
		client    *http.Client
		authority string
	}{
		{"direct", client.Client(b, direct.Addr.String()+":8080", false), "direct"},
		{"http port from HTTP 1.1", client.http1(b), "payments.aether.internal"},
		{"http port from h2c", client.h2c(b), "payments.aether.internal"},
		{"h2 port from HTTP 1.1", client.http1(b), "payments.aether.internal:9090"},
		{"h2 port from h2c", client.h2c(b), "payments.aether.internal:9090"},
	} {
		bb.client.Transport.(*http.Transport).MaxIdleConnsPerHost = 64
		run := func(b *testing.B) {
			b.Helper()
			if got, err := try(bb.client, bb.authority); err != nil || got.status != 200 {
				b.Fatalf("got %d, %v", got.status, err)
			}
		}
		name := strings.ReplaceAll(bb.name, " ", "-")
		// Envoy's processor time does not depend on what else the machine does.
		envoy := func(b *testing.B) func() {
			b.Helper()
			run(b)
			before := m.envoy.CPU()
			return func() { b.ReportMetric(float64((m.envoy.CPU()-before).Microseconds())/float64(b.N), "envoy-us/op") }
		}
		b.Run(name+"/one", func(b *testing.B) {
			defer envoy(b)()
			for b.Loop() {
				run(b)
			}
		})
		b.Run(name+"/eight", func(b *testing.B) {
			defer envoy(b)()
			b.SetParallelism(4) // on two cores
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					run(b)
				}
			})
		})
	}
}
