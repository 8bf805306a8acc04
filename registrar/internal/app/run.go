package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/portolan-mesh/portolan/api/authority"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/birthtaint"
	"github.com/portolan-mesh/portolan/registrar/internal/catalogue"
	"github.com/portolan-mesh/portolan/registrar/internal/dns"
	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/installer"
	"github.com/portolan-mesh/portolan/registrar/internal/installer/daemonset"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/podserver"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/server"
)

func newRunCommand(s streams) *cobra.Command {
	var c runConfig
	cmd := &cobra.Command{
		Use:   "run",
		Short: "run the node's control plane",
		Long: "run takes the pods that the CNI plugin reports, publishes what they serve, and drives the node's\n" +
			"Envoy and mesh DNS. Restarting it closes no connection of any pod.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLogger(s.err, c.LogLevel)
			if err != nil {
				return err
			}
			vip4, vip6, err := c.Mesh.complete()
			c.Identity.complete(c.Registry)
			if err := errors.Join(err, c.validate()); err != nil {
				return err
			}
			if err := c.projection(vip4, vip6).Validate(); err != nil {
				return err
			}
			d, err := newDaemon(cmd.Context(), c, []netip.Prefix{vip4, vip6}, log)
			if err != nil {
				return err
			}
			return ended(d.run(cmd.Context()))
		},
	}
	c.flags(cmd.Flags())
	return cmd
}

// daemon is `registrar run`: every part, made and not yet running.
type daemon struct {
	cfg     runConfig
	log     *slog.Logger
	metrics *prometheus.Registry
	capture netnsCapture

	xdsSocket, adminSocket net.Listener
	lost                   lostSockets

	db         *bolt.DB
	recovery   state.Recovery
	backend    backend
	cluster    *cluster       // nil: a machine of its own
	locality   model.Locality // at the start
	cache      *cache.Cache
	xds        *server.Server
	publisher  *publisher.Publisher
	readiness  *readiness.Watcher
	identities *identity.Manager
	names      meshNames
	pods       *attach.Manager
	installer  *installer.Installer // nil: nothing is installed
	removal    *daemonset.Removal   // nil: what is installed is never taken out
	taint      *birthtaint.Remover  // nil: the node's taints are left alone
	started    time.Time
}

// newDaemon takes the sockets, opens what is on disk and makes the parts, from the
// one that is depended on to those that depend. The sockets come first: of two
// registrars the second must leave nothing, wherever its state would be.
func newDaemon(ctx context.Context, cfg runConfig, vips []netip.Prefix, log *slog.Logger) (*daemon, error) {
	d := &daemon{
		cfg: cfg, log: log, metrics: prometheus.NewRegistry(), started: time.Now(),
		capture: netnsCapture{netnsDir: cfg.NetnsDir, vipRanges: vips},
	}
	d.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if err := d.openSockets(ctx); err != nil {
		d.close()
		return nil, err
	}
	locate := func() error { return d.locate(ctx) }
	for _, step := range []func() error{d.makeRemoval, d.openState, d.makeXDS, d.makeCluster, locate, d.makeIdentities, d.makePublisher, d.makePods, d.makeInstaller, d.registerGauges} {
		if err := step(); err != nil {
			d.close()
			return nil, err
		}
	}
	return d, nil
}

func (d *daemon) component(name string) *slog.Logger { return d.log.With("component", name) }

// openSockets takes the sockets. Who connects waits until run serves.
func (d *daemon) openSockets(ctx context.Context) error {
	var err error
	d.xdsSocket, err = unixsocket.Listen(ctx, unixsocket.Config{
		Path: d.cfg.XDSSocket, UID: unixsocket.Keep, GID: d.cfg.XDSGroup, Lost: d.lost.socket(d.log, d.cfg.XDSSocket),
	})
	if err != nil {
		return err
	}
	d.adminSocket, err = unixsocket.Listen(ctx, d.ownSocket(d.cfg.AdminSocket))
	return err
}

func (d *daemon) openState() error {
	var err error
	d.db, d.recovery, err = state.Open(filepath.Join(d.cfg.StateDir, stateFile), d.component("state"))
	if err != nil {
		return err
	}
	// Assigned only when it is one: a nil pointer in an interface is not nil.
	opened, err := d.openRegistry()
	if err == nil {
		d.backend = opened
	}
	return err
}

// meshName is the name that a stored record carries for people; the projection
// decides what a service is called.
func (d *daemon) meshName(key model.ServiceKey) string {
	return authority.Authority{Service: key.Name, Namespace: key.Namespace}.HostPort(d.cfg.Mesh.Domain)
}

