package resource_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// Two pods with two accounts call one service through one Envoy, over HTTP/1.1,
// h2c and TCP, in turns and at once. The server always sees the caller's own
// identity: no connection is shared between identities (I8, MESH-45). The cluster
// is the same for both (MESH-16): it was asked for once.
func TestWireIdentity(t *testing.T) {
	m := newMesh(t)
	server := m.addPod("server", "payments", "8080 9090=h2")
	server.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	server.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	m.setEndpoints("payments.aether.internal", server)
	m.setEndpoints("payments.aether.internal:9090", server)
	type caller struct {
		pod     *meshPod
		clients []*http.Client
	}
	var callers []caller
	for _, account := range []string{"alice", "bob"} {
		p := m.addPod(account, account, "")
		callers = append(callers, caller{p, []*http.Client{p.http1(t), p.h2c(t)}})
	}
	check := func(c caller, client *http.Client, port string) {
		got, err := try(client, "payments.aether.internal:"+port)
		want := c.pod.spec.Identity.SPIFFE()
		if xfcc := got.seen.Header.Get("X-Forwarded-Client-Cert"); err != nil || got.status != 200 || !hasURI(xfcc, want) {
			t.Errorf("%s on %s: got %d, %v, %q", want, port, got.status, err, xfcc)
		}
	}
	for range 30 {
		for _, port := range []string{"8080", "9090"} {
			for i := range 2 {
				for _, c := range callers {
					check(c, c.clients[i], port)
				}
			}
		}
	}
	var wg sync.WaitGroup
	for _, c := range callers {
		for i := range 2 {
			for _, port := range []string{"8080", "9090"} {
				wg.Go(func() {
					for range 100 {
						check(c, c.clients[i], port)
					}
				})
			}
		}
	}
	wg.Wait()
	for name, n := range m.xds.Asked() {
		if n != 1 {
			t.Errorf("%s was asked for %d times", name, n)
		}
	}
}

// The same for a tcp port, where no header says who called: an own TLS server
// stands in for the pod and notes the client's certificate.
func TestWireIdentityTCP(t *testing.T) {
	m := newMesh(t)
	vip := netip.MustParseAddrPort("198.18.0.10:5432")
	server := &meshPod{Pod: m.lab.AddPod()}
	conf := m.ca.Client("spiffe://" + trustDomain + "/ns/default/sa/db")
	conf.ClientAuth, conf.ClientCAs = tls.RequireAndVerifyClientCert, m.ca.Pool
	server.ServeTCP(t, netip.AddrPortFrom(server.Addr, resource.InboundPort).String(), func(c *net.TCPConn) {
		tc := tls.Server(c, conf)
		if err := tc.HandshakeContext(t.Context()); err != nil {
			return
		}
		state := tc.ConnectionState()
		_, _ = fmt.Fprintf(tc, "%s %s %s resumed=%v", state.PeerCertificates[0].URIs[0], state.ServerName, state.NegotiatedProtocol, state.DidResume)
		_ = tc.Close()
	})
	m.setService(service{name: "db", ports: "5432=tcp", vip: vip.Addr()})
	m.setEndpoints(vip.String(), server)
	var pods []*meshPod
	for _, account := range []string{"alice", "bob"} {
		p := m.addPod(account, account, "")
		m.lab.RedirectTCP(p.Pod, vipRanges, vip)
		pods = append(pods, p)
	}
	m.xds.Sync()
	for range 10 {
		for _, p := range pods {
			want := p.spec.Identity.SPIFFE() + " 5432.db.default  resumed=false"
			if got := m.greeting(p, vip.String()); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
	}
}

// What the mesh hop looks like from a server that is not Envoy: TLS 1.3, the
// caller's certificate, the port as SNI, never resumed, and the protocol of the
// pool by ALPN: http/1.1 for an HTTP/1.1 client of an http port, h2 for an h2c client
// and for every client of an h2 port (I7, dataplane decision 7).
func TestWireUpstreamTLS(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("alice", "alice", "")
	server := &meshPod{Pod: m.lab.AddPod()}
	conf := m.ca.Client("spiffe://" + trustDomain + "/ns/default/sa/payments")
	conf.ClientAuth, conf.ClientCAs, conf.NextProtos = tls.RequireAndVerifyClientCert, m.ca.Pool, []string{"h2", "http/1.1"}
	inner := server.Listen(t, netip.AddrPortFrom(server.Addr, resource.InboundPort).String())
	s := &http.Server{TLSConfig: conf, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "%s %s %s %x resumed=%v", r.TLS.PeerCertificates[0].URIs[0], r.TLS.ServerName, r.TLS.NegotiatedProtocol, r.TLS.Version, r.TLS.DidResume)
	})}
	go func() { _ = s.ServeTLS(inner, "", "") }()
	t.Cleanup(func() { _ = s.Close() })
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	m.setEndpoints("payments.aether.internal", server)
	m.setEndpoints("payments.aether.internal:9090", server)
	m.xds.Sync()
	for _, tt := range []struct {
		client *http.Client
		port   string
		want   string
	}{
		{client.http1(t), "8080", "8080 http/1.1"},
		{client.h2c(t), "8080", "8080 h2"},
		{client.http1(t), "9090", "9090 h2"},
		{client.h2c(t), "9090", "9090 h2"},
	} {
		got := m.call(tt.client, "payments.aether.internal:"+tt.port)
		if want := "spiffe://td.test/ns/default/sa/alice " + tt.want + " 304 resumed=false"; got.body != want {
			t.Errorf("port %s: got %d %q, want %q", tt.port, got.status, got.body, want)
		}
	}
}

