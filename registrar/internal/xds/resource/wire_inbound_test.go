package resource_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// foreigner is an mTLS client that is not Envoy, with a certificate of the mesh.
type foreigner struct {
	pod  *wiretest.Pod
	conf *tls.Config
}

func (m *mesh) foreigner(name string) foreigner {
	return foreigner{pod: m.lab.AddPod(), conf: m.ca.Client("spiffe://" + trustDomain + "/ns/default/sa/" + name)}
}

// dial opens mTLS to the pod's inbound listener; empty sni sends none. The error is
// what a caller sees who writes and reads.
func (f foreigner) dial(ctx context.Context, to *meshPod, sni string, alpn ...string) (*tls.Conn, error) {
	c, err := f.pod.DialContext(ctx, "tcp", netip.AddrPortFrom(to.Addr, resource.InboundPort).String())
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	conf := f.conf.Clone()
	conf.ServerName, conf.NextProtos = sni, alpn
	tc := tls.Client(c, conf)
	if err := tc.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return tc, nil
}

// get sends one HTTP/1.1 request over a new connection. The outcome is the server
// that answered, or the status, or "closed".
func (f foreigner) get(ctx context.Context, to *meshPod, authority, sni string, alpn ...string) (string, http.Header) {
	a, err := f.send(ctx, to, "GET / HTTP/1.1\r\nHost: "+authority+"\r\nx-portolan-sni: 8080\r\n\r\n", sni, alpn...)
	switch {
	case err != nil:
		return "closed", nil
	case a.status == http.StatusOK:
		return a.seen.Server, a.header
	}
	return http.StatusText(a.status), a.header
}

// send sends bytes over a new connection and reads one HTTP/1.1 response.
func (f foreigner) send(ctx context.Context, to *meshPod, request, sni string, alpn ...string) (answer, error) {
	c, err := f.dial(ctx, to, sni, alpn...)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, request); err != nil {
		return answer{}, err
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	return read(response)
}

const (
	unavailable = "Service Unavailable"
	misdirected = "Misdirected Request"
)

// The SNI selects the port and nothing else does: served names, no name, and every
// wrong name, with and without ALPN, on the three kinds of pod (I1, T1, XDS-25,
// XDS-D11, MESH-1, MESH-10).
func TestWireServerName(t *testing.T) {
	m := newMesh(t)
	multi := m.addPod("multi", "payments", "8080 9090 5432=tcp")
	single := m.addPod("single", "payments", "8080")
	tcp := m.addPod("tcp", "db", "5432=tcp")
	for _, pod := range []*meshPod{multi, single} {
		pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
		pod.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	}
	for _, pod := range []*meshPod{multi, tcp} {
		pod.ServeHTTP(t, "127.0.0.1:5432", wiretest.Echo("5432"))
	}
	f := m.foreigner("stranger")
	const own = "payments.aether.internal"
	h1 := []string{"http/1.1"}
	for _, tt := range []struct {
		sni                 string
		alpn                []string
		multi, single, tcp_ string
	}{
		{sni: "8080", alpn: h1, multi: "8080", single: "8080", tcp_: unavailable},
		{sni: "8080", multi: "8080", single: "8080", tcp_: "closed"},
		{sni: "p-8080", alpn: h1, multi: "8080", single: "8080", tcp_: unavailable},
		{sni: "9090", alpn: h1, multi: "9090", single: misdirected, tcp_: unavailable},
		{sni: "9090", multi: "9090", single: "closed", tcp_: "closed"},
		{sni: "p-9090", multi: "9090", single: "closed", tcp_: "closed"},
		{sni: "5432", multi: "5432", single: "closed", tcp_: "5432"},
		{sni: "5432", alpn: h1, multi: "5432", single: misdirected, tcp_: "5432"},
		{sni: "p-5432", multi: "5432", single: "closed", tcp_: "5432"},
		{sni: "5432.payments.default", multi: "5432", single: "closed", tcp_: "closed"},
		{sni: "5432.db.default", multi: "closed", single: "closed", tcp_: "5432"},
		{sni: "5432.payments.other", multi: "closed", single: "closed", tcp_: "closed"},
		{sni: "8080.payments.default", alpn: h1, multi: unavailable, single: misdirected, tcp_: unavailable},
		{sni: "", multi: "8080", single: "8080", tcp_: "5432"},
		{sni: "", alpn: h1, multi: "8080", single: "8080", tcp_: "5432"},
		{sni: "7777", alpn: h1, multi: unavailable, single: misdirected, tcp_: unavailable},
		{sni: "7777", multi: "closed", single: "closed", tcp_: "closed"},
		{sni: "08080", alpn: h1, multi: unavailable, single: misdirected, tcp_: unavailable},
		{sni: "08080", multi: "closed", single: "closed", tcp_: "closed"},
		{sni: "p-7777", alpn: h1, multi: unavailable, single: misdirected, tcp_: unavailable},
		{sni: "payments.aether.internal", alpn: h1, multi: unavailable, single: misdirected, tcp_: unavailable},
		{sni: "8080x", alpn: []string{"foo", "http/1.1"}, multi: unavailable, single: misdirected, tcp_: unavailable},
	} {
		t.Run(fmt.Sprintf("%s %v", tt.sni, tt.alpn), func(t *testing.T) {
			for _, target := range []struct {
				pod  *meshPod
				want string
			}{{multi, tt.multi}, {single, tt.single}, {tcp, tt.tcp_}} {
				got, header := f.get(t.Context(), target.pod, own, tt.sni, tt.alpn...)
				if got != target.want {
					t.Errorf("pod %s: got %q, want %q", target.pod.spec.ID, got, target.want)
				}
				refused := got == unavailable || got == misdirected
				if marked := header.Get(resource.NotDeliveredHeader) == "1"; marked != refused {
					t.Errorf("pod %s: %q is marked as not delivered: %v", target.pod.spec.ID, got, marked)
				}
			}
		})
	}
}

