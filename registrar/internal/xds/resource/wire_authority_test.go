package resource_test

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// payments is the service of contract 2's table, with one pod, and a client.
func payments(t *testing.T) (m *mesh, client *meshPod) {
	t.Helper()
	m = newMesh(t)
	client = m.addPod("client", "client", "")
	pod := m.addPod("payments-1", "payments", "8080 9090=h2 5432=tcp")
	pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	pod.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	m.setService(service{name: "payments", ports: "8080 9090=h2 5432=tcp", vip: vipRanges[0].Addr().Next()})
	m.setEndpoints("payments.aether.internal", pod)
	m.setEndpoints("payments.aether.internal:9090", pod)
	m.xds.Sync()
	return m, client
}

// raw sends bytes to the pod's outbound HTTP listener and reads one response; the
// status is 0 when the connection is closed instead.
func (m *mesh) raw(p *meshPod, request string) answer {
	m.Helper()
	c, err := p.DialContext(m.Context(), "tcp", "127.0.0.1:15001")
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, request); err != nil {
		m.Fatal(err)
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return answer{body: err.Error()}
	}
	defer func() { _ = response.Body.Close() }()
	a, err := read(response)
	if err != nil {
		m.Fatal(err)
	}
	return a
}

// Contract 2's table, over HTTP/1.1 and h2c, cold and warm: every authority reaches
// its port or fails at once, twice in the same way (XDS-17, XDS-62..XDS-67, XDS-70,
// XDS-71, MESH-4).
func TestWireAuthority(t *testing.T) {
	m, client := payments(t)
	tests := []struct {
		name   string
		want   int
		server string // the echo server that answers
		only1  bool   // Go's HTTP/2 client cannot send it
	}{
		{name: "payments.aether.internal", want: 200, server: "8080"},
		{name: "payments.aether.internal:8080", want: 200, server: "8080"},
		{name: "payments.aether.internal:9090", want: 200, server: "9090"},
		{name: "payments.default.aether.internal", want: 200, server: "8080"},
		{name: "payments.default.aether.internal:8080", want: 200, server: "8080"},
		{name: "payments.default.aether.internal:9090", want: 200, server: "9090"},
		{name: "PAYMENTS.aether.internal", want: 200, server: "8080"},
		{name: "Payments.Aether.Internal:9090", want: 200, server: "9090"},
		{name: "payments.aether.internal.", want: 200, server: "8080"},
		{name: "payments.aether.internal.:9090", want: 200, server: "9090"},
		{name: "payments.aether.internal:5432", want: 503},
		{name: "payments.aether.internal:7777", want: 503},
		{name: "payments.default.aether.internal:7777", want: 503},
		{name: "PAYMENTS.aether.internal:65535", want: 503},
		{name: "ghost.aether.internal", want: 503},
		{name: "ghost.aether.internal:9090", want: 503},
		{name: "ghost.aether.internal.", want: 503},
		{name: "payments.other.aether.internal", want: 503},
		{name: "evil.com", want: 404},
		{name: "evil.com:9090", want: 404},
		{name: "payments.aether.internal:0", want: 404},
		{name: "payments.aether.internal:08080", want: 404},
		{name: "payments.aether.internal:65536", want: 404},
		{name: "payments.aether.internal:", want: 404},
		{name: "payments.aether.internal:80a", want: 404},
		{name: "payments.aether.internal:1:2", want: 404},
		{name: "ghost.aether.internal:0", want: 404},
		{name: "ghost.aether.internal:65536", want: 404},
		{name: "a_b.aether.internal", want: 404},
		{name: "-a.aether.internal", want: 404},
		{name: "pod-0.payments.default.aether.internal", want: 404},
		{name: "aether.internal", want: 404},
		{name: "payments.aether.internal.evil.com", want: 404},
		{name: "10.1.2.3:9090", want: 404},
		{name: "[::1]:9090", want: 404},
		{name: "user@payments.aether.internal", want: 404, only1: true},
		{name: "*", want: 404},
		{name: "payments.aether.internal,payments.aether.internal", want: 404, only1: true},
		{name: "xds", want: 404},
		{name: "xds|registrar", want: 400, only1: true},
		{name: "app|payments-1|8080", want: 400, only1: true},
	}
	h2c := client.h2c(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := m.in(t)
			for _, round := range []string{"first", "second"} {
				got := m.raw(client, "GET / HTTP/1.1\r\nHost: "+tt.name+"\r\n\r\n")
				if got.status != tt.want || got.seen.Server != tt.server {
					t.Errorf("%s HTTP/1.1 request: got %d from %q, want %d from %q", round, got.status, got.seen.Server, tt.want, tt.server)
				}
				if tt.only1 {
					continue
				}
				got = m.call(h2c, tt.name)
				if got.status != tt.want || got.seen.Server != tt.server {
					t.Errorf("%s h2c request: got %d from %q, want %d from %q", round, got.status, got.seen.Server, tt.want, tt.server)
				}
			}
		})
	}
	m.unwaited()
	for name, n := range m.xds.Asked() {
		switch {
		case n != 1:
			t.Errorf("%s was asked for %d times", name, n)
		case !strings.HasSuffix(name, domain) && name != "payments.aether.internal:9090" && !strings.HasPrefix(name, "ghost."):
			t.Errorf("%s was asked for: it is no authority of the mesh", name)
		case name == "payments.aether.internal:8080":
			t.Errorf("%s exists beside the portless cluster (I2)", name)
		}
	}
}