// A server with another identity is not called, even if its certificate is good: the
// identities are pinned exactly, not by prefix (MESH-27). A service may have several.
func TestWireServerIdentity(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	for _, account := range []string{"payments", "payments-v2", "payments-v3"} {
		m.addPodAs(account, "payments", account, "8080").ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo(account))
	}
	pods := map[string]*meshPod{}
	for i, account := range []string{"payments", "payments-v2", "payments-v3"} {
		pods[account] = &meshPod{Pod: &wiretest.Pod{Addr: netip.AddrFrom4([4]byte{10, 77, 0, byte(11 + i)})}}
	}
	const prefix = "spiffe://" + trustDomain + "/ns/default/sa/"
	m.setService(service{name: "payments", ports: "8080", identities: []string{prefix + "payments", prefix + "payments-v2"}})
	c := client.http1(t)
	for account, want := range map[string]int{"payments": 200, "payments-v2": 200, "payments-v3": 503} {
		m.setEndpoints("payments.aether.internal", pods[account])
		m.xds.Sync()
		if got := m.call(c, "payments.aether.internal"); got.status != want || want == 200 && got.seen.Server != account {
			t.Errorf("%s: got %d from %q, want %d", account, got.status, got.seen.Server, want)
		}
	}
}

// A pod whose certificate is not there yet fails at once, and works as soon as it
// is: nothing waits for a restart or a timer, and no other identity is used instead
// (MESH-25, MESH-46). Its listeners are there all the same.
func TestWireNoCertificateYet(t *testing.T) {
	m := newMesh(t)
	server := m.addPod("server", "payments", "8080")
	server.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments.aether.internal", server)
	first := m.addPod("first", "first", "")
	if got := m.call(first.http1(t), "payments.aether.internal"); got.status != 200 {
		t.Fatalf("another pod: got %d", got.status)
	}
	late := &meshPod{Pod: m.lab.AddPod()}
	late.spec = podSpec(t, "late", "late", "late", "")
	late.spec.Netns = late.Path
	for _, r := range podResources(t, late.spec) {
		m.xds.Set(r)
	}
	m.xds.Sync()
	c := late.http1(t)
	// Refused by Envoy itself: no attempt ran into a timeout, nothing was waited for.
	if got := m.call(c, "payments.aether.internal"); got.status != http.StatusServiceUnavailable || !strings.HasSuffix(got.body, "local connection failure") {
		t.Errorf("without a certificate: got %d %q, %v", got.status, got.body, got.seen.Header)
	}
	m.setPod(late)
	m.xds.Sync()
	wiretest.Eventually(t, "the pod has its certificate", func() bool {
		got, err := try(c, "payments.aether.internal")
		return err == nil && got.status == 200 && hasURI(got.seen.Header.Get("X-Forwarded-Client-Cert"), late.spec.Identity.SPIFFE())
	})
}

// Certificates are rotated under load, of callers and of servers, over both
// protocols: not one request fails, and a stream that runs meanwhile is not cut.
func TestWireRotation(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	server := m.addPod("server", "payments", "8080 9090=h2")
	stream := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/stream" {
			wiretest.Echo("app").ServeHTTP(w, r)
			return
		}
		// The client's end of the request ends the stream.
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "whole")
	})
	server.ServeHTTP(t, "127.0.0.1:8080", stream)
	server.ServeHTTP(t, "127.0.0.1:9090", stream)
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	m.setEndpoints("payments.aether.internal", server)
	m.setEndpoints("payments.aether.internal:9090", server)
	m.xds.Sync()

	release := make(chan struct{})
	var running, wg sync.WaitGroup
	for _, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		running.Add(1)
		wg.Go(func() {
			reader, writer := io.Pipe()
			go func() { <-release; _ = writer.Close() }()
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://payments.aether.internal/stream", reader)
			if err != nil {
				t.Error(err)
			}
			response, err := c.Do(request)
			running.Done()
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = response.Body.Close() }()
			if got, err := read(response); err != nil || got.body != "whole" {
				t.Errorf("stream: %q, %v", got.body, err)
			}
		})
	}
	running.Wait()
	stop := make(chan struct{})
	for _, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		for _, port := range []string{"8080", "9090"} {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if got, err := try(c, "payments.aether.internal:"+port); err != nil || got.status != 200 {
						t.Errorf("port %s: got %d, %v", port, got.status, err)
						return
					}
				}
			})
		}
	}
	for range 20 {
		m.setPod(client)
		m.setPod(server)
		m.xds.Sync()
	}
	close(stop)
	close(release)
	wg.Wait()
}
