package app

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// serveStatus answers on an admin socket as a running registrar does.
func serveStatus(t *testing.T, doc statusDoc) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status" {
			http.NotFound(w, r)
			return
		}
		if err := json.NewEncoder(w).Encode(doc); err != nil {
			t.Error(err)
		}
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return socket
}

// The exit status of `registrar status` says whether the registrar is ready, in
// both formats, and the help says which is which.
func TestStatusExit(t *testing.T) {
	for _, output := range []string{"text", "json"} {
		code, out, errText := run("status", "-o", output, "--admin-socket", serveStatus(t, statusDoc{Node: "n1", Ready: true}))
		if code != 0 || !strings.Contains(out, "n1") || errText != "" {
			t.Errorf("ready as %s: exit status %d, %q, %q", output, code, out, errText)
		}
		code, out, errText = run("status", "-o", output, "--admin-socket", serveStatus(t, statusDoc{Node: "n1", Missing: "Envoy is not connected"}))
		if code != 2 || !strings.Contains(out, "Envoy is not connected") || errText != "registrar: not ready: Envoy is not connected\n" {
			t.Errorf("not ready as %s: exit status %d, %q, %q", output, code, out, errText)
		}
	}
	if code, out, _ := run("status", "--help"); code != 0 || !strings.Contains(out, "Exit status: 0") {
		t.Errorf("help: exit status %d, %q", code, out)
	}
}

// A registrar that has nothing yet says so, table by table, and a long problem is
// wrapped.
func TestStatusText(t *testing.T) {
	problem := strings.TrimSpace(strings.Repeat("dial unix /run/portolan/dns/dns.sock: no such file; ", 6))
	doc := statusDoc{Node: "n1", Version: "v1", Ready: true, DNS: dnsStatus{Problem: problem}}
	_, out, _ := run("status", "--admin-socket", serveStatus(t, doc))
	for _, want := range []string{"Envoy: none is connected", "(no service yet)", "(no pod of this node is in the mesh)"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	if words := strings.Join(strings.Fields(out), " "); !strings.Contains(words, "not connected: "+problem) {
		t.Errorf("the problem is not whole:\n%s", out)
	}
	for line := range strings.Lines(out) {
		if len(strings.TrimSuffix(line, "\n")) > lineWidth {
			t.Errorf("%d characters in a line: %s", len(line), line)
		}
	}
	doc.Envoy = []envoyStatus{{Stream: "ads", Node: "n1", Agent: "envoy 1.40.0", Since: time.Unix(0, 0).UTC(), Pending: 3}}
	doc.Services = []serviceStatus{{Service: "default/a", Name: "a.aether.internal", Default: 8080, VIPs: make([]netip.Addr, 2), Ports: []unionPort{{Port: 8080, Protocol: "http", Advertised: 2, Healthy: 1}}}}
	doc.Attachments = []attachmentStatus{{Namespace: "default", Pod: "a-1", Service: "default/a", State: "attached", Addresses: make([]netip.Addr, 1), Ports: []portState{{Port: 8080, Listening: true}}}}
	_, out, _ = run("status", "--admin-socket", serveStatus(t, doc))
	for _, want := range []string{"Envoy n1 (envoy 1.40.0): ads stream since 1970-01-01T00:00:00Z, 3 pending", "8080=http 1/2", "default/a-1"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	if strings.Contains(out, "(no ") || strings.Contains(out, "none is connected") {
		t.Errorf("something is called empty:\n%s", out)
	}
}
