package e2e

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// A pod's inbound listener chooses the port by SNI: a served port's number, or
// p-<port>, reaches that port; no SNI is the default port; an SNI that is not
// served never reaches a port (the proposal's spike with dataplane decision 3:
// MESH-1, MESH-10; I1). Asked by openssl, as curl sends no numeric SNI.
func TestInboundSNI(t *testing.T) {
	n := startNode(t, node.Options{})
	multi := addPod(t, n, multiPort("payments-1"))
	single := addPod(t, n, node.PodSpec{
		Name:        "single",
		Annotations: map[string]string{"endpoint.aether.io/port": "8080"},
		Servers:     []node.Server{{Listen: []string{"http:8080"}}},
	})
	client := addClient(t, n, "client")
	waitHealthy(t, n, 9090, 1)
	cert := svidFile(t, "spiffe://aether.internal/ns/default/sa/"+client.Spec.Name)

	const multiHost, singleHost = "payments.aether.internal", "single.aether.internal"
	tests := []struct {
		name string
		pod  *node.Pod
		sni  string // "" is none
		alpn string
		host string
		// want is in the answer; "" wants no answer at all.
		want string
	}{
		{"no SNI", multi, "", "http/1.1", multiHost, `"port":8080`},
		{"default port", multi, "8080", "http/1.1", multiHost, `"port":8080`},
		{"other port", multi, "9090", "http/1.1", multiHost + ":9090", `"port":9090`},
		{"DNS-shaped", multi, "p-9090", "http/1.1", multiHost + ":9090", `"port":9090`},
		{"unserved, with ALPN", multi, "7777", "http/1.1", multiHost + ":7777", "HTTP/1.1 503 "},
		{"unserved, without ALPN", multi, "7777", "", multiHost + ":7777", ""},
		{"leading zero", multi, "08080", "http/1.1", multiHost, "HTTP/1.1 503 "},
		{"another port's authority", multi, "8080", "http/1.1", multiHost + ":9090", "HTTP/1.1 421 "},
		{"another service's authority", multi, "8080", "http/1.1", singleHost, "HTTP/1.1 421 "},
		{"single-port pod, no SNI", single, "", "http/1.1", singleHost, `"port":8080`},
		{"single-port pod, its port", single, "8080", "http/1.1", singleHost, `"port":8080`},
		{"single-port pod, unserved", single, "9090", "http/1.1", singleHost, "HTTP/1.1 421 "},
		{"single-port pod, another service", single, "8080", "http/1.1", multiHost, "HTTP/1.1 421 "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			args := []string{"s_client", "-quiet", "-connect", tt.pod.IP().String() + ":15008", "-cert", cert, "-key", cert}
			if tt.sni == "" {
				args = append(args, "-noservername")
			} else {
				args = append(args, "-servername", tt.sni)
			}
			if tt.alpn != "" {
				args = append(args, "-alpn", tt.alpn)
			}
			got := converse(t, args, "GET / HTTP/1.1\r\nHost: "+tt.host+"\r\nConnection: close\r\n\r\n")
			if tt.want == "" && strings.Contains(got, "HTTP/") || !strings.Contains(got, tt.want) {
				t.Errorf("answer %q, want %q in it", got, tt.want)
			}
			if !strings.Contains(tt.want, "port") && strings.Contains(got, `"pod"`) {
				t.Errorf("answer %q came from a pod", got)
			}
		})
	}
	t.Run("no client certificate", func(t *testing.T) {
		got := converse(t, []string{"s_client", "-quiet", "-connect", multi.IP().String() + ":15008", "-servername", "8080", "-alpn", "http/1.1"},
			"GET / HTTP/1.1\r\nHost: "+multiHost+"\r\nConnection: close\r\n\r\n")
		if strings.Contains(got, "HTTP/") {
			t.Errorf("answer %q, want none", got)
		}
	})
}

// converse runs openssl with input that stays open until the answer has come.
func converse(t *testing.T, args []string, input string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "openssl", args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = stdin.Write([]byte(input)) // the peer may have closed already
	_ = cmd.Wait()                    // its status says how the peer closed; the answer tells
	if ctx.Err() != nil {
		t.Fatalf("openssl %v: no end of the connection; so far %q, %q", args, &stdout, &stderr)
	}
	return stdout.String()
}

// svidFile is the file with the certificate and key of an identity, in the
// registrar's state.
func svidFile(t *testing.T, spiffe string) string {
	t.Helper()
	var found string
	err := filepath.WalkDir("/var/lib/portolan", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".pem" {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
			if block.Type != "CERTIFICATE" {
				continue
			}
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(cert.URIs, func(uri *url.URL) bool { return uri.String() == spiffe }) {
				found = path
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found == "" {
		t.Fatalf("no certificate of %s below /var/lib/portolan", spiffe)
	}
	return found
}
