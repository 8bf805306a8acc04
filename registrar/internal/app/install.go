package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	clientgo "k8s.io/client-go/kubernetes"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/birthtaint"
	"github.com/portolan-mesh/portolan/registrar/internal/installer"
	"github.com/portolan-mesh/portolan/registrar/internal/installer/daemonset"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
)

// Where runtimes look by default.
const (
	defaultConfDir  = "/etc/cni/net.d"
	defaultBinDir   = "/opt/cni/bin"
	defaultConfName = "00-portolan.conflist"
	// installPoll is how often the chain is looked at although nothing was noticed.
	installPoll = 5 * time.Second
	// taintPoll is how often is looked whether the birth taint can go.
	taintPoll = time.Second
)

// defaultBypass is what the plugin bypasses when its configuration names nothing
// (contract 7).
func defaultBypass() []string { return []string{"kube-system", "portolan-system"} }

// bypassList are namespaces whose pods never join the mesh. The plugin, the registrar and
// the signer are told the same ones.
type bypassList []string

func (b *bypassList) flag(f *pflag.FlagSet) {
	f.StringSliceVar((*[]string)(b), "bypass-namespaces", defaultBypass(), "namespaces whose pods never join the mesh and never wait for it")
}

func (b bypassList) validate() error {
	var errs []error
	for _, ns := range b {
		if !authority.ValidLabel(ns) {
			errs = append(errs, fmt.Errorf("--bypass-namespaces: %q is not a DNS label", ns))
		}
	}
	return errors.Join(errs...)
}

