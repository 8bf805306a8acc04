package resource_test

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// overHTTP2 is a client that sends everything over one connection.
func overHTTP2(t *testing.T, c net.Conn) *http.Client {
	t.Helper()
	transport := &http.Transport{
		Protocols:      new(http.Protocols),
		DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return c, nil },
	}
	transport.Protocols.SetHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

// One HTTP/2 connection may carry requests for several authorities, and the
// certificate is the same for all ports: the guard sends back what is not for the
// port that the SNI chose, whichever way the authority is written, and never hands
// it to the application (XDS-61, I1, dataplane decision 3).
func TestWireGuard(t *testing.T) {
	m := newMesh(t)
	multi := m.addPod("multi", "payments", "8080 9090")
	single := m.addPod("single", "payments", "8080")
	for _, pod := range []*meshPod{multi, single} {
		pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
		pod.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	}
	f := m.foreigner("stranger")
	for _, chain := range []struct {
		name string
		pod  *meshPod
		sni  string
	}{{"multi 8080", multi, "8080"}, {"single", single, "8080"}, {"single without SNI", single, ""}, {"multi without SNI", multi, ""}} {
		c, err := f.dial(t.Context(), chain.pod, chain.sni, "h2")
		if err != nil {
			t.Fatal(err)
		}
		client := overHTTP2(t, c)
		for _, tt := range []struct {
			authority string
			want      int
		}{
			{"payments.aether.internal", 200},
			{"payments.aether.internal:8080", 200},
			{"payments.default.aether.internal", 200},
			{"payments.default.aether.internal:8080", 200},
			{"PAYMENTS.aether.INTERNAL:8080", 200},
			{"payments.aether.internal.:8080", 200},
			{"payments.aether.internal:9090", 421},
			{"payments.default.aether.internal:9090", 421},
			{"payments.aether.internal.:9090", 421},
			{"payments.aether.internal:08080", 421},
			{"payments.aether.internal:7777", 421},
			{"PAYMENTS.AETHER.INTERNAL:9090", 421},
			{"orders.aether.internal", 421},
			{"Orders.aether.internal:8080", 421},
			{"payments.other.aether.internal:8080", 421},
			{"a.b.c.aether.internal", 421},
			{"aether.internal", 200},
			{"aether.internal.example.com", 200},
			{"xaether.internal", 200},
			{"example.com:9090", 200},
			{"10.0.0.1", 200},
			{"localhost", 200},
		} {
			t.Run(chain.name+" "+tt.authority, func(t *testing.T) {
				got := m.in(t).call(client, tt.authority, func(r *http.Request) { r.URL.Scheme = "https" })
				if got.status != tt.want || got.status == 200 && got.seen.Server != "8080" {
					t.Errorf("got %d from %q, want %d", got.status, got.seen.Server, tt.want)
				}
				if marked := got.header.Get(resource.NotDeliveredHeader) == "1"; marked != (tt.want == 421) {
					t.Errorf("marked as not delivered: %v", marked)
				}
			})
		}
		_ = c.Close()
	}
}

