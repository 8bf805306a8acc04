package app

import (
	"context"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/dns"
)

// dnsConfig is everything `registrar dns` can be told.
type dnsConfig struct {
	Socket      string
	StateDir    string
	HTTPAddress string
	LogLevel    string
}

func newDNSCommand(s streams) *cobra.Command {
	var c dnsConfig
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "serve the mesh's names inside the node's pods",
		Long: "dns holds the DNS sockets in the pods' network namespaces. It is part of the data plane: it serves on\n" +
			"while `registrar run` is away, and from its last table when it starts without it.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDNS(cmd.Context(), c, s) },
	}
	f := cmd.Flags()
	f.StringVar(&c.Socket, "dns-socket", defaultDNSSocket, "where 'registrar run' pushes the table")
	f.StringVar(&c.StateDir, "state-dir", defaultStateDir, "folder of dns.json, the last table")
	f.StringVar(&c.HTTPAddress, "http-address", defaultDNSHTTP, "loopback address of /metrics and /healthz")
	f.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
	return cmd
}

func runDNS(ctx context.Context, c dnsConfig, s streams) error {
	log, err := newLogger(s.err, c.LogLevel)
	if err != nil {
		return err
	}
	return ended(dns.Run(ctx, dns.Config{
		Socket:    c.Socket,
		StateFile: filepath.Join(c.StateDir, "dns.json"),
		HTTP:      c.HTTPAddress,
		Registry:  prometheus.NewRegistry(),
		OpenAlive: func(netns string) (dns.Alive, error) { return capture.OpenAlive(netns) },
		Log:       log.With("component", "dns"),
	}))
}
