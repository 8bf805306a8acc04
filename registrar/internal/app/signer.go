package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	clientgo "k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/identity/kubernetes"
)

// defaultSignerHTTP is beside those of `run` and `dns`, as all may share a node.
const defaultSignerHTTP = "127.0.0.1:15072"

// signerConfig is what `registrar signer` is told.
type signerConfig struct {
	Kubeconfig, Namespace, Account, TrustDomain, Name string
	Lifetime                                          time.Duration
	Bypass                                            bypassList
	HTTPAddress, LogLevel                             string
}

func newSignerCommand(s streams) *cobra.Command {
	var c signerConfig
	cmd := &cobra.Command{
		Use:   "signer",
		Short: "sign the certificates of a cluster's pods",
		Long: "signer owns the roots of the trust domain, in a Secret, and answers the CertificateSigningRequests of\n" +
			"the registrars: an account is signed for the nodes that run a pod of it that may join the mesh. Several\n" +
			"may run; the one that holds the Lease signs.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return ended(c.run(cmd.Context(), s)) },
	}
	f := cmd.Flags()
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "how to reach the Kubernetes API (default: as the pod that the signer runs in)")
	f.StringVar(&c.Namespace, "namespace", defaultNamespace, "namespace of the Secret, the ConfigMap and the Lease")
	f.StringVar(&c.Account, "registrar-account", "portolan-registrar", "ServiceAccount of the registrars in that namespace: nobody else gets certificates")
	f.StringVar(&c.TrustDomain, "trust-domain", defaultDomain, "SPIFFE trust domain")
	f.StringVar(&c.Name, "name", "", "name of this process in the Lease (default: the host name)")
	f.DurationVar(&c.Lifetime, "svid-lifetime", identity.MaxLifetime, "how long a pod's certificate lives; it is renewed at half of that")
	c.Bypass.flag(f)
	f.StringVar(&c.HTTPAddress, "http-address", defaultSignerHTTP, "where /metrics and /healthz are served")
	f.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func (c *signerConfig) run(ctx context.Context, s streams) error {
	log, err := newLogger(s.err, c.LogLevel)
	if err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	klog.SetSlogLogger(log.With("component", "client-go"))
	config, err := kubernetesConfig(c.Kubeconfig)
	if err != nil {
		return err
	}
	client, err := clientgo.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client of the Kubernetes API: %w", err)
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg := c.complete()
	cfg.Client, cfg.Log, cfg.Metrics = client, log, metrics
	signer, err := kubernetes.NewSigner(cfg)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return signer.Run(ctx) })
	g.Go(func() error { return c.serveHTTP(ctx, metrics) })
	return g.Wait()
}

// complete is the signer's configuration, but for what is made when it starts.
func (c *signerConfig) complete() kubernetes.SignerConfig {
	return kubernetes.SignerConfig{
		Namespace: c.Namespace, Name: c.Name, Requesters: "system:serviceaccount:" + c.Namespace + ":" + c.Account,
		TrustDomain: c.TrustDomain, Bypass: c.Bypass.and(c.Namespace), Lifetime: c.Lifetime, Clock: time.Now,
	}
}

func (c *signerConfig) validate() error {
	var errs []error
	for _, l := range []struct{ flag, value string }{{"namespace", c.Namespace}, {"registrar-account", c.Account}} {
		if !authority.ValidLabel(l.value) {
			errs = append(errs, fmt.Errorf("--%s %q is not a DNS label", l.flag, l.value))
		}
	}
	errs = append(errs, c.Bypass.validate())
	if err := identity.CheckLifetime(c.Lifetime); err != nil {
		errs = append(errs, fmt.Errorf("--svid-lifetime %w", err))
	}
	if c.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			errs = append(errs, fmt.Errorf("--name: %w", err))
		}
		c.Name = host
	}
	return errors.Join(errs...)
}

func (c *signerConfig) serveHTTP(ctx context.Context, metrics *prometheus.Registry) error {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "ok") })
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", c.HTTPAddress)
	if err != nil {
		return err
	}
	return serve(ctx, l, mux)
}
