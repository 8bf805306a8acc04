package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// Certificates that live for seconds are rotated under load: both ends get new ones
// time and again, and no request of HTTP/1.1, HTTP/2 or over a raw connection fails,
// be it an old connection or a new one (MESH-27, contract 4.7).
func TestRotation(t *testing.T) {
	n := startNode(t, node.Options{RegistrarFlags: []string{"--svid-lifetime=12s"}})
	server := addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	for _, port := range []uint16{8080, 9090, 5432} {
		waitHealthy(t, n, port, 1)
	}
	const duration = 20 * time.Second
	finish := map[string]func() answer.Tally{
		"200 payments-1:8080": load(t, client, duration, "-rate", "50", "-keepalive=false", "http://payments.aether.internal/"),
		"200 payments-1:9090": load(t, client, duration, "-rate", "50", "-h2", "http://payments.aether.internal:9090/"),
	}
	type result struct {
		got answer.TCP
		err error
	}
	long := make(chan result, 1)
	go func() {
		got, err := client.TCP(t.Context(), "-duration", duration.String(), "payments.aether.internal:5432")
		long <- result{got, err}
	}()
	// Past the end of the first certificates: new connections must use the later ones.
	var seen, held []string // in the order in which they came
	deadline := time.Now().Add(time.Minute)
	for len(seen) < 4 || len(held) < 4 {
		if time.Now().After(deadline) {
			t.Fatalf("serials on the wire %v, versions of the client's secret %v: want four of each", seen, held)
		}
		// A new raw connection is a new handshake between the two Envoys.
		if got, err := client.TCP(t.Context(), "payments.aether.internal:5432"); err != nil || got.Error != "" || got.Lines != 1 {
			t.Errorf("a new connection after %d rotations: %+v (%v)", len(seen)-1, got, err)
		}
		if serial := serverSerial(t, server); !slices.Contains(seen, serial) {
			seen = append(seen, serial)
		}
		if version := secretVersion(t, n, "spiffe://aether.internal/ns/default/sa/client"); !slices.Contains(held, version) {
			held = append(held, version)
		}
		got, err := client.Curl(t.Context(), "http://payments.aether.internal/")
		if err != nil || got.Status != 200 {
			t.Errorf("after %d rotations: %s (%v)", len(seen)-1, got, err)
		}
	}
	for want, wait := range finish {
		tally := wait()
		if diff := cmp.Diff(map[string]int{want: tally.Requests}, tally.Answers); diff != "" {
			t.Errorf("answers (-want +got):\n%s", diff)
		}
	}
	if r := <-long; r.err != nil || r.got.Error != "" || r.got.Lines < 10 {
		t.Errorf("the long connection: %+v (%v)", r.got, r.err)
	}
	t.Logf("serials of the server on the wire %v, versions of the client's secret %v", seen, held)
}

// serverSerial is the serial number of the certificate that the pod's inbound
// listener shows.
func serverSerial(t *testing.T, p *node.Pod) string {
	t.Helper()
	var serial string
	dialer := tls.Dialer{Config: &tls.Config{
		ServerName: "8080", InsecureSkipVerify: true, // looked at, not trusted
		VerifyPeerCertificate: func(chain [][]byte, _ [][]*x509.Certificate) error {
			leaf, err := x509.ParseCertificate(chain[0])
			if err != nil {
				return err
			}
			serial = leaf.SerialNumber.Text(16)
			if now := time.Now(); now.After(leaf.NotAfter) {
				t.Errorf("the server shows a certificate that ended %v ago", now.Sub(leaf.NotAfter))
			}
			return nil
		},
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	// We have no certificate, so it may fail after we have seen the server's.
	if conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(p.IP().String(), "15008")); err == nil {
		_ = conn.Close()
	} else if serial == "" {
		t.Fatal(err)
	}
	return serial
}

// secretVersion is the version of a secret that the node's Envoy works with.
func secretVersion(t *testing.T, n *node.Node, name string) string {
	t.Helper()
	var dump struct {
		Configs []struct {
			Name    string `json:"name"`
			Version string `json:"version_info"`
		} `json:"configs"`
	}
	text, err := n.EnvoyAdmin(t.Context(), "/config_dump?resource=dynamic_active_secrets")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &dump); err != nil {
		t.Fatalf("read Envoy's secrets %q: %v", text, err)
	}
	var names []string
	for _, c := range dump.Configs {
		if c.Name == name {
			return c.Version
		}
		names = append(names, c.Name)
	}
	t.Fatalf("Envoy has no secret %s, only %v", name, names)
	return ""
}