// and adds the mesh's own namespace, which is bypassed whatever the list says; empty is
// none. The result is sorted.
func (b bypassList) and(own string) []string {
	all := slices.Clone(b)
	if own != "" {
		all = append(all, own)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// chainDirs are the runtime's folders. None: nothing is installed.
type chainDirs struct{ ConfDir, BinDir string }

func (d *chainDirs) flags(f *pflag.FlagSet, confDir, binDir string) {
	none := ""
	if confDir == "" {
		none = " (default: nothing is installed)"
	}
	f.StringVar(&d.ConfDir, "cni-conf-dir", confDir, "folder of the runtime's network configurations, with the chain that the plugin is in"+none)
	f.StringVar(&d.BinDir, "cni-bin-dir", binDir, "folder of the runtime's CNI plugins, with the plugin's binary"+none)
}

func (d *chainDirs) enabled() bool { return d.ConfDir != "" || d.BinDir != "" }

func (d *chainDirs) validate() error {
	return errors.Join(absolute("cni-conf-dir", d.ConfDir), absolute("cni-bin-dir", d.BinDir))
}

// installConfig says what is installed where.
type installConfig struct {
	chainDirs
	Source, ConfName string
	Bypass           bypassList
	DaemonSet        string
	BirthTaint       bool
}

// flags are those of `registrar run`, where installing is off by default.
func (c *installConfig) flags(f *pflag.FlagSet) {
	c.chainFlags(f, "", "")
	f.StringVar(&c.DaemonSet, "daemonset", "", "namespace/name of the DaemonSet that this process is of: its namespace is bypassed, and when it is deleted the plugin leaves the chain as this process ends (default: it stays)")
	f.BoolVar(&c.BirthTaint, "birth-taint", false, "remove the taint "+birthtaint.Key+" from this node once pods can be added; kubelet sets it by --register-with-taints")
}

// chainFlags are those that `registrar install` has as well.
func (c *installConfig) chainFlags(f *pflag.FlagSet, confDir, binDir string) {
	c.chainDirs.flags(f, confDir, binDir)
	f.StringVar(&c.Source, "cni-bin-source", "", "the plugin's binary to install (default: "+installer.PluginType+" beside this program)")
	f.StringVar(&c.ConfName, "cni-conf-name", defaultConfName, "name of our own list, for a primary whose configuration cannot be chained in place")
	c.Bypass.flag(f)
}

func (c *installConfig) validate() error {
	var errs []error
	if c.enabled() {
		errs = append(errs, c.chainDirs.validate())
	}
	errs = append(errs, c.Bypass.validate())
	if namespace, name, ok := strings.Cut(c.DaemonSet, "/"); c.DaemonSet != "" && (!ok || namespace == "" || name == "") {
		errs = append(errs, fmt.Errorf("--daemonset %q: need namespace/name", c.DaemonSet))
	}
	return errors.Join(errs...)
}

// bypassed are the namespaces whose pods never join.
func (c *installConfig) bypassed() []string {
	own, _, _ := strings.Cut(c.DaemonSet, "/")
	return c.Bypass.and(own)
}

// complete is the installer's configuration. Paths are written into the plugin's
// entry only where they are not the plugin's own defaults.
func (c *installConfig) complete(paths nodePaths) (installer.Config, error) {
	source := c.Source
	if source == "" {
		self, err := os.Executable()
		if err != nil {
			return installer.Config{}, fmt.Errorf("where this program is (or give --cni-bin-source): %w", err)
		}
		source = filepath.Join(filepath.Dir(self), installer.PluginType)
	}
	bypass := c.bypassed()
	if slices.Equal(bypass, defaultBypass()) {
		bypass = nil
	}
	return installer.Config{
		ConfDir: c.ConfDir, BinDir: c.BinDir, Source: source, OwnedName: c.ConfName, Poll: installPoll, Now: time.Now,
		Entry: installer.Entry{
			Socket: changed(paths.CNISocket, defaultCNISocket), SpoolDir: changed(paths.SpoolDir, defaultSpoolDir), NetnsDir: changed(paths.NetnsDir, defaultNetnsDir),
			BypassNamespaces: bypass,
		},
	}, nil
}

func changed(value, byDefault string) string {
	if value == byDefault {
		return ""
	}
	return value
}

// makeInstaller makes what keeps the plugin installed and takes the birth taint away.
func (d *daemon) makeInstaller() error {
	c := d.cfg.Install
	if c.BirthTaint {
		config, err := kubernetesConfig(d.cfg.Cluster.Kubeconfig)
		if err != nil {
			return fmt.Errorf("--birth-taint: %w", err)
		}
		client, err := corev1.NewForConfig(config)
		if err != nil {
			return fmt.Errorf("--birth-taint: %w", err)
		}
		d.taint, err = birthtaint.New(birthtaint.Config{
			Client: client, Node: d.cfg.Mesh.Node, Ready: func() bool { return d.missing() == "" }, Interval: taintPoll, Now: time.Now,
			Log: d.component("birthtaint"), Metrics: d.metrics,
		})
		if err != nil {
			return err
		}
	}
	if !c.enabled() {
		return nil
	}
	cfg, err := c.complete(d.cfg.nodePaths)
	if err != nil {
		return err
	}
	cfg.Instance, cfg.Log, cfg.Metrics = d.cfg.Mesh.Node+"-"+rand.Text(), d.component("installer"), d.metrics
	if d.removal != nil { // a nil pointer in an interface is not nil
		cfg.Removal = d.removal
	}
	d.installer, err = installer.New(cfg)
	return err
}

// makeRemoval makes what knows whether our DaemonSet is deleted; without one nothing
// is ever removed.
func (d *daemon) makeRemoval() error {
	namespace, name, ok := strings.Cut(d.cfg.Install.DaemonSet, "/")
	if !ok || !d.cfg.Install.enabled() {
		return nil
	}
	config, err := kubernetesConfig(d.cfg.Cluster.Kubeconfig)
	if err != nil {
		return fmt.Errorf("--daemonset: %w", err)
	}
	client, err := clientgo.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("--daemonset: %w", err)
	}
	d.removal = daemonset.New(daemonset.Config{Client: client, Namespace: namespace, Name: name, Log: d.component("installer")})
	return nil
}

// leaving reports whether the mesh is being deleted, as far as was seen.
func (d *daemon) leaving() bool { return d.removal != nil && d.removal.Seen() }

// install keeps the plugin installed until ctx ends, and longer when it has to be
// taken out. The CNI socket is open before it starts and until it returned (CNI-D7).
func (d *daemon) install(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	if d.removal != nil {
		// It is asked after ctx has ended, and is to know then.
		watching, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop()
		go d.removal.Run(watching)
	}
	if d.installer != nil {
		g.Go(func() error { return d.installer.Run(ctx) })
	}
	if d.taint != nil {
		g.Go(func() error { return d.taint.Run(ctx) })
	}
	return g.Wait()
}

// missing says why no pod could join the mesh now; "" when one could.
func (d *daemon) missing() string {
	missing := []string{d.pods.Missing(), d.lost.missing(), missingRoots(d.identities.Bundle(), d.cfg.Mesh.TrustDomain)}
	if d.installer != nil {
		if s := d.installer.State(); !s.Chained {
			missing = append(missing, "the plugin is not in the CNI chain: "+s.Problem)
		}
	}
	return strings.Join(slices.DeleteFunc(missing, func(s string) bool { return s == "" }), "; ")
}

func newInstallCommand(s streams) *cobra.Command {
	var (
		c     installConfig
		paths nodePaths
	)
	cmd := &cobra.Command{
		Use:   "install",
		Short: "put the CNI plugin into this node's chain, once",
		Long: "install copies the plugin's binary and puts the plugin into the network configuration that the runtime\n" +
			"loads. Nothing watches it afterwards: `registrar run` with --cni-conf-dir and --cni-bin-dir does.\n\n" +
			"Exit status: 0 when the plugin is in the chain, 1 with the reason when it is not.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(c.validate(), paths.validatePlugin()); err != nil {
				return err
			}
			cfg, err := c.complete(paths)
			if err != nil {
				return err
			}
			return runInstall(cmd.Context(), cfg, paths.CNISocket, s)
		},
	}
	f := cmd.Flags()
	c.chainFlags(f, defaultConfDir, defaultBinDir)
	paths.pluginFlags(f)
	return cmd
}

