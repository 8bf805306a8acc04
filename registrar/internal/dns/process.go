package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// Alive keeps the capture of port 53 alive in one pod; see pods.Alive.
type Alive = pods.Alive

// Config is what the mesh-DNS process needs.
type Config struct {
	// Socket is where the registrar gives us the table (contract 7: /run/portolan/dns/dns.sock).
	Socket string
	// StateFile keeps the last table (contract 7: /var/lib/portolan/dns.json).
	StateFile string
	// HTTP is the loopback address of /metrics and /healthz; empty for none.
	HTTP string
	// Registry has the process' metrics. Required.
	Registry *prometheus.Registry
	// OpenAlive opens the capture of port 53 in the network namespace at a path.
	// Required; plugins/capture has it.
	OpenAlive func(netns string) (Alive, error)
	// Log is required.
	Log *slog.Logger
	// Limits bound the look-ups that wait for upstream resolvers; zero for the defaults.
	Limits forward.Limits
}

func (c *Config) complete() error {
	switch {
	case !filepath.IsAbs(c.Socket):
		return fmt.Errorf("socket %q of mesh DNS is no absolute path", c.Socket)
	case !filepath.IsAbs(c.StateFile):
		return fmt.Errorf("state file %q of mesh DNS is no absolute path", c.StateFile)
	case c.Registry == nil || c.OpenAlive == nil || c.Log == nil:
		return errors.New("mesh DNS: Registry, OpenAlive and Log are required")
	}
	if c.Limits == (forward.Limits{}) {
		c.Limits = forward.DefaultLimits()
	}
	return nil
}

// Run is the mesh-DNS process: it serves the last table at once, takes newer
// ones from the registrar, and returns when ctx ends, after the capture of port
// 53 was withdrawn from every pod. While another process serves the same socket
// it waits. An error means that it could not start.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	// Who connects from now on waits until the last table is served.
	listener, err := listenSocket(ctx, cfg.Socket, cfg.Log)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer listener.Close()
	// Not before: its address is the predecessor's, too.
	health := &health{}
	web := serveHTTP(ctx, cfg, health)
	defer web.stop(context.WithoutCancel(ctx))
	if err := os.MkdirAll(filepath.Dir(cfg.StateFile), 0o700); err != nil {
		return fmt.Errorf("folder of the state file: %w", err)
	}
	p := newProcess(cfg)
	defer p.forwarder.Close()
	p.restore(ctx)
	rpc := grpc.NewServer(grpc.MaxRecvMsgSize(dnsv1.MaxMessage))
	dnsv1.RegisterMeshDNSServiceServer(rpc, p.server)
	var running sync.WaitGroup
	served := make(chan error, 1)
	running.Go(func() { served <- rpc.Serve(listener) })
	saving, endSaving := context.WithCancel(context.WithoutCancel(ctx))
	running.Go(func() { p.saver.run(saving) })
	health.set(true)
	cfg.Log.Info("mesh DNS serves", "socket", cfg.Socket)

	select {
	case <-ctx.Done():
		err = nil
	case err = <-served:
		err = fmt.Errorf("serve the table's socket: %w", err)
	}
	health.set(false)
	rpc.Stop()
	p.server.receivers.Wait()
	p.pods.Close()
	endSaving()
	running.Wait()
	return err
}

// process is what Run puts together.
type process struct {
	cfg       Config
	table     *table.Table
	forwarder *forward.Forwarder
	pods      *pods.Set
	server    *server
	saver     *saver
}

func newProcess(cfg Config) *process {
	p := &process{cfg: cfg, table: table.New()}
	limiter := forward.NewLimiter(cfg.Limits)
	m := newMetrics(cfg.Registry, p.table, limiter)
	p.forwarder = forward.New(forward.Config{Metrics: forward.NewMetrics(cfg.Registry)})
	p.saver = newSaver(table.File{Path: cfg.StateFile}, p.table, m, cfg.Log)
	p.server = &server{table: p.table, changed: p.saver.changed, metrics: m, log: cfg.Log}
	p.pods = pods.New(pods.Config{
		Responder: responder.New(p.table), Forwarder: p.forwarder, Limiter: limiter,
		Upstreams: p.table.Upstreams, OpenAlive: cfg.OpenAlive, OnChange: p.server.podChanged,
		Metrics: pods.NewMetrics(cfg.Registry), Log: cfg.Log, Port: dnsv1.Port,
	})
	p.server.pods = p.pods
	return p
}

// restore serves the last table. Whatever is wrong with it, the process starts:
// the registrar will send another.
func (p *process) restore(ctx context.Context) {
	last, err := p.saver.file.Load()
	if err != nil {
		if corrupt := (*table.CorruptError)(nil); errors.As(err, &corrupt) {
			p.server.metrics.corrupt.Inc()
		}
		p.cfg.Log.Error("last table not restored; names are served when the registrar connects", "error", err)
		return
	}
	if last == nil {
		p.cfg.Log.Info("no last table; names are served when the registrar connects")
		return
	}
	change, err := table.ChangeFrom(last)
	if err == nil {
		_, err = p.table.Apply(change)
	}
	if err != nil {
		p.cfg.Log.Error("last table not restored; names are served when the registrar connects", "error", err)
		return
	}
	p.pods.Apply(ctx, nil, p.table.Pods())
	p.cfg.Log.Info("last table restored", "names", len(last.GetNames()), "pods", len(last.GetPods()))
}
