package resource_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// A caller's load assignment is stale in every way it can be: the pod does not
// serve the port any more, or its address now belongs to another service, with
// another account or the same one, of one port or many. No request ever reaches a
// wrong port or service; with a right endpoint beside the stale one every request
// succeeds, POSTs with bodies too, because what was not delivered is sent elsewhere
// (I1, contract 5, MESH-1, MESH-32). Without one it fails cleanly.
func TestWireStaleEndpoint(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	right := m.addPod("right", "payments", "8080 9090=h2")
	right.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("right 8080"))
	right.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("right 9090"))
	// Every stale pod has something on every port, so that a request that goes astray
	// is answered, and the test sees by whom.
	stale := func(p *meshPod) *meshPod {
		for _, n := range []string{"8080", "9090", "5432", "7070"} {
			p.ServeHTTP(t, "127.0.0.1:"+n, wiretest.Echo(p.spec.ID+" "+n))
		}
		return p
	}
	gone := &meshPod{Pod: m.lab.AddPod()} // the pod died, the address answers with a reset
	dead := m.addPod("dead", "payments", "8080 9090=h2")
	pods := []*meshPod{
		stale(m.addPod("lost-9090-single", "payments", "8080")),
		stale(m.addPod("lost-9090-multi", "payments", "8080 7070")),
		stale(m.addPod("lost-8080-single", "payments", "9090=h2")),
		stale(m.addPod("lost-8080-multi", "payments", "9090=h2 7070")),
		stale(m.addPod("only-tcp", "payments", "5432=tcp")),
		stale(m.addPod("other-account", "orders", "8080 9090=h2")),
		stale(m.addPod("other-account-single", "orders", "8080")),
		stale(m.addPodAs("same-account", "orders", "payments", "8080 9090=h2")),
		stale(m.addPodAs("same-account-single", "orders", "payments", "8080")),
		stale(m.addPodAs("same-account-h2", "orders", "payments", "9090=h2")),
		gone, dead,
	}
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	clients := map[string]*http.Client{"HTTP/1.1": client.http1(t), "h2c": client.h2c(t)}
	post := func(r *http.Request) {
		r.Method = http.MethodPost
		r.Body = io.NopCloser(io.LimitReader(zeros{}, 100_000))
	}
	for _, p := range pods {
		name := p.spec.ID
		if p == gone {
			name = "gone"
		}
		t.Run(name, func(t *testing.T) {
			m := m.in(t)
			for _, port := range []string{"8080", "9090"} {
				cluster := "payments.aether.internal"
				if port != "8080" {
					cluster += ":" + port
				}
				m.setEndpoints(cluster, right, p)
				m.xds.Sync()
				for version, c := range clients {
					for i := range 12 {
						var edits []func(*http.Request)
						if i%2 == 1 {
							edits = append(edits, post)
						}
						got := m.call(c, "payments.aether.internal:"+port, edits...)
						served := got.seen.Server == "right "+port
						if name == "lost-9090-single" && port == "8080" || name == "lost-9090-multi" && port == "8080" ||
							name == "lost-8080-single" && port == "9090" || name == "lost-8080-multi" && port == "9090" {
							served = served || got.seen.Server == name+" "+port
						}
						if got.status != http.StatusOK || !served {
							t.Errorf("port %s over %s: got %d from %q", port, version, got.status, got.seen.Server)
						}
						if i%2 == 1 && got.seen.Bytes != 100_000 {
							t.Errorf("port %s over %s: the application got %d bytes", port, version, got.seen.Bytes)
						}
					}
				}
				m.setEndpoints(cluster, p)
				m.xds.Sync()
				got := m.call(clients["h2c"], "payments.aether.internal:"+port)
				if ok := got.status == 200 && got.seen.Server == name+" "+port && p.spec.Service.Name == "payments"; !ok && got.status != 503 && got.status != 421 {
					t.Errorf("port %s, only the stale one: got %d from %q", port, got.status, got.seen.Server)
				}
				if got.header.Get(resource.NotDeliveredHeader) != "" {
					t.Errorf("port %s: the client sees the mesh's mark", port)
				}
			}
		})
	}
	if n := sum(m.envoy.Stats(`upstream_rq_retry_overflow$`)); n != 0 {
		t.Errorf("%d retries were dropped", n)
	}
}

// A retry goes to a host that was not tried, also when the dead one has most of the
// weight and the balancer would pick it again (MESH-32).
func TestWireRetryElsewhere(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	right := m.addPod("right", "payments", "8080")
	right.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("right"))
	down := m.addPod("down", "payments", "8080") // its application does not listen
	m.setService(service{name: "payments", ports: "8080"})
	heavy := down.endpoint()
	heavy.Weight = 6
	got := m.assign(client.http1(t), 40, right.endpoint(), heavy)
	if got["right"] != 40 {
		t.Errorf("got %v", got)
	}
}