func runInstall(ctx context.Context, cfg installer.Config, socket string, s streams) error {
	cfg.Log = slog.New(slog.DiscardHandler) // the result says it all
	i, err := installer.New(cfg)
	if err != nil {
		return err
	}
	got := i.Install(ctx)
	if !got.Chained {
		return fmt.Errorf("the plugin is not in the CNI chain: %s", got.Problem)
	}
	fmt.Fprintf(s.out, "%s: the binary is in place\n%s: the plugin is in the chain\n", filepath.Join(cfg.BinDir, installer.PluginType), got.File)
	if got.Problem != "" {
		fmt.Fprintf(s.out, "not as it should be: %s\n", got.Problem)
	}
	if !served(ctx, socket) {
		fmt.Fprintf(s.out, "%s: nothing listens there yet; pods that ask for the mesh wait until `registrar run` does\n", socket)
	}
	return nil
}

// uninstallConfig says what is taken from where.
type uninstallConfig struct {
	chainDirs
	nodePaths
	Binary, CA bool
}

func newUninstallCommand(s streams) *cobra.Command {
	var c uninstallConfig
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "take the mesh off this node",
		Long: "uninstall takes the plugin out of every network configuration, whoever put it there, and then the mesh off\n" +
			"the node: its pods go on without their capture, and the plugin's pins and notes, certificates and keys are\n" +
			"removed. Run it in the node's own mount namespace. It does what a registrar does that ends because the mesh\n" +
			"was deleted, for a node whose registrar was away then.\n\n" +
			"The binary stays, because runtimes call it to delete pods that were added with it; it succeeds without a\n" +
			"registrar. So do, for another installation, the names and addresses that services have, and the built-in CA\n" +
			"of a machine of its own; in a cluster the CA is not on the nodes.\n\n" +
			"Exit status: 0 when it is done, 1 with what is left when it is not, or when a registrar runs.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runUninstall(cmd.Context(), c, s) },
	}
	f := cmd.Flags()
	c.chainDirs.flags(f, defaultConfDir, defaultBinDir)
	c.nodePaths.flags(f)
	f.BoolVar(&c.Binary, "remove-binary", false, "remove the binary, too: only when no pod is left that was added with it, or it cannot be deleted any more")
	f.BoolVar(&c.CA, "remove-ca", false, "remove the built-in CA of a machine of its own, too: what trusts it trusts nothing of a later installation")
	return cmd
}

func runUninstall(ctx context.Context, c uninstallConfig, s streams) (err error) {
	if err := errors.Join(c.chainDirs.validate(), c.nodePaths.validate()); err != nil {
		return err
	}
	if served(ctx, c.CNISocket) {
		return fmt.Errorf("a registrar serves on %s and would put the plugin back: stop it first", c.CNISocket)
	}
	log := slog.New(slog.NewTextHandler(s.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	// Held until the end, so that no registrar starts meanwhile, or is about to serve.
	db, _, err := state.Open(filepath.Join(c.StateDir, stateFile), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	pods, err := attach.New(attach.Config{
		DB: db, Log: log, NetnsDir: c.NetnsDir, SpoolDir: c.SpoolDir, Capture: netnsCapture{netnsDir: c.NetnsDir},
	})
	if err != nil {
		return err
	}
	changes, err := installer.Uninstall(ctx, c.ConfDir)
	for _, done := range changes {
		fmt.Fprintf(s.out, "%s: %s\n", done.File, done.What)
	}
	if err != nil {
		return err
	}
	if len(changes) == 0 {
		fmt.Fprintf(s.out, "%s: no network configuration has the plugin\n", c.ConfDir)
	}
	if err := dismantle(pods, c.NetnsDir, c.StateDir); err != nil {
		return fmt.Errorf("take the mesh off the node's pods: %w", err)
	}
	fmt.Fprintf(s.out, "%s, %s and certificates: removed; the node's pods go on without the mesh\n", c.NetnsDir, c.SpoolDir)
	if err := c.leaveCA(s); err != nil || !c.Binary {
		return err
	}
	removed, err := installer.RemoveBinary(c.BinDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		fmt.Fprintf(s.out, "%s: %s\n", removed.File, removed.What)
	}
	return err
}

// leaveCA says that the built-in CA is kept, or removes it.
func (c uninstallConfig) leaveCA(s streams) error {
	dir := filepath.Join(c.StateDir, caFolder)
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if !c.CA {
		fmt.Fprintf(s.out, "%s: the built-in CA is kept; --remove-ca removes it\n", dir)
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the built-in CA: %w", err)
	}
	fmt.Fprintf(s.out, "%s: removed\n", dir)
	return nil
}

// served reports whether a process accepts connections on a unix socket.
func served(ctx context.Context, socket string) bool {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return false
	}
	_ = conn.Close() // nothing was said
	return true
}
