package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/identity/kubernetes"
	"github.com/portolan-mesh/portolan/registrar/internal/identity/spire"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The kinds of --identity.
const (
	identityBuiltin = "builtin"
	identityCluster = "cluster"
	identitySPIRE   = "spire"
)

// defaultSPIRESocket is where SPIRE's own documents put the agent's admin socket; the
// agent has none unless it is told to.
const defaultSPIRESocket = "/tmp/spire-agent/private/admin.sock"

// identityConfig says who gives the pods' certificates.
type identityConfig struct {
	// Kind is one of the above, or empty: what fits the registry.
	Kind string
	// Lifetime of the certificates that the built-in CA signs.
	Lifetime time.Duration
	// Linger is how long a certificate outlives its last pod here.
	Linger         time.Duration
	SPIRESocket    string
	SPIRESelectors string
}

func (c *identityConfig) flags(f *pflag.FlagSet) {
	f.StringVar(&c.Kind, "identity", "", "who gives the pods' certificates: builtin (a CA of this machine), cluster ('registrar signer') or spire (this node's SPIRE agent) (default: builtin, or cluster with --registry=kubernetes)")
	f.DurationVar(&c.Linger, "svid-linger", 10*time.Minute, "how long a certificate is kept after the last pod of its account left this node")
	f.DurationVar(&c.Lifetime, "svid-lifetime", identity.MaxLifetime, "how long a pod's certificate lives that the built-in CA signs; it is renewed at half of that")
	f.StringVar(&c.SPIRESocket, "spire-admin-socket", defaultSPIRESocket, "the SPIRE agent's admin socket (its admin_socket_path)")
	f.StringVar(&c.SPIRESelectors, "spire-selectors", spire.DefaultSelectors, "selectors of an account's registration entry, separated by commas")
}

// complete fills in the kind that fits the registry.
func (c *identityConfig) complete(registry string) {
	switch {
	case c.Kind != "":
	case registry == backendKubernetes:
		c.Kind = identityCluster
	default:
		c.Kind = identityBuiltin
	}
}

func (c *identityConfig) validate(registry string) error {
	var errs []error
	switch c.Kind {
	case identityBuiltin:
		if registry == backendKubernetes {
			errs = append(errs, errors.New("--identity=builtin with --registry=kubernetes: each node would have a CA of its own and trust no other; use cluster or spire"))
		}
	case identityCluster:
		if registry != backendKubernetes {
			errs = append(errs, errors.New("--identity=cluster needs --registry=kubernetes"))
		}
	case identitySPIRE:
		errs = append(errs, absolute("spire-admin-socket", c.SPIRESocket))
		if _, err := spire.ParseSelectors(c.SPIRESelectors); err != nil {
			errs = append(errs, fmt.Errorf("--spire-selectors: %w", err))
		}
	default:
		errs = append(errs, fmt.Errorf("--identity %q: use %s, %s or %s", c.Kind, identityBuiltin, identityCluster, identitySPIRE))
	}
	if err := identity.CheckLifetime(c.Lifetime); err != nil {
		errs = append(errs, fmt.Errorf("--svid-lifetime %w", err))
	}
	if c.Linger < 0 {
		errs = append(errs, fmt.Errorf("--svid-linger %s: need 0 or a time", c.Linger))
	}
	return errors.Join(errs...)
}

func (d *daemon) makeIdentities() error {
	dir := filepath.Join(d.cfg.StateDir, caFolder)
	log := d.component("identity")
	// The store makes the folder, which the source may need.
	store, err := identity.OpenFileStore(filepath.Join(dir, "svids"), time.Now, log)
	if err != nil {
		return err
	}
	cfg := identity.ManagerConfig{
		Node: d.cfg.Mesh.Node, Store: store, Log: log, Metrics: d.metrics,
		Linger:    d.cfg.Identity.Linger,
		OnBundle:  func(b identity.Bundle) { d.publisher.SetBundle(b.TrustDomain, b.PEM()) },
		OnUpdate:  func(s identity.SVID) { d.publisher.SetSVID(s.Identity, s.ChainPEM, s.KeyPEM) },
		OnRelease: func(id model.Identity) { d.publisher.RemoveSVID(id) },
	}
	if err := d.certify(&cfg, dir, log); err != nil {
		return err
	}
	d.identities, err = identity.NewManager(cfg)
	return err
}

// certify chooses who gives the certificates; dir is for what that keeps.
func (d *daemon) certify(cfg *identity.ManagerConfig, dir string, log *slog.Logger) error {
	saved := identity.NewBundleFile(dir)
	switch d.cfg.Identity.Kind {
	case identitySPIRE:
		selectors, err := spire.ParseSelectors(d.cfg.Identity.SPIRESelectors)
		if err != nil {
			return err
		}
		cfg.Source, err = spire.New(spire.Config{
			Socket: d.cfg.Identity.SPIRESocket, TrustDomain: d.cfg.Mesh.TrustDomain, Selectors: selectors, Saved: saved, Log: log,
		})
		return err
	case identityCluster:
		requester, err := kubernetes.NewRequester(kubernetes.RequesterConfig{
			Client: d.cluster.client, Namespace: d.cfg.Cluster.Namespace, TrustDomain: d.cfg.Mesh.TrustDomain, Saved: saved, Log: log,
		})
		cfg.Signer = requester
		return err
	default:
		ca, err := identity.OpenCA(dir, d.cfg.Mesh.TrustDomain, time.Now, log)
		if err != nil {
			return err
		}
		cfg.Signer = ca
		return ca.SetLifetime(d.cfg.Identity.Lifetime)
	}
}

// ensurer implements attach.Identities: the certificate itself goes to Envoy only.
type ensurer struct{ *identity.Manager }

// Ensure implements attach.Identities.
func (e ensurer) Ensure(ctx context.Context, id model.Identity) error {
	_, err := e.Manager.Ensure(ctx, id)
	return err
}

// missingRoots says that no pod can have a certificate yet, "" when it can.
func missingRoots(b identity.Bundle, trustDomain string) string {
	if len(b.Roots) > 0 {
		return ""
	}
	return fmt.Sprintf("no roots of trust domain %s yet: who signs its certificates does not answer", trustDomain)
}