// 4,000 requests for two ports, mixed on the same HTTP/2 connections, reach their
// port or are sent back.
func TestWireGuardMixed(t *testing.T) {
	m := newMesh(t)
	multi := m.addPod("multi", "payments", "8080 9090")
	multi.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	multi.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	f := m.foreigner("stranger")
	var wg sync.WaitGroup
	for worker, sni := range []string{"8080", "9090", "8080", "9090"} {
		c, err := f.dial(t.Context(), multi, sni, "h2")
		if err != nil {
			t.Fatal(err)
		}
		client := overHTTP2(t, c)
		wg.Go(func() {
			defer func() { _ = c.Close() }()
			for i := range 1000 {
				port := []string{"8080", "9090"}[(i+worker)%2]
				got, err := try(client, "payments.aether.internal:"+port, func(r *http.Request) { r.URL.Scheme = "https" })
				right := got.status == 421 && sni != port || got.status == 200 && sni == port && got.seen.Server == port
				if err != nil || !right {
					t.Errorf("SNI %s, port %s: %d from %q, %v", sni, port, got.status, got.seen.Server, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// What peers put into the mesh's own headers has no effect and reaches nobody:
// neither the SNI that a client claims, nor who it claims to be, nor a "not
// delivered" that an application makes up, nor Envoy's own control headers.
func TestWireHeaderSmuggling(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	single := m.addPod("single", "payments", "8080")
	multi := m.addPod("multi", "orders", "8080 9090")
	liar := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(resource.NotDeliveredHeader, "1")
		w.Header().Set("Server", "app")
		w.Header().Set("X-Envoy-Upstream-Service-Time", "7")
		wiretest.Echo("8080").ServeHTTP(w, r)
	})
	for _, pod := range []*meshPod{single, multi} {
		pod.ServeHTTP(t, "127.0.0.1:8080", liar)
		m.setService(service{name: pod.spec.Service.Name, ports: "8080"})
		m.setEndpoints(pod.spec.Service.Name+"."+domain, pod)
	}
	m.xds.Sync()
	forge := func(r *http.Request) {
		for name, value := range map[string]string{
			"X-Portolan-Sni": "9090", "x-portolan-not-delivered": "1", "X-Forwarded-Client-Cert": "URI=spiffe://td.test/ns/default/sa/root",
			"X-Envoy-Retry-On": "5xx", "X-Envoy-Max-Retries": "9", "X-Envoy-Upstream-Rq-Timeout-Ms": "1", "X-Envoy-Upstream-Alt-Stat-Name": "x",
			"X-Envoy-Retriable-Header-Names": "server", "X-Envoy-Internal": "true", "X-Envoy-Expected-Rq-Timeout-Ms": "1",
			"X-Request-Id": "mine", "X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https",
		} {
			r.Header.Set(name, value)
		}
	}
	for _, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		for _, authority := range []string{"payments.aether.internal", "orders.aether.internal"} {
			got := m.call(c, authority, forge)
			if got.status != http.StatusOK {
				t.Errorf("%s: got %d %s", authority, got.status, got.body)
				continue
			}
			for _, name := range []string{
				"X-Portolan-Sni", "X-Portolan-Not-Delivered", "X-Envoy-Retry-On", "X-Envoy-Max-Retries", "X-Envoy-Upstream-Rq-Timeout-Ms",
				"X-Envoy-Upstream-Alt-Stat-Name", "X-Envoy-Retriable-Header-Names", "X-Envoy-Internal", "X-Envoy-Expected-Rq-Timeout-Ms", "X-Envoy-Attempt-Count",
			} {
				if values := got.seen.Header.Values(name); len(values) > 0 {
					t.Errorf("%s: the application sees %s: %q", authority, name, values)
				}
			}
			if xfcc := got.seen.Header.Values("X-Forwarded-Client-Cert"); len(xfcc) != 1 || !hasURI(xfcc[0], "spiffe://td.test/ns/default/sa/client") {
				t.Errorf("%s: x-forwarded-client-cert is %q", authority, xfcc)
			}
			for name, want := range map[string]string{"X-Request-Id": "mine", "X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"} {
				if values := got.seen.Header.Values(name); len(values) != 1 || values[0] != want {
					t.Errorf("%s: the application sees %s: %q, want %q", authority, name, values, want)
				}
			}
			if got.header.Get(resource.NotDeliveredHeader) != "" || got.header.Get("Server") != "app" {
				t.Errorf("%s: the client sees %v", authority, got.header)
			}
		}
	}
	// A peer of the mesh that is no Envoy lies to the inbound listener itself: about who
	// it is, and about the SNI where it sent none.
	f := m.foreigner("stranger")
	for _, pod := range []*meshPod{single, multi} {
		got, err := f.send(t.Context(), pod, "GET / HTTP/1.1\r\nHost: x\r\nX-Portolan-Sni: 9090\r\nX-Forwarded-Client-Cert: URI=spiffe://td.test/ns/default/sa/root\r\nConnection: close\r\n\r\n", "")
		xfcc := got.seen.Header.Values("X-Forwarded-Client-Cert")
		if err != nil || got.seen.Server != "8080" || len(xfcc) != 1 || strings.Contains(xfcc[0], "root") || !hasURI(xfcc[0], "spiffe://td.test/ns/default/sa/stranger") {
			t.Errorf("pod %s: got %d, %v, %q", pod.spec.ID, got.status, err, xfcc)
		}
	}
	// The mark of an application does not even leave its own pod.
	if got, header := f.get(t.Context(), single, "x", "8080", "http/1.1"); got != "8080" || header.Get(resource.NotDeliveredHeader) != "" {
		t.Errorf("got %q with %v", got, header)
	}
	if retries := m.envoy.Stats(`upstream_rq_retry$`); sum(retries) != 0 {
		t.Errorf("the mesh retried: %v", retries)
	}
}

func hasURI(xfcc, uri string) bool {
	return xfcc != "" && xfcc[len(xfcc)-len(";URI="+uri):] == ";URI="+uri
}

func sum(m map[string]int64) (n int64) {
	for _, v := range m {
		n += v
	}
	return n
}

// A connection that landed on the chain for unserved ports does not stay there: the
// request after the port was added reaches it, with the same client. HTTP/2 peers
// are told to go after each answer.
func TestWireUnknownNotSticky(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pod := m.addPod("multi", "payments", "8080 9090=h2")
	for _, n := range []string{"8080", "9090", "9091"} {
		pod.ServeHTTP(t, "127.0.0.1:"+n, wiretest.Echo(n))
	}
	m.setService(service{name: "payments", ports: "8080 9090=h2 9091=h2"})
	m.setEndpoints("payments.aether.internal:9091", pod)
	m.xds.Sync()
	c := client.h2c(t)
	for range 5 {
		if got := m.call(c, "payments.aether.internal:9091"); got.status != http.StatusServiceUnavailable {
			t.Fatalf("unserved: got %d from %q", got.status, got.seen.Server)
		}
	}
	pod.spec.Ports = ports(t, "8080 9090=h2 9091=h2")
	m.setPod(pod)
	m.xds.Sync()
	for range 5 {
		if got := m.call(c, "payments.aether.internal:9091"); got.status != http.StatusOK || got.seen.Server != "9091" {
			t.Errorf("served: got %d from %q", got.status, got.seen.Server)
		}
	}
	if n := m.envoy.Stat("listener_manager.listener_in_place_updated"); n != 1 {
		t.Errorf("%d in-place updates", n)
	}
}
