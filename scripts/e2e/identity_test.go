package e2e

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// meshRequest is one way in which pods call payments over HTTP.
type meshRequest struct {
	name, url string
	flags     []string
}

// meshRequests are all of them.
func meshRequests() []meshRequest {
	return []meshRequest{
		{"HTTP/1.1 to 8080", "http://payments.aether.internal/", nil},
		{"HTTP/2 to 8080", "http://payments.aether.internal:8080/", []string{"-h2"}},
		{"HTTP/1.1 to 9090", "http://payments.aether.internal:9090/", nil},
		{"HTTP/2 to 9090", "http://payments.aether.internal:9090/", []string{"-h2"}},
	}
}

// callAtOnce makes all pods send so many requests in every way at the same time, and
// gives what came of each to check.
func callAtOnce(t *testing.T, pods []*node.Pod, requests int, check func(*node.Pod, meshRequest, answer.Tally)) {
	t.Helper()
	var mu sync.Mutex
	var group sync.WaitGroup
	for _, p := range pods {
		for _, r := range meshRequests() {
			group.Go(func() {
				args := append([]string{"-n", strconv.Itoa(requests), "-c", "3"}, r.flags...)
				tally, err := p.Get(t.Context(), append(args, r.url)...)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
					return
				}
				check(p, r, tally)
			})
		}
	}
	group.Wait()
}

// Two pods with an account each call one service at the same time, over connections
// that Envoy keeps and re-uses: what the service reads of the caller is always the
// caller's own, with one certificate for each (I8, MESH-45), and an identity that the
// caller claims by a header is not believed.
func TestIdentity(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	pods := []*node.Pod{addClient(t, n, "alice"), addClient(t, n, "bob")}
	waitHealthy(t, n, 8080, 1)
	waitHealthy(t, n, 9090, 1)
	const requests = 150
	seen := make(map[string]map[string]bool) // by pod: what payments read
	callAtOnce(t, pods, requests, func(p *node.Pod, r meshRequest, tally answer.Tally) {
		own := ";URI=spiffe://aether.internal/ns/default/sa/" + p.Spec.Name
		total := 0
		for caller, count := range tally.Callers {
			if !strings.HasSuffix(caller, own) || strings.Count(caller, "URI=") != 1 {
				t.Errorf("%s, %s: the caller was %d times %q", p.Spec.Name, r.name, count, caller)
			}
			if seen[p.Spec.Name] == nil {
				seen[p.Spec.Name] = make(map[string]bool)
			}
			seen[p.Spec.Name][caller] = true
			total += count
		}
		if total != requests {
			t.Errorf("%s, %s: %v, want %d answers that name the caller", p.Spec.Name, r.name, tally.Answers, requests)
		}
	})
	for name, callers := range seen {
		if len(callers) != 1 {
			t.Errorf("%s was seen with %d certificates: %v", name, len(callers), slices.Collect(maps.Keys(callers)))
		}
	}
	for _, p := range pods {
		got, err := p.Curl(t.Context(), "-H", "x-forwarded-client-cert: URI=spiffe://aether.internal/ns/default/sa/root", "http://payments.aether.internal/")
		if err != nil {
			t.Fatal(err)
		}
		if got.Status != 200 || !seen[p.Spec.Name][got.Echo.XFCC] {
			t.Errorf("%s with a forged header: %s, caller %q", p.Spec.Name, got, got.Echo.XFCC)
		}
		rpc, err := p.GRPC(t.Context(), "payments.aether.internal:9090")
		if err != nil || rpc.Code != "OK" || !seen[p.Spec.Name][rpc.XFCC] {
			t.Errorf("%s by gRPC: %+v (%v)", p.Spec.Name, rpc, err)
		}
	}
}

// callee stands for a pod of payments: it has the pod's certificate, and its answers
// name the account of the certificate and the port of the SNI that the caller's Envoy
// came with.
type callee struct {
	addr        netip.Addr
	connections atomic.Int64
}

// origin is what the connection says of the caller.
func (c *callee) origin(state tls.ConnectionState) answer.Origin {
	// 5432.payments.default for a tcp port.
	first, _, _ := strings.Cut(state.ServerName, ".")
	port, _ := strconv.ParseUint(first, 10, 16) // 0 is no port that a test wants
	if len(state.PeerCertificates) == 0 || len(state.PeerCertificates[0].URIs) != 1 {
		return answer.Origin{Pod: "nobody", Port: uint16(port)}
	}
	return answer.Origin{Pod: path.Base(state.PeerCertificates[0].URIs[0].Path), Port: uint16(port)}
}

