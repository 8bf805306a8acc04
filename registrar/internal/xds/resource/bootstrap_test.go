package resource_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

func bootstrapParams() resource.BootstrapParams {
	return resource.BootstrapParams{
		NodeID: "node-1", Cluster: domain, Locality: model.Locality{Region: "r1", Zone: "a"},
		XDSSocket: "/run/portolan/xds/xds.sock", AdminSocket: "/run/portolan/envoy/admin.sock",
	}
}

// The bootstrap is what its golden file says, JSON, and accepted by a real Envoy.
func TestBootstrap(t *testing.T) {
	got, err := resource.Bootstrap(bootstrapParams())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "bootstrap.json", got)
	if out, err := wiretest.ValidateConfig(t, got); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for range 20 {
		if again, err := resource.Bootstrap(bootstrapParams()); err != nil || !bytes.Equal(again, got) {
			t.Fatalf("the same parameters give other bytes, %v", err)
		}
	}
}

// What Envoy could not start with, or would misunderstand, is refused with the
// parameter's name.
func TestBootstrapRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*resource.BootstrapParams)
		want string
	}{
		{"no node", func(p *resource.BootstrapParams) { p.NodeID = "" }, `bootstrap: node "" or cluster "aether.internal" is empty; Envoy needs both to ask for configuration`},
		{"no cluster", func(p *resource.BootstrapParams) { p.Cluster = "" }, `bootstrap: node "node-1" or cluster "" is empty; Envoy needs both to ask for configuration`},
		{"relative socket", func(p *resource.BootstrapParams) { p.XDSSocket = "xds.sock" }, `bootstrap: socket path "xds.sock" must be absolute and at most 107 bytes`},
		{"long socket", func(p *resource.BootstrapParams) { p.AdminSocket = "/" + strings.Repeat("a", 107) }, `bootstrap: socket path "/` + strings.Repeat("a", 107) + `" must be absolute and at most 107 bytes`},
		{"negative limit", func(p *resource.BootstrapParams) { p.MaxConnections = -1 }, `bootstrap: a maximum of -1 connections is negative`},
		{"not UTF-8", func(p *resource.BootstrapParams) { p.NodeID = "\xff" }, `bootstrap: node "\xff", cluster "aether.internal" or locality {"r1" "a"} is not UTF-8`},
	} {
		p := bootstrapParams()
		tt.edit(&p)
		if _, err := resource.Bootstrap(p); err == nil || err.Error() != tt.want {
			t.Errorf("%s: got %v\nwant %s", tt.name, err, tt.want)
		}
	}
}
