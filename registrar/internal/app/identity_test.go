package app

import (
	"crypto/x509"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// Who gives the certificates follows the registry unless it is said, and what cannot
// work is refused with the flag's name.
func TestIdentityFlags(t *testing.T) {
	for _, tc := range []struct{ args, registry, kind, err string }{
		{"", backendEmbedded, identityBuiltin, ""},
		{"", backendKubernetes, identityCluster, ""},
		{"--identity=spire", backendEmbedded, identitySPIRE, ""},
		{"--identity=spire", backendKubernetes, identitySPIRE, ""},
		{"--identity=builtin", backendKubernetes, identityBuiltin, "--identity=builtin with --registry=kubernetes"},
		{"--identity=cluster", backendEmbedded, identityCluster, "--identity=cluster needs"},
		{"--identity=vault", backendEmbedded, "vault", `--identity "vault"`},
		{"--identity=spire --spire-admin-socket=admin.sock", backendEmbedded, identitySPIRE, "--spire-admin-socket"},
		{"--identity=spire --spire-selectors=k8s:ns:{namespace}", backendEmbedded, identitySPIRE, "--spire-selectors"},
		{"--svid-lifetime=1s", backendEmbedded, identityBuiltin, "--svid-lifetime"},
		{"--svid-linger=-1s", backendEmbedded, identityBuiltin, "--svid-linger"},
	} {
		t.Run(tc.registry+" "+tc.args, func(t *testing.T) {
			var c identityConfig
			f := pflag.NewFlagSet("", pflag.ContinueOnError)
			c.flags(f)
			if err := f.Parse(strings.Fields(tc.args)); err != nil {
				t.Fatal(err)
			}
			c.complete(tc.registry)
			if c.Kind != tc.kind {
				t.Errorf("kind %s, want %s", c.Kind, tc.kind)
			}
			err := c.validate(tc.registry)
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
}

// A registrar that never had the roots of its trust domain can take no pod in.
func TestMissingRoots(t *testing.T) {
	if got := missingRoots(identity.Bundle{}, "td.test"); !strings.Contains(got, "no roots of trust domain td.test") {
		t.Errorf("without roots: %q", got)
	}
	if got := missingRoots(identity.NewBundle("td.test", []*x509.Certificate{{Raw: []byte("root")}}), "td.test"); got != "" {
		t.Errorf("with roots: %q", got)
	}
}