// The same with the tool that the design names: openssl sends a numeric SNI, and
// each name leads to its own chain.
func TestWireOpenSSL(t *testing.T) {
	m := newMesh(t)
	pod := m.addPod("multi", "payments", "8080 9090 5432=tcp")
	pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("eight"))
	pod.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("nine"))
	pod.ServeTCP(t, "127.0.0.1:5432", func(c *net.TCPConn) { _, _ = io.WriteString(c, "server speaks first\n") })
	client := m.lab.AddPod()
	chain, key := m.ca.Issue("spiffe://" + trustDomain + "/ns/default/sa/stranger")
	dir := t.TempDir()
	for name, data := range map[string][]byte{"cert": chain, "key": key, "ca": m.ca.PEM, "request": []byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct{ flags, want string }{
		{"-servername 8080", `"Server":"eight"`},
		{"-servername 9090", `"Server":"nine"`},
		{"-servername p-9090", `"Server":"nine"`},
		{"-servername 5432", "server speaks first"},
		{"-noservername", `"Server":"eight"`},
		{"-servername 7777 -alpn http/1.1", "503 Service Unavailable"},
		{"-servername 08080 -alpn http/1.1", "503 Service Unavailable"},
	} {
		command := fmt.Sprintf("cd %s && openssl s_client -quiet -connect %s:%d -cert cert -key key -CAfile ca -verify_return_error %s < request",
			dir, pod.Addr, resource.InboundPort, tt.flags)
		if out, _ := client.Run(t.Context(), "timeout", "10", "sh", "-c", command); !strings.Contains(out, tt.want) {
			t.Errorf("openssl s_client %s: got\n%s\nwant %s", tt.flags, out, tt.want)
		}
	}
}

// Who may connect: a certificate of the trust domain, over TLS 1.3. None, one of
// another authority or of another domain, and older TLS are refused; so is
// plaintext (MESH-26, MESH-27).
func TestWireClientCertificate(t *testing.T) {
	m := newMesh(t)
	pod := m.addPod("single", "payments", "8080")
	pod.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	f := m.foreigner("stranger")
	other := wiretest.NewCA(t)
	for _, tt := range []struct {
		name string
		edit func(*tls.Config)
		want string
	}{
		{"of the mesh", func(*tls.Config) {}, "8080"},
		{"none", func(c *tls.Config) { c.Certificates = nil }, "closed"},
		{"of another authority", func(c *tls.Config) {
			c.Certificates = other.Client("spiffe://" + trustDomain + "/ns/default/sa/a").Certificates
		}, "closed"},
		{"of another trust domain", func(c *tls.Config) {
			c.Certificates = m.ca.Client("spiffe://td.test.evil/ns/default/sa/a").Certificates
		}, "closed"},
		{"of a domain with the same prefix", func(c *tls.Config) { c.Certificates = m.ca.Client("spiffe://td.tes/ns/default/sa/a").Certificates }, "closed"},
		{"over TLS 1.2", func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, "closed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := foreigner{pod: f.pod, conf: f.conf.Clone()}
			tt.edit(g.conf)
			if got, _ := g.get(t.Context(), pod, "x", "8080"); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
	c, err := f.pod.DialContext(t.Context(), "tcp", netip.AddrPortFrom(pod.Addr, resource.InboundPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if data, err := io.ReadAll(c); len(data) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("plaintext got %q, %v; want a closed connection", data, err)
	}
}

// Both address families are served where the pod has both, and IPv4 alone where the
// pod has no IPv6.
func TestWireAddressFamilies(t *testing.T) {
	m := newMesh(t)
	f := m.foreigner("stranger")
	dual := m.addPod("dual", "payments", "8080")
	dual.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("dual"))
	v4 := &meshPod{Pod: m.lab.AddPod()}
	v4.spec = podSpec(t, "v4", "payments", "payments", "8080")
	v4.spec.Netns, v4.spec.IPv6 = v4.Path, false
	if out, err := v4.Run(t.Context(), "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	v4.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("v4"))
	m.setPod(v4)
	// A pod whose IPv6 is switched off though its kernel has it still gets all its
	// listeners (freebind).
	off := &meshPod{Pod: m.lab.AddPod()}
	off.spec = podSpec(t, "off", "payments", "payments", "8080")
	off.spec.Netns = off.Path
	if out, err := off.Run(t.Context(), "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	off.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("off"))
	m.setPod(off)
	m.xds.Sync()
	for _, tt := range []struct {
		name string
		pod  *meshPod
		addr netip.Addr
		want string
	}{
		{"dual, IPv4", dual, dual.Addr, "dual"},
		{"dual, IPv6", dual, dual.Addr6, "dual"},
		{"IPv4 only", v4, v4.Addr, "v4"},
		{"IPv6 switched off", off, off.Addr, "off"},
	} {
		target := &meshPod{Pod: &wiretest.Pod{Namespace: tt.pod.Namespace, Addr: tt.addr}}
		if got, _ := f.get(t.Context(), target, "x", "8080"); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	for _, pod := range []*meshPod{dual, v4, off} {
		if got := m.call(pod.http1(t), "evil.com"); got.status != http.StatusNotFound {
			t.Errorf("%s: 15001 answers %d", pod.spec.ID, got.status)
		}
	}
	if got := m.call(dual.Client(t, "[::1]:15001", false), "evil.com"); got.status != http.StatusNotFound {
		t.Errorf("[::1]:15001 answers %d", got.status)
	}
}