// zeros is an endless body.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// The same for tcp ports: never a byte from a wrong port or service. What cannot be
// connected to is passed over; what refuses after the handshake is closed.
func TestWireStaleTCP(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	vip := netip.MustParseAddr("198.18.0.10")
	greet := func(p *meshPod) *meshPod {
		for _, n := range []string{"5432", "8080"} {
			p.ServeTCP(t, "127.0.0.1:"+n, func(c *net.TCPConn) { _, _ = fmt.Fprintf(c, "%s %s\n", p.spec.ID, n) })
		}
		return p
	}
	right := greet(m.addPod("right", "db", "5432=tcp"))
	otherAccount := greet(m.addPod("other-account", "db2", "5432=tcp"))
	gone := &meshPod{Pod: m.lab.AddPod()}
	closed := []*meshPod{
		greet(m.addPodAs("same-account", "db2", "db", "5432=tcp")),
		greet(m.addPodAs("other-namespace-name", "db3", "db", "5432=tcp 8080")),
		greet(m.addPod("lost-5432", "db", "8080=tcp")),
		greet(m.addPod("only-http", "db", "8080")),
	}
	m.setService(service{name: "db", ports: "5432=tcp", vip: vip})
	m.lab.RedirectTCP(client.Pod, vipRanges, netip.AddrPortFrom(vip, 5432))
	const cluster = "198.18.0.10:5432"
	for _, p := range append(closed, otherAccount, gone) {
		m.setEndpoints(cluster, right, p)
		m.xds.Sync()
		for range 8 {
			if got := m.greeting(client, cluster); got != "right 5432\n" {
				t.Errorf("beside %s: got %q", p.spec.ID, got)
			}
		}
	}
	for _, p := range append(closed, otherAccount, gone) {
		m.setEndpoints(cluster, p)
		m.xds.Sync()
		if got := m.greeting(client, cluster); got != "" {
			t.Errorf("only %s: got %q, want a closed connection", p.spec.ID, got)
		}
	}
}

// greeting returns what a server sends first.
func (m *mesh) greeting(p *meshPod, address string) string {
	m.Helper()
	c, err := p.DialContext(m.Context(), "tcp", address)
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	data, err := io.ReadAll(c)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		m.Errorf("%s is neither served nor closed", address)
	}
	return string(data)
}

// A request that the application had in its hands is never sent again, whatever its
// method: a connection that dies before the response, a 503 or a 421 of the
// application are the caller's answer.
func TestWireNoSecondDelivery(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	var hits atomic.Int64
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		switch r.URL.Path {
		case "/die":
			panic(http.ErrAbortHandler)
		case "/503":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/421":
			w.Header().Set(resource.NotDeliveredHeader, "1")
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	})
	var pods []*meshPod
	for i := range 3 {
		p := m.addPod(fmt.Sprint("p", i), "payments", "8080 9090=h2")
		p.ServeHTTP(t, "127.0.0.1:8080", handler)
		p.ServeHTTP(t, "127.0.0.1:9090", handler)
		pods = append(pods, p)
	}
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	m.setEndpoints("payments.aether.internal", pods...)
	m.setEndpoints("payments.aether.internal:9090", pods...)
	m.xds.Sync()
	c := client.http1(t)
	for _, port := range []string{"8080", "9090"} {
		for path, want := range map[string]int{"/die": 503, "/503": 503, "/421": 421} {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				hits.Store(0)
				got := m.call(c, "payments.aether.internal:"+port, func(r *http.Request) { r.Method, r.URL.Path = method, path })
				// An HTTP/2 stream that the application resets is a 502 in Envoy's words.
				if got.status != want && (path != "/die" || got.status != 502) {
					t.Errorf("%s %s on %s: got %d, want %d", method, path, port, got.status, want)
				}
				if n := hits.Load(); n != 1 {
					t.Errorf("%s %s on %s: delivered %d times", method, path, port, n)
				}
			}
		}
	}
}

// The application is down while its pod's listener is up: nothing was delivered, so
// the other pod answers all requests; and the service alone fails cleanly.
func TestWireApplicationDown(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	up, down := m.addPod("up", "payments", "8080"), m.addPod("down", "payments", "8080")
	up.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("up"))
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments.aether.internal", up, down)
	m.xds.Sync()
	c := client.http1(t)
	for range 50 {
		if got := m.call(c, "payments.aether.internal", func(r *http.Request) { r.Method = http.MethodPost }); got.seen.Server != "up" {
			t.Errorf("got %d from %q", got.status, got.seen.Server)
		}
	}
	m.setEndpoints("payments.aether.internal", down)
	m.xds.Sync()
	if got := m.call(c, "payments.aether.internal"); got.status != http.StatusServiceUnavailable {
		t.Errorf("alone: got %d", got.status)
	}
}
