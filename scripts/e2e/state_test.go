package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

const stateFile = "/var/lib/portolan/state.db"

// A registrar whose state file is corrupt says which, keeps a copy aside, and
// rebuilds what is attached from what the plugin left beside the pins; requests
// go on meanwhile, since Envoy loses nothing that is still right (contract 4.8,
// XDS-43).
func TestCorruptState(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 9090, 1)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
		t.Fatalf("before: %s (%v)", got, err)
	}
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	broken := bytes.Repeat([]byte("broken "), 4096)
	if err := os.WriteFile(stateFile, broken, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.StartRegistrar(t.Context()); err != nil {
		t.Fatal(err)
	}
	load := make(chan string, 1)
	go func() {
		for range 100 {
			if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
				load <- fmt.Sprintf("while the state is rebuilt: %s (%v)", got, err)
				return
			}
		}
		load <- ""
	}()
	waitHealthy(t, n, 9090, 1)
	if failed := <-load; failed != "" {
		t.Error(failed)
	}
	log, err := os.ReadFile(n.Registrar.LogPath)
	if err != nil {
		t.Fatal(err)
	}
	aside, err := filepath.Glob(stateFile + ".corrupt-*")
	if err != nil || len(aside) != 1 {
		t.Fatalf("set aside: %v (%v), want one copy", aside, err)
	}
	if kept, err := os.ReadFile(aside[0]); err != nil || !bytes.Equal(kept, broken) {
		t.Errorf("the copy is not the corrupt file (%v)", err)
	}
	if !strings.Contains(string(log), aside[0]) {
		t.Errorf("the log does not name %s", aside[0])
	}
	if text, err := n.StatusText(t.Context()); err != nil || !strings.Contains(text, aside[0]) {
		t.Errorf("status does not name the copy (%v):\n%s", err, text)
	}
	status, err := n.RegistrarStatus(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(status.Attachments) != 2 {
		t.Errorf("%d attachments, want payments-1 and client", len(status.Attachments))
	}
	if got, err := client.GRPC(t.Context(), "payments.aether.internal:9090"); err != nil || got.Health != "SERVING" {
		t.Errorf("gRPC after the rebuild: %+v (%v)", got, err)
	}
}

// A pod that goes without DEL leaves every set at once, and its attachment is
// swept (CNI-26, MESH-24).
func TestGhost(t *testing.T) {
	n := startNode(t, node.Options{RegistrarFlags: []string{"--sweep-interval=100ms"}})
	addPod(t, n, multiPort("payments-1"))
	ghost := addPod(t, n, multiPort("payments-2"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 2)
	if err := ghost.Vanish(); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, n, 8080, 1)
	for range 20 {
		if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
			t.Fatalf("with a ghost: %s (%v)", got, err)
		}
	}
	eventually(t, 10*time.Second, func() string {
		status, err := n.RegistrarStatus(t.Context())
		if err != nil {
			return err.Error()
		}
		if len(status.Attachments) != 2 {
			return "the ghost is still attached"
		}
		pins, err := n.Pins()
		if err != nil {
			return err.Error()
		}
		for _, name := range pins {
			if strings.HasPrefix(name, ghost.ContainerID) {
				return "the ghost has left " + name
			}
		}
		return ""
	})
}

// Socket folders that somebody deletes come back by themselves, and what was
// connected goes on (CNI-20, CNI-21).
func TestSocketFoldersComeBack(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	for _, dir := range []string{"/run/portolan/cni", "/run/portolan/dns", "/run/portolan/xds"} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.String() != "200 payments-1:8080" {
		t.Errorf("without the folders: %s (%v)", got, err)
	}
	for _, socket := range []string{"/run/portolan/cni/cni.sock", "/run/portolan/dns/dns.sock", "/run/portolan/xds/xds.sock"} {
		eventually(t, 10*time.Second, func() string {
			if _, err := os.Stat(socket); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	// Everybody who connects anew finds them.
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := n.StartRegistrar(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	addPod(t, n, multiPort("payments-2"))
	waitHealthy(t, n, 8080, 2)
}

// A pod that excludes port 53 is added, and keeps its own look-ups.
func TestExcludedDNS(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	p := addPod(t, n, node.PodSpec{Name: "own-dns", Annotations: map[string]string{
		"endpoint.aether.io/ports": "none", "capture.aether.io/exclude-outbound-ports": "53",
	}})
	waitHealthy(t, n, 8080, 1)
	if got, err := p.Lookup(t.Context(), "payments.aether.internal"); err != nil || got.Rcode != "NXDOMAIN" {
		t.Errorf("mesh name: %+v (%v), want the upstream's NXDOMAIN", got, err)
	}
	if got, err := p.Lookup(t.Context(), node.OutsideName); err != nil || got.Rcode != "NOERROR" {
		t.Errorf("name outside the mesh: %+v (%v)", got, err)
	}
}