// makeXDS makes what Envoy is served from. The names client comes first in time,
// but the publisher only needs it once it runs.
func (d *daemon) makeXDS() error {
	d.cache = cache.New(cache.Config{Logger: d.component("xds"), NodeID: d.cfg.Mesh.Node})
	var err error
	if d.xds, err = server.New(server.Config{Cache: d.cache, Logger: d.component("xds"), Registerer: d.metrics}); err != nil {
		return err
	}
	upstreams, err := resolvers(d.cfg.DNSUpstream, "/etc/resolv.conf")
	if err != nil {
		return err
	}
	client, err := dns.NewClient(dns.ClientConfig{
		Socket: d.cfg.DNSSocket, Registerer: d.metrics, Log: d.component("dns"),
		Settings: dns.Settings{Domain: d.cfg.Mesh.Domain, Upstreams: upstreams},
	})
	if err != nil {
		return err
	}
	d.names = meshNames{client: client, socket: d.cfg.DNSSocket, log: d.component("dns")}
	return nil
}

func (d *daemon) makePublisher() error {
	store, err := catalogue.Open(d.db, d.cfg.Mesh.TrustDomain, d.component("catalogue"))
	if err != nil {
		return err
	}
	engine, err := d.loadEngine(store)
	if err != nil {
		return err
	}
	d.publisher, err = publisher.New(publisher.Config{
		Engine: engine, Cache: d.cache, Catalogue: store, Names: d.names, Log: d.component("publisher"),
		Domain: d.cfg.Mesh.Domain, TrustDomain: d.cfg.Mesh.TrustDomain, VIPRanges: d.capture.vipRanges,
		FlatNamespaces: d.cfg.Mesh.FlatNamespaces, Self: d.locality, XDSSocket: d.cfg.XDSSocket, Now: time.Now,
	})
	return err
}

// loadEngine makes the projection from the saved catalogue. An entry that cannot
// be taken is set aside; of entries that contradict each other the later are left
// out.
func (d *daemon) loadEngine(store *catalogue.Store) (*projection.Engine, error) {
	cfg := d.cfg.projection(d.capture.vipRanges[0], d.capture.vipRanges[1])
	now := time.Now()
	saved, err := store.Load(func(e projection.Entry) error {
		_, err := projection.New(cfg, []projection.Entry{e}, now)
		return err
	})
	if err != nil {
		return nil, err
	}
	for {
		engine, err := projection.New(cfg, saved, now)
		unfit, ok := errors.AsType[*projection.EntryError](err)
		if !ok {
			return engine, err
		}
		d.log.Error("saved service contradicts others and is left out", "service", unfit.Service.String(), "error", err)
		saved = slices.DeleteFunc(saved, func(e projection.Entry) bool { return e.Service == unfit.Service })
	}
}

func (d *daemon) makePods() error {
	var err error
	d.readiness, err = readiness.New(readiness.Config{Open: openTable, Log: d.component("readiness"), Metrics: d.metrics})
	if err != nil {
		return err
	}
	cfg := attach.Config{
		DB: d.db, Log: d.component("attach"), Node: d.cfg.Mesh.Node, TrustDomain: d.cfg.Mesh.TrustDomain, Locality: d.locality,
		NetnsDir: d.cfg.NetnsDir, SpoolDir: d.cfg.SpoolDir, DrainWait: d.cfg.DrainWait, SweepInterval: d.cfg.Sweep, Now: time.Now,
		Mesh: d.publisher, Registry: d.backend, Identities: ensurer{d.identities}, Names: d.names,
		Readiness: listenTables{Watcher: d.readiness, log: d.component("readiness")}, Capture: d.capture,
		ServiceRanges: d.capture.vipRanges, Unsupported: capture.Probe(), Metrics: d.metrics,
	}
	d.cluster.join(&cfg, d.cfg.Install.bypassed())
	d.pods, err = attach.New(cfg)
	if err != nil {
		return err
	}
	d.publisher.SyncPods(d.pods.SyncTCPPorts)
	return nil
}

// close lets go of what is on disk, and then of the sockets, so that a successor
// finds the disk free; parts that were not made are skipped.
func (d *daemon) close() {
	defer func() {
		for _, socket := range []net.Listener{d.xdsSocket, d.adminSocket} {
			if socket != nil {
				_ = socket.Close() // a second time once it was served
			}
		}
	}()
	d.cluster.close(d.log)
	if d.backend != nil {
		if err := d.backend.Close(); err != nil {
			d.log.Error("registry was not closed cleanly", "error", err)
		}
	}
	if d.db != nil {
		if err := d.db.Close(); err != nil {
			d.log.Error("state.db was not closed cleanly", "error", err)
		}
	}
}

