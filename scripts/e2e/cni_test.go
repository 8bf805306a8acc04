package e2e

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// A pod with a bad annotation is refused with CNI code 102 by a text that names
// key, value and remedy; nothing of it is registered, held or captured
// (contract 1, section 5).
func TestBadAnnotation(t *testing.T) {
	n := startNode(t, node.Options{})
	tests := []struct {
		name, key, value string
		want             []string
	}{
		{"not a number", "endpoint.aether.io/ports", "8080,http", []string{`"http"`}},
		{"leading zero", "endpoint.aether.io/port", "08080", []string{`"08080"`}},
		{"mesh port", "endpoint.aether.io/ports", "8080,15008", []string{"15008"}},
		{"port 80", "endpoint.aether.io/ports", "8080,80", []string{"80"}},
		{"unknown protocol", "endpoint.aether.io/ports", "8080=quic", []string{"quic"}},
		{"service", "endpoint.aether.io/service", "Pay_ments", []string{"Pay_ments"}},
		{"not supported yet", "inbound.aether.io/strict", "true", []string{"not supported by this version"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			annotations := map[string]string{"aether.io/managed": "true", tt.key: tt.value}
			_, err := n.AddPod(t.Context(), node.PodSpec{Name: "bad", Annotations: annotations})
			if err == nil {
				t.Fatal("the pod was added")
			}
			code, text := node.CNIError(err)
			if code != 102 {
				t.Errorf("code %d (%v), want 102", code, err)
			}
			for _, want := range append(tt.want, tt.key) {
				if !strings.Contains(text, want) {
					t.Errorf("text %q, want %q in it", text, want)
				}
			}
		})
	}
	nothingIsLeft(t, n)
}

// A pod whose address the mesh would take for one of a service is refused, by a text that
// names the address, the range and the setting: the networks of pods and services overlap.
// A pod of that network that stays out of the mesh starts.
func TestPodWithServiceAddress(t *testing.T) {
	n := startNode(t, node.Options{RegistrarFlags: []string{"--vip-range=10.88.0.0/15"}})
	_, err := n.AddPod(t.Context(), multiPort("payments-1"))
	if err == nil {
		t.Fatal("the pod was added")
	}
	code, text := node.CNIError(err)
	if code != 102 {
		t.Errorf("code %d (%v), want 102", code, err)
	}
	for _, want := range []string{"10.88.0.", "10.88.0.0/15", "--vip-range"} {
		if !strings.Contains(text, want) {
			t.Errorf("text %q, want %q in it", text, want)
		}
	}
	nothingIsLeft(t, n)
	addPod(t, n, node.PodSpec{Name: "plain"})
}

// nothingIsLeft fails when the registrar knows a pod or a network namespace is held.
func nothingIsLeft(t *testing.T, n *node.Node) {
	t.Helper()
	pins, err := n.Pins()
	if err != nil || len(pins) > 0 {
		t.Errorf("network namespaces held: %v (%v)", pins, err)
	}
	status, err := n.RegistrarStatus(t.Context())
	if err != nil || len(status.Attachments) > 0 {
		t.Errorf("attachments: %+v (%v)", status.Attachments, err)
	}
}