// The same through capture, as an application does it: it dials the VIP and the port
// it means, in either family. The authority decides, not the address that was dialled.
func TestWireCaptured(t *testing.T) {
	m, client := payments(t)
	m.lab.RedirectTCP(client.Pod, vipRanges)
	for _, tt := range []struct {
		dial, authority string
		want            int
		server          string
	}{
		{"198.18.0.10:80", "payments.aether.internal", 200, "8080"},
		{"198.18.0.10:8080", "payments.aether.internal:8080", 200, "8080"},
		{"198.18.0.10:9090", "payments.aether.internal:9090", 200, "9090"},
		{"[fd70:6f72:746f::a]:9090", "payments.aether.internal:9090", 200, "9090"},
		{"198.18.0.10:7777", "payments.aether.internal:7777", 503, ""},
		{"198.18.0.10:80", "ghost.aether.internal", 503, ""},
		{"198.18.0.10:80", "evil.com", 404, ""},
		{"198.19.255.254:1", "payments.aether.internal:9090", 200, "9090"},
	} {
		for name, c := range map[string]*http.Client{"HTTP/1.1": client.Client(t, tt.dial, false), "h2c": client.Client(t, tt.dial, true)} {
			if got := m.call(c, tt.authority); got.status != tt.want || got.seen.Server != tt.server {
				t.Errorf("%s to %s over %s: got %d from %q, want %d from %q", tt.authority, tt.dial, name, got.status, got.seen.Server, tt.want, tt.server)
			}
		}
	}
}

// Odd requests: no host at all, two hosts, absolute form, OPTIONS *, CONNECT, and
// bytes that are no HTTP at all, which get no HTTP back (XDS-67, XDS-68, contract 2).
func TestWireOddRequests(t *testing.T) {
	m, client := payments(t)
	const host = "Host: payments.aether.internal\r\n"
	for _, tt := range []struct {
		name, request string
		want          int
		server        string
	}{
		{name: "no host", request: "GET / HTTP/1.1\r\n\r\n", want: 400},
		{name: "empty host", request: "GET / HTTP/1.1\r\nHost:\r\n\r\n", want: 404},
		{name: "no host in HTTP/1.0", request: "GET / HTTP/1.0\r\n\r\n", want: 400},
		{name: "HTTP/1.0", request: "GET / HTTP/1.0\r\n" + host + "\r\n", want: 200, server: "8080"},
		{name: "two hosts", request: "GET / HTTP/1.1\r\n" + host + "Host: evil.com\r\n\r\n", want: 404},
		{name: "blank in host", request: "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", want: 400},
		{name: "slash in host", request: "GET / HTTP/1.1\r\nHost: payments.aether.internal/x\r\n\r\n", want: 400},
		{name: "UTF-8 in host", request: "GET / HTTP/1.1\r\nHost: m\u00fcnchen.aether.internal\r\n\r\n", want: 400},
		{name: "absolute form wins over host", request: "GET http://payments.aether.internal:9090/ HTTP/1.1\r\nHost: evil.com\r\n\r\n", want: 200, server: "9090"},
		{name: "absolute form of a stranger", request: "GET http://evil.com/ HTTP/1.1\r\n" + host + "\r\n", want: 404},
		{name: "OPTIONS *", request: "OPTIONS * HTTP/1.1\r\n" + host + "\r\n", want: 404},
		{name: "CONNECT", request: "CONNECT payments.aether.internal:9090 HTTP/1.1\r\nHost: payments.aether.internal:9090\r\n\r\n", want: 404},
		{name: "a method of its own", request: "PURGE / HTTP/1.1\r\n" + host + "\r\n", want: 200, server: "8080"},
		{name: "an upgrade nobody meant", request: "GET / HTTP/1.1\r\n" + host + "Upgrade: TLS/1.2\r\nConnection: Upgrade\r\n\r\n", want: 200, server: "8080"},
		{name: "redis", request: "*1\r\n$4\r\nPING\r\n"},
		{name: "postgres", request: "\x00\x00\x00\x08\x04\xd2\x16\x2f"},
		{name: "TLS", request: "\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := m.in(t).raw(client, tt.request)
			if got.status != tt.want || got.seen.Server != tt.server {
				t.Errorf("got %d %q from %q, want %d from %q", got.status, got.body, got.seen.Server, tt.want, tt.server)
			}
		})
	}
}