// run serves until ctx ends or a part fails.
func (d *daemon) run(ctx context.Context) error {
	defer d.close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.xds.Serve(ctx, d.xdsSocket) })
	g.Go(func() error { return d.serveAdmin(ctx, d.adminSocket) })
	g.Go(func() error { return d.serveHTTP(ctx) })
	g.Go(func() error { return d.identities.Run(ctx) })
	g.Go(func() error { return d.readiness.Run(ctx) })
	g.Go(func() error { return d.names.client.Run(ctx) })
	g.Go(func() error { return d.publisher.Run(ctx) })
	g.Go(func() error { return d.watchRegistry(ctx) })
	if d.cluster != nil {
		g.Go(func() error { return d.cluster.source.Run(ctx, d.pods.Observe) })
		g.Go(func() error { return d.followPlace(ctx) })
	}
	g.Go(func() error { return d.servePods(ctx) })
	d.log.Info("registrar runs", "version", Version, "node", d.cfg.Mesh.Node, "domain", d.cfg.Mesh.Domain, "registry", d.cfg.Registry)
	return g.Wait()
}

func (d *daemon) watchRegistry(ctx context.Context) error {
	err := d.backend.Watch(ctx, d.publisher.OnRegistry)
	if ctx.Err() == nil {
		return fmt.Errorf("watch the registry: %w", err)
	}
	return ended(ctx.Err())
}

// servePods restores what is attached, lets Envoy be answered, and only then
// opens the CNI socket (contract 4.8, XDS-R21, CNI-29).
func (d *daemon) servePods(ctx context.Context) error {
	if d.publisher.AwaitSynced(ctx) != nil {
		return ended(ctx.Err())
	}
	if err := d.pods.Restore(ctx); err != nil {
		return err
	}
	if oldest, ok := d.pods.Oldest(); ok {
		d.publisher.SetOldest(oldest)
	}
	if err := d.backend.Retain(ctx, recordsOf(d.pods.Pods())); err != nil {
		return fmt.Errorf("withdraw what is left of pods that are gone: %w", err)
	}
	d.awaitPublished(ctx, recordsOf(d.pods.Told()))
	if err := d.names.setPods(d.pods.Pods()); err != nil {
		return err
	}
	d.cache.Release()
	l, err := d.listenCNI(ctx)
	if err != nil {
		return err
	}
	srv := grpc.NewServer(grpc.MaxRecvMsgSize(cniv1.MaxMessage), grpc.MaxSendMsgSize(cniv1.MaxMessage))
	settings := func(p model.Pod) capture.Config { return d.capture.settings(p, d.publisher.TCPPorts()) }
	cniv1.RegisterRegistrarServiceServer(srv, podserver.New(d.pods, settings, d.component("cni")))
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return srv.Serve(l) })
	g.Go(func() error { return d.pods.Run(ctx) })
	installed := make(chan struct{})
	g.Go(func() error {
		defer close(installed)
		return d.install(ctx)
	})
	g.Go(func() error {
		<-ctx.Done()
		<-installed // who leaves the chain keeps the socket until then
		srv.Stop()
		return nil
	})
	err = g.Wait()
	if d.installer != nil && d.installer.State().Removed {
		err = errors.Join(err, dismantle(d.pods, d.cfg.NetnsDir, d.cfg.StateDir))
	}
	return err
}

// publishTimeout bounds how long a start waits for its own pods' records to come
// back from the registry: longer than a slow disk holds a change up.
const publishTimeout = 5 * time.Second

// recordsOf returns the UIDs of the records that attached pods have.
func recordsOf(pods []model.Pod) []string {
	var uids []string
	for _, p := range pods {
		if len(p.Ports) > 0 {
			uids = append(uids, p.Key.String())
		}
	}
	return uids
}

// awaitPublished keeps Envoy unanswered until the records of restored pods are
// projected: a registrar that lost its state must not take away what Envoy has
// (XDS-43, contract 4.8).
func (d *daemon) awaitPublished(ctx context.Context, uids []string) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if err := d.publisher.AwaitProjected(ctx, uids); err != nil {
		d.log.Warn("not all restored pods are projected yet; Envoy is answered without them", "error", err)
	}
}

// ownSocket is for peers of this process's user only: runtimes call as root.
func (d *daemon) ownSocket(path string) unixsocket.Config {
	return unixsocket.Config{
		Path: path, UID: unixsocket.Keep, GID: unixsocket.Keep, Mode: 0o600, Users: []uint32{uint32(os.Geteuid())},
		Lost: d.lost.socket(d.log, path),
	}
}

func (d *daemon) listenCNI(ctx context.Context) (net.Listener, error) {
	// The folder is ours alone: whoever may connect can attach pods.
	if err := os.MkdirAll(filepath.Dir(d.cfg.CNISocket), 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of the CNI socket: %w", err)
	}
	if err := os.Chmod(filepath.Dir(d.cfg.CNISocket), 0o700); err != nil { //nolint:gosec // a folder must be searchable by its owner
		return nil, fmt.Errorf("protect the folder of the CNI socket: %w", err)
	}
	return unixsocket.Listen(ctx, d.ownSocket(d.cfg.CNISocket))
}