// While Envoy or the registrar is away, ADD of a pod that opted in fails by itself, with
// code 11 and a text that says which and the remedy, and leaves nothing (that it does so
// within timeoutSeconds the plugin's own tests hold);
// once it is back the same pod is added (contract section 5, XDS-44; what Envoy has
// goes on serving: TestRegistrarRestart, pods that did not opt in start:
// TestUnmeshedPod).
func TestAddWhileAway(t *testing.T) {
	n := startNode(t, node.Options{})
	tests := []struct {
		name  string
		stop  func() error
		start func(context.Context) error
		want  string
	}{
		{"Envoy", n.Envoy.Kill, n.StartEnvoy, "Envoy"},
		{"registrar", n.Registrar.Kill, n.StartRegistrar, "registrar"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.stop(); err != nil {
				t.Fatal(err)
			}
			_, err := n.AddPod(t.Context(), multiPort("payments-1"))
			code, text := node.CNIError(err)
			if code != 11 || !strings.Contains(text, tt.want) {
				t.Errorf("ADD: %v, want code 11 naming %s", err, tt.want)
			}
			if err := tt.start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := n.WaitReady(t.Context()); err != nil {
				t.Fatal(err)
			}
			nothingIsLeft(t, n)
			p := addPod(t, n, multiPort("payments-1"))
			waitHealthy(t, n, 8080, 1)
			if err := p.Delete(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A pod that did not opt in starts while the registrar is away, and is never
// captured (contract section 5, MESH-39).
func TestUnmeshedPod(t *testing.T) {
	n := startNode(t, node.Options{})
	p := addPod(t, n, node.PodSpec{Name: "plain"})
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	away := addPod(t, n, node.PodSpec{Name: "away"})
	opted := addPod(t, n, node.PodSpec{Name: "out", Annotations: map[string]string{"aether.io/managed": "false", "endpoint.aether.io/ports": "8080"}})
	for _, p := range []*node.Pod{p, away, opted} {
		if out, err := p.Exec(t.Context(), "nft", "list", "tables"); err != nil || out != "" {
			t.Errorf("%s: nft tables %q (%v), want none", p.Spec.Name, out, err)
		}
		if got, err := p.Lookup(t.Context(), node.OutsideName); err != nil || !slices.Equal(got.Addresses, []string{node.WebIP}) {
			t.Errorf("%s: lookup %+v (%v)", p.Spec.Name, got, err)
		}
		if got, err := p.Lookup(t.Context(), "payments.aether.internal"); err != nil || got.Rcode != "NXDOMAIN" || got.TTL != 77 {
			t.Errorf("%s: lookup of a mesh name %+v (%v), want the answer of its own resolver", p.Spec.Name, got, err)
		}
	}
}

// DEL while the registrar is away succeeds and leaves a note, which the registrar
// replays at its start: the pod is gone from the mesh (contract section 5, I10).
func TestDelWhileRegistrarAway(t *testing.T) {
	n := startNode(t, node.Options{})
	p := addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Delete(t.Context()); err != nil {
		t.Errorf("DEL: %v", err)
	}
	notes, err := filepath.Glob("/run/portolan/spool/*")
	if err != nil || len(notes) == 0 {
		t.Errorf("notes in the spool: %v (%v), want one", notes, err)
	}
	if err := n.StartRegistrar(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() string {
		status, err := n.RegistrarStatus(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(status.Attachments) != 1 || status.Attachments[0].Pod != client.Spec.Name {
			return "attachments other than the client's"
		}
		return ""
	})
	if notes, err := filepath.Glob("/run/portolan/spool/*"); err != nil || len(notes) != 0 {
		t.Errorf("notes left in the spool: %v (%v)", notes, err)
	}
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "503" {
		t.Errorf("a request for the deleted pod: %s (%v), want 503", got, err)
	}
}

// DEL succeeds when there is less and less to delete: twice, after the network
// namespace has vanished, and for a sandbox of the same name that is old, which
// leaves the new one untouched (I10, CNI-22).
func TestDelBroken(t *testing.T) {
	n := startNode(t, node.Options{})
	old := addPod(t, n, multiPort("payments-1"))
	if err := old.Vanish(); err != nil {
		t.Fatal(err)
	}
	current := addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	for range 2 {
		if err := old.Del(t.Context()); err != nil {
			t.Errorf("DEL of the old sandbox: %v", err)
		}
	}
	waitHealthy(t, n, 8080, 1)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
		t.Errorf("the new sandbox: %s (%v)", got, err)
	}
	for range 2 {
		if err := current.Del(t.Context()); err != nil {
			t.Errorf("DEL: %v", err)
		}
	}
}

// CHECK succeeds for a pod that is as it was made and fails with code 100 once
// its rules are gone; STATUS says whether pods can be added, GC removes what the
// runtime does not list (C18-C21).
func TestCheckStatusGC(t *testing.T) {
	n := startNode(t, node.Options{Plugin: map[string]any{"reportStatus": true}})
	ctx := t.Context()
	p := addPod(t, n, multiPort("payments-1"))
	ghost := addPod(t, n, multiPort("payments-2"))
	if err := n.Check(ctx, p); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if _, err := p.Exec(ctx, "nft", "delete", "table", "inet", "portolan"); err != nil {
		t.Fatal(err)
	}
	if code, _ := node.CNIError(n.Check(ctx, p)); code != 100 {
		t.Errorf("CHECK without the rules: %v, want code 100", n.Check(ctx, p))
	}
	if err := ghost.Vanish(); err != nil {
		t.Fatal(err)
	}
	if err := n.GC(ctx); err != nil {
		t.Errorf("GC: %v", err)
	}
	status, err := n.RegistrarStatus(ctx)
	if err != nil || len(status.Attachments) != 1 || status.Attachments[0].Attachment != p.ContainerID+"-eth0" {
		t.Errorf("after GC: %+v (%v), want payments-1 alone", status.Attachments, err)
	}
	if err := n.Status(ctx); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	if code, _ := node.CNIError(n.Status(ctx)); code != 50 && code != 51 {
		t.Errorf("STATUS without the registrar: %v, want code 50 or 51", n.Status(ctx))
	}
}

// Deleting every pod leaves nothing: no attachment, no held network namespace,
// no address, no listener in Envoy.
func TestNothingIsLeft(t *testing.T) {
	n := startNode(t, node.Options{})
	pods := []*node.Pod{addPod(t, n, multiPort("payments-1")), addPod(t, n, multiPort("payments-2")), addClient(t, n, "client")}
	waitHealthy(t, n, 9090, 2)
	for _, p := range pods {
		if err := p.Delete(t.Context()); err != nil {
			t.Error(err)
		}
	}
	nothingIsLeft(t, n)
	eventually(t, 10*time.Second, func() string {
		listeners, err := n.EnvoyAdmin(t.Context(), "/listeners")
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(listeners)
	})
	leases, err := filepath.Glob("/var/lib/cni/networks/pods/1*")
	if err != nil || len(leases) > 0 {
		t.Errorf("addresses left: %v (%v)", leases, err)
	}
}

// A pod is added, served and deleted by a conflist of every version that the
// plugin supports (C9, C22).
func TestSpecVersions(t *testing.T) {
	for _, version := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			n := startNode(t, node.Options{CNIVersion: version})
			p := addPod(t, n, multiPort("payments-1"))
			waitHealthy(t, n, 8080, 1)
			if got, err := p.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
				t.Errorf("%s (%v)", got, err)
			}
			if err := p.Delete(t.Context()); err != nil {
				t.Error(err)
			}
			nothingIsLeft(t, n)
		})
	}
}
