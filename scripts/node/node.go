package node

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// Paths of contract section 7 that the harness itself uses.
const (
	runDir     = "/run/portolan"
	pinDir     = runDir + "/netns"
	stateDir   = "/var/lib/portolan"
	envoyDir   = runDir + "/envoy"
	adminPath  = envoyDir + "/admin.sock"
	runURL     = "http://127.0.0.1:15070"
	dnsURL     = "http://127.0.0.1:15071"
	startLimit = 20 * time.Second
	stopLimit  = 15 * time.Second
)

// Options say how to build the node.
type Options struct {
	// Bin is the folder with registrar, portolan, podserver, envoy and cni/, as
	// `make` fills it. Required.
	Bin string
	// Envoy is the path of another Envoy. When empty it is Bin/envoy.
	Envoy string
	// LogDir is where logs go; it must exist. Required.
	LogDir string
	// RegistrarFlags are added to `registrar run`.
	RegistrarFlags []string
	// Workers is Envoy's --concurrency; 2 when zero.
	Workers int
	// DrainTime is Envoy's --drain-time-s; 2 s when zero. A removed listener
	// holds its pod's network namespace that long.
	DrainTime time.Duration
	// CNIVersion of the conflist; "1.1.0" when empty.
	CNIVersion string
	// Plugin are keys to add to portolan's entry of the conflist.
	Plugin map[string]any
	// Relay puts a Relay between Envoy and the registrar.
	Relay bool
}

// Node is a running node. Safe for concurrent use.
type Node struct {
	// Registrar is `registrar run`.
	Registrar *Process
	// DNS is `registrar dns`.
	DNS *Process
	// Envoy is the node's Envoy.
	Envoy *Process
	// Outside is the world outside the mesh.
	Outside *Outside
	// Relay is nil unless Options asked for one.
	Relay *Relay

	options Options
	chain   *chain

	mu        sync.Mutex
	pods      []*Pod     // guarded by mu; those attached
	processes []*Process // guarded by mu; all there ever were, for their logs
}

// Start starts a node and returns when it is ready to take pods. It fails when one
// of its processes is not up after 20 seconds, with what it waited for, or at once
// when a process ends. Everything it started is ended when it fails.
func Start(ctx context.Context, options Options) (*Node, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if err := checkEnvoy(ctx, options.Envoy); err != nil {
		return nil, err
	}
	n := &Node{options: options}
	n.Registrar = n.newProcess("registrar-run", append([]string{n.Binary("registrar"), "run", "--log-level", "debug"}, options.RegistrarFlags...), nil)
	n.DNS = n.newProcess("registrar-dns", []string{n.Binary("registrar"), "dns", "--log-level", "debug"}, nil)
	n.Envoy = n.newProcess("envoy", n.envoyArgs(), nil)
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(err, n.Close(context.WithoutCancel(ctx)))
	}
	return n, nil
}