// 100 concurrent cold requests in all spellings of the default port reach it, and
// make one cluster (I2, MESH-3).
func TestWireConcurrentCold(t *testing.T) {
	m, client := payments(t)
	spellings := []string{
		"payments.aether.internal", "payments.aether.internal:8080", "PAYMENTS.aether.internal:8080",
		"payments.default.aether.internal", "payments.default.aether.internal:8080", "payments.aether.internal.",
	}
	c := client.http1(t)
	results := make(chan string, 100)
	for i := range 100 {
		go func() {
			a, err := try(c, spellings[i%len(spellings)])
			if err != nil || a.status != 200 || a.seen.Server != "8080" {
				results <- spellings[i%len(spellings)] + ": " + http.StatusText(a.status) + " " + a.seen.Server
				return
			}
			results <- ""
		}()
	}
	for range 100 {
		if failed := <-results; failed != "" {
			t.Error(failed)
		}
	}
	if asked := m.xds.Asked(); len(asked) != 1 || asked["payments.aether.internal"] != 1 {
		t.Errorf("asked for %v, want payments.aether.internal once", asked)
	}
}

// At the cap the table itself answers unknown names 503, and asks nobody (I9).
func TestWireAtCap(t *testing.T) {
	m, client := payments(t)
	m.atCap = true
	m.setRoutes()
	m.xds.Sync()
	c := client.http1(t)
	for name, want := range map[string]int{
		"payments.aether.internal": 200, "ghost.aether.internal": 503, "ghost.aether.internal:1": 503, "ghost.aether.internal:0": 404, "evil.com": 404,
	} {
		if got := m.call(c, name); got.status != want {
			t.Errorf("%s: got %d, want %d", name, got.status, want)
		}
	}
	if asked := m.xds.Asked(); len(asked) != 1 {
		t.Errorf("asked for %v", asked)
	}
}

// A request for a cluster that Envoy does not have is refused when no registrar answers, be
// it away or silent, and the answer names the authority and the remedy; what Envoy has is
// not touched by it, nor is the answer to a name that leads nowhere.
func TestWireUnanswered(t *testing.T) {
	const name = "orders.aether.internal:9090"
	for what, silence := range map[string]func(*wiretest.XDS){
		"away":   func(x *wiretest.XDS) { x.Stop() },
		"silent": func(x *wiretest.XDS) { x.Unknown(nil); x.Withhold(name) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel() // it waits for Envoy's patience
			m, client := payments(t)
			clients := []*http.Client{client.http1(t), client.h2c(t)}
			for _, c := range clients {
				m.call(c, "payments.aether.internal")
				if got := m.call(c, "ghost.aether.internal"); got.status != 503 || strings.Contains(got.body, "registrar") {
					t.Errorf("a name that leads nowhere: %d %q", got.status, got.body)
				}
			}
			silence(m.xds)
			var asked sync.WaitGroup
			for _, c := range clients {
				asked.Go(func() {
					const want = name + ": Envoy does not know where it is, and this node's registrar does not answer: look whether it runs, and into its log\n"
					if got, err := try(c, name); err != nil || got.status != 503 || got.body != want {
						t.Errorf("unanswered: %d %q (%v)", got.status, got.body, err)
					}
				})
			}
			for _, c := range clients {
				if got := m.call(c, "payments.aether.internal"); got.status != 200 {
					t.Errorf("what Envoy has: %d", got.status)
				}
			}
			asked.Wait()
			if n := m.envoy.Stat("http.out_http.no_cluster"); n != int64(len(clients)) {
				t.Errorf("Envoy gave up %d requests, want %d", n, len(clients))
			}
		})
	}
}