// startCallee serves at the address's 15008 by serve until the test ends.
func startCallee(t *testing.T, addr string, alpn []string, serve func(*callee, net.Listener)) *callee {
	t.Helper()
	file := svidFile(t, "spiffe://aether.internal/ns/default/sa/payments")
	own, err := tls.LoadX509KeyPair(file, file)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	pem, err := os.ReadFile("/var/lib/portolan/ca/ca.pem")
	if err != nil || !roots.AppendCertsFromPEM(pem) {
		t.Fatalf("no roots in ca.pem (%v)", err)
	}
	c := &callee{addr: netip.MustParseAddr(addr)}
	listener, err := net.Listen("tcp", net.JoinHostPort(addr, "15008"))
	if err != nil {
		t.Fatal(err)
	}
	listener = tls.NewListener(&countingListener{listener, &c.connections}, &tls.Config{
		Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots, NextProtos: alpn, MinVersion: tls.VersionTLS13,
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(c, listener)
	}()
	t.Cleanup(func() {
		if err := listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		<-done
	})
	return c
}

// countingListener counts what it accepts.
type countingListener struct {
	net.Listener

	accepted *atomic.Int64
}

// Accept implements net.Listener.
func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.accepted.Add(1)
	}
	return conn, err
}

func (c *callee) serveHTTP(listener net.Listener) {
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(answer.Echo{Origin: c.origin(*r.TLS)}) // the client says what it misses
	})}
	_ = server.Serve(listener) // until the listener is closed
	_ = server.Close()
}

// serveTCP speaks podserver's protocol.
func (c *callee) serveTCP(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			secure, ok := conn.(*tls.Conn)
			if !ok || secure.Handshake() != nil {
				return
			}
			from := c.origin(secure.ConnectionState())
			if _, err := fmt.Fprintf(conn, "hello from %s port %d\n", from.Pod, from.Port); err != nil {
				return
			}
			if line, err := bufio.NewReader(conn).ReadString('\n'); err == nil {
				_, _ = io.WriteString(conn, line)
			}
		}()
	}
}

// The certificate on the mesh connection itself is the caller's own, over HTTP/1.1,
// HTTP/2 and raw TCP, while two accounts call at the same time and connections are
// re-used; and the SNI names the port (I7, I8).
func TestIdentityOnTheWire(t *testing.T) {
	n := startNode(t, node.Options{Relay: true})
	payments := addPod(t, n, multiPort("payments-1"))
	pods := []*node.Pod{addClient(t, n, "alice"), addClient(t, n, "bob")}
	for _, port := range []uint16{8080, 9090, 5432} {
		waitHealthy(t, n, port, 1)
	}
	v := newStaleView(t, n, pods[0], payments)
	web := startCallee(t, "127.0.0.1", []string{"h2", "http/1.1"}, (*callee).serveHTTP)
	database := startCallee(t, "127.0.0.2", nil, (*callee).serveTCP)
	for _, p := range v.ports {
		at := web.addr
		if p.tcp {
			at = database.addr
		}
		if err := n.Relay.Assign(t.Context(), p.cluster, at); err != nil {
			t.Fatal(err)
		}
	}

	var raw sync.WaitGroup
	for _, p := range pods {
		for range 2 {
			raw.Go(func() {
				for range 15 {
					got, err := p.TCP(t.Context(), "payments.aether.internal:5432")
					if want := fmt.Sprintf("hello from %s port 5432", p.Spec.Name); err != nil || got.Banner != want || got.Echo != "ping" {
						t.Errorf("%s over TCP: %+v (%v), want %q", p.Spec.Name, got, err, want)
					}
				}
			})
		}
	}
	const requests = 150
	sent := 0
	callAtOnce(t, pods, requests, func(p *node.Pod, r meshRequest, tally answer.Tally) {
		want := fmt.Sprintf("200 %s:8080", p.Spec.Name)
		if strings.HasSuffix(r.name, "9090") {
			want = fmt.Sprintf("200 %s:9090", p.Spec.Name)
		}
		if tally.Answers[want] != requests {
			t.Errorf("%s, %s: the callee saw %v, want %d x %s", p.Spec.Name, r.name, tally.Answers, requests, want)
		}
		sent += tally.Requests
	})
	raw.Wait()
	if connections := web.connections.Load(); connections > int64(sent/4) {
		t.Errorf("%d connections for %d requests: they are not re-used, which proves little", connections, sent)
	}
}