// complete fills in the defaults and checks what must be there.
func (o *Options) complete() error {
	if host, err := os.Hostname(); err != nil || host != sandbox.Hostname {
		return fmt.Errorf("start a node: not in a sandbox (host name %q): call it inside sandbox.Run", host)
	}
	if o.Envoy != "" {
		if info, err := os.Stat(o.Envoy); err != nil || info.IsDir() {
			return fmt.Errorf("start a node: Envoy at %s: no such file", o.Envoy)
		}
	}
	o.Envoy = cmp.Or(o.Envoy, filepath.Join(o.Bin, "envoy"))
	o.Workers = cmp.Or(o.Workers, 2)
	o.DrainTime = cmp.Or(o.DrainTime, 2*time.Second)
	o.CNIVersion = cmp.Or(o.CNIVersion, "1.1.0")
	var missing []string
	for _, path := range []string{
		o.Envoy, o.LogDir, filepath.Join(o.Bin, "registrar"), filepath.Join(o.Bin, "portolan"), filepath.Join(o.Bin, "podserver"),
		filepath.Join(o.Bin, "cni/bridge"), filepath.Join(o.Bin, "cni/host-local"),
	} {
		if _, err := os.Stat(path); err != nil {
			missing = append(missing, path)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("start a node: %s missing: run `make build tools`", strings.Join(missing, ", "))
	}
	return nil
}

// Binary is the path of a program that the node runs, such as "registrar".
func (n *Node) Binary(name string) string { return filepath.Join(n.options.Bin, name) }

func (n *Node) envoyArgs() []string {
	return []string{
		n.options.Envoy, "-c", n.bootstrapPath(), "--concurrency", strconv.Itoa(n.options.Workers), "--disable-hot-restart",
		"--drain-strategy", "immediate", "--drain-time-s", strconv.Itoa(int(n.options.DrainTime.Seconds())),
	}
}

func (n *Node) bootstrapPath() string { return filepath.Join(n.options.LogDir, "envoy.yaml") }

// newProcess registers a process, not started, with a log of its own.
func (n *Node) newProcess(name string, argv, env []string) *Process {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := &Process{Name: name, LogPath: filepath.Join(n.options.LogDir, name+".log"), argv: argv, env: env}
	n.processes = append(n.processes, p)
	return p
}

func (n *Node) start(ctx context.Context) error {
	var err error
	if n.chain, err = newChain(n.options); err != nil {
		return err
	}
	if err := os.WriteFile(sandbox.ResolvConf, []byte("nameserver "+ResolverIP+"\n"), 0o644); err != nil {
		return fmt.Errorf("write the node's resolver: %w", err)
	}
	if n.Outside, err = startOutside(ctx); err != nil {
		return err
	}
	if n.options.Relay {
		if n.Relay, err = startRelay(); err != nil {
			return err
		}
	}
	if err := n.StartRegistrar(ctx); err != nil {
		return err
	}
	if err := n.StartDNS(ctx); err != nil {
		return err
	}
	if err := n.StartEnvoy(ctx); err != nil {
		return err
	}
	return n.WaitReady(ctx)
}

// StartRegistrar starts `registrar run` and waits until it is alive; ready it
// is only once its Envoy is connected.
func (n *Node) StartRegistrar(ctx context.Context) error {
	if err := n.Registrar.Start(); err != nil {
		return err
	}
	return await(ctx, "the registrar's /healthz", func(ctx context.Context) error { return getOK(ctx, runURL+"/healthz") }, n.Registrar)
}

// StartDNS starts `registrar dns` and waits until it is alive.
func (n *Node) StartDNS(ctx context.Context) error {
	if err := n.DNS.Start(); err != nil {
		return err
	}
	return await(ctx, "the mesh DNS's /healthz", func(ctx context.Context) error { return getOK(ctx, dnsURL+"/healthz") }, n.DNS)
}

// StartEnvoy asks the registrar for Envoy's configuration, starts Envoy and
// waits until it serves.
func (n *Node) StartEnvoy(ctx context.Context) error {
	if err := os.MkdirAll(envoyDir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", envoyDir, err)
	}
	socket := xdsPath
	if n.Relay != nil {
		socket = relayPath
	}
	bootstrap, err := output(ctx, n.Binary("registrar"), "bootstrap", "--admin-path", adminPath, "--xds-socket", socket)
	if err != nil {
		return err
	}
	if err := os.WriteFile(n.bootstrapPath(), []byte(bootstrap), 0o644); err != nil {
		return fmt.Errorf("write Envoy's configuration: %w", err)
	}
	if err := n.Envoy.Start(); err != nil {
		return err
	}
	return await(ctx, "Envoy's /ready", func(ctx context.Context) error {
		_, err := n.EnvoyAdmin(ctx, "/ready")
		return err
	}, n.Envoy)
}

// WaitReady waits until the registrar says that it is ready.
func (n *Node) WaitReady(ctx context.Context) error {
	return await(ctx, "the registrar's /readyz", func(ctx context.Context) error { return getOK(ctx, runURL+"/readyz") }, n.Registrar)
}

// await waits for one step of a start.
func await(ctx context.Context, what string, check func(context.Context) error, needs ...*Process) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return wait(ctx, what, check, needs...)
}

// Pods are the pods that are attached, in the order of their ADD.
func (n *Node) Pods() []*Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *Node) forget(p *Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = slices.DeleteFunc(n.pods, func(other *Pod) bool { return other == p })
}

// Close deletes the pods, stops the processes and removes what the node has
// made, so that another node can be started in the same sandbox.
func (n *Node) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	var errs []error
	for _, p := range n.Pods() {
		errs = append(errs, p.Delete(ctx))
	}
	errs = append(errs, n.Envoy.Stop(ctx))
	if n.Relay != nil {
		errs = append(errs, n.Relay.close())
	}
	errs = append(errs, n.DNS.Stop(ctx), n.Registrar.Stop(ctx))
	if n.Outside != nil {
		errs = append(errs, n.Outside.close())
	}
	if link, err := netlink.LinkByName(Bridge); err == nil {
		errs = append(errs, netlink.LinkDel(link))
	}
	errs = append(errs, emptyNetnsDir(netnsDir), emptyNetnsDir(pinDir), empty(runDir), empty(stateDir), empty(cniStateDir))
	return errors.Join(errs...)
}

// Pins are the network namespaces that the plugin holds, by file name: none is
// left when every pod is deleted. What the registrar keeps for itself there has
// a name with a leading dot.
func (n *Node) Pins() ([]string, error) {
	found, err := names(pinDir)
	return slices.DeleteFunc(found, func(name string) bool { return strings.HasPrefix(name, ".") }), err
}

// names are the files in dir; an uninstalled mesh has left no folder.
func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list: %w", err)
	}
	found := make([]string, 0, len(entries))
	for _, entry := range entries {
		found = append(found, entry.Name())
	}
	return found, nil
}

func emptyNetnsDir(dir string) error {
	found, err := names(dir)
	errs := []error{err}
	for _, name := range found {
		errs = append(errs, removeNetns(filepath.Join(dir, name)))
	}
	return errors.Join(errs...)
}

// empty removes what is in dir, except the mount at pinDir.
func empty(dir string) error {
	found, err := names(dir)
	errs := []error{err}
	for _, name := range found {
		if path := filepath.Join(dir, name); path != pinDir {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(errs...)
}

// DumpLogs writes the last lines of every log.
func (n *Node) DumpLogs(w io.Writer, lines int) {
	n.mu.Lock()
	processes := slices.Clone(n.processes)
	n.mu.Unlock()
	processes = append(processes, &Process{Name: "CNI plugins", LogPath: filepath.Join(n.options.LogDir, pluginLog)})
	var b bytes.Buffer
	for _, p := range processes {
		if _, err := os.Stat(p.LogPath); err == nil {
			fmt.Fprintf(&b, "--- %s (%s)\n%s\n", p.Name, p.LogPath, p.LogTail(lines))
		}
	}
	_, _ = w.Write(b.Bytes())
}
