package app

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/miekg/dns"
	"github.com/spf13/pflag"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
)

// The defaults of contract 7.
const (
	defaultCNISocket   = "/run/portolan/cni/cni.sock"
	defaultXDSSocket   = "/run/portolan/xds/xds.sock"
	defaultDNSSocket   = "/run/portolan/dns/dns.sock"
	defaultAdminSocket = "/run/portolan/admin.sock"
	defaultEnvoyAdmin  = "/run/portolan/envoy/admin.sock"
	defaultNetnsDir    = "/run/portolan/netns"
	defaultSpoolDir    = "/run/portolan/spool"
	defaultStateDir    = "/var/lib/portolan"
	defaultHTTP        = "127.0.0.1:15070"
	defaultDNSHTTP     = "127.0.0.1:15071"
	defaultDomain      = "aether.internal"
	defaultVIP4        = "198.18.0.0/15"
	defaultVIP6        = "fd70:6f72:746f::/64"
)

// meshConfig names the mesh and this node's place in it.
type meshConfig struct {
	Node           string
	Domain         string
	TrustDomain    string
	FlatNamespaces []string
	Region, Zone   string
	VIP4, VIP6     string
	UnknownCap     int
	Retention      time.Duration
}

func (c *meshConfig) flags(f *pflag.FlagSet) {
	f.StringVar(&c.Node, "node-name", "", "name of this node (default: the host name)")
	f.StringVar(&c.Domain, "mesh-domain", defaultDomain, "domain of the mesh's names")
	f.StringVar(&c.TrustDomain, "trust-domain", "", "SPIFFE trust domain (default: the mesh domain)")
	f.StringSliceVar(&c.FlatNamespaces, "flat-namespaces", []string{"default"}, "namespaces whose services also have the short name <service>.<mesh-domain>; the first listed wins")
	f.StringVar(&c.Region, "region", "", "region of this node, for locality failover")
	f.StringVar(&c.Zone, "zone", "", "zone of this node")
	f.StringVar(&c.VIP4, "vip-range", defaultVIP4, "IPv4 range of service addresses")
	f.StringVar(&c.VIP6, "vip-range6", defaultVIP6, "IPv6 range of service addresses")
	f.IntVar(&c.UnknownCap, "unknown-names", 1000, "how many unknown names are remembered before they are refused without being remembered")
	f.DurationVar(&c.Retention, "service-retention", 10*time.Minute, "how long a service without endpoints stays known")
}

// complete fills what has a derived default and refuses what is wrong.
func (c *meshConfig) complete() (vip4, vip6 netip.Prefix, err error) {
	if c.Node == "" {
		if c.Node, err = os.Hostname(); err != nil {
			return vip4, vip6, fmt.Errorf("--node-name is empty and the host has no name: %w", err)
		}
	}
	if c.TrustDomain == "" {
		c.TrustDomain = c.Domain
	}
	var errs []error
	if err := authority.ValidateDomain(c.Domain); err != nil {
		errs = append(errs, fmt.Errorf("--mesh-domain: %w", err))
	}
	for _, ns := range c.FlatNamespaces {
		if !authority.ValidLabel(ns) {
			errs = append(errs, fmt.Errorf("--flat-namespaces: %q is not a DNS label", ns))
		}
	}
	if vip4, err = netip.ParsePrefix(c.VIP4); err != nil || !vip4.Addr().Is4() {
		errs = append(errs, fmt.Errorf("--vip-range %q: need an IPv4 range such as %s", c.VIP4, defaultVIP4))
	}
	if vip6, err = netip.ParsePrefix(c.VIP6); err != nil || !vip6.Addr().Is6() {
		errs = append(errs, fmt.Errorf("--vip-range6 %q: need an IPv6 range such as %s", c.VIP6, defaultVIP6))
	}
	return vip4, vip6, errors.Join(errs...)
}

// nodePaths are where the plugin and the registrar of a node meet, and what the
// registrar keeps there: every command of a node is told the same.
type nodePaths struct {
	CNISocket, NetnsDir, SpoolDir, StateDir string
}

func (p *nodePaths) flags(f *pflag.FlagSet) {
	p.pluginFlags(f)
	f.StringVar(&p.StateDir, "state-dir", defaultStateDir, "folder of what survives a restart of 'registrar run'")
}

// pluginFlags are those of the paths that the plugin is told.
func (p *nodePaths) pluginFlags(f *pflag.FlagSet) {
	f.StringVar(&p.CNISocket, "cni-socket", defaultCNISocket, "where the CNI plugin calls 'registrar run'")
	f.StringVar(&p.NetnsDir, "netns-dir", defaultNetnsDir, "folder of the plugin's network namespace pins")
	f.StringVar(&p.SpoolDir, "spool-dir", defaultSpoolDir, "folder of what the plugin could not deliver")
}

func (p *nodePaths) validate() error {
	return errors.Join(p.validatePlugin(), absolute("state-dir", p.StateDir))
}

// validatePlugin is validate for the paths that the plugin is told.
func (p *nodePaths) validatePlugin() error {
	return errors.Join(absolute("cni-socket", p.CNISocket), absolute("netns-dir", p.NetnsDir), absolute("spool-dir", p.SpoolDir))
}

// absolute refuses a path that means something else in another working folder.
func absolute(flag, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("--%s %q: need an absolute path", flag, path)
	}
	return nil
}

// runConfig is everything `registrar run` can be told.
type runConfig struct {
	nodePaths
	Mesh        meshConfig
	XDSSocket   string
	DNSSocket   string
	AdminSocket string
	HTTPAddress string
	DNSUpstream []string
	Registry    string
	Install     installConfig
	Cluster     clusterConfig
	DrainWait   time.Duration
	Sweep       time.Duration
	Identity    identityConfig
	XDSGroup    int
	LogLevel    string
}

func (c *runConfig) flags(f *pflag.FlagSet) {
	c.Mesh.flags(f)
	c.nodePaths.flags(f)
	f.StringVar(&c.XDSSocket, "xds-socket", defaultXDSSocket, "where Envoy connects")
	f.StringVar(&c.DNSSocket, "dns-socket", defaultDNSSocket, "where 'registrar dns' listens")
	f.StringVar(&c.AdminSocket, "admin-socket", defaultAdminSocket, "where 'registrar status' asks")
	f.StringVar(&c.HTTPAddress, "http-address", defaultHTTP, "loopback address of /metrics, /healthz and /readyz")
	f.StringSliceVar(&c.DNSUpstream, "dns-upstream", nil, "resolvers for names outside the mesh, host or host:port (default: this host's resolv.conf)")
	f.StringVar(&c.Registry, "registry", backendEmbedded, "where endpoints are kept: embedded (on this machine) or kubernetes (shared by all nodes)")
	c.Cluster.flags(f)
	c.Identity.flags(f)
	c.Install.flags(f)
	f.DurationVar(&c.DrainWait, "drain-wait", time.Second, "how long DEL waits at most until this node's Envoy has let go of the pod")
	f.DurationVar(&c.Sweep, "sweep-interval", 10*time.Second, "how often attachments whose pod is gone, the spool and the captures are looked at")
	f.IntVar(&c.XDSGroup, "xds-socket-gid", -1, "group that may connect to the xDS socket; -1 leaves it as created")
	f.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
}

func (c *runConfig) validate() error {
	var errs []error
	if c.Registry != backendEmbedded && c.Registry != backendKubernetes {
		errs = append(errs, fmt.Errorf("--registry %q: use %s or %s", c.Registry, backendEmbedded, backendKubernetes))
	}
	if c.Registry == backendKubernetes {
		errs = append(errs, c.Cluster.validate())
	}
	errs = append(errs, c.nodePaths.validate(),
		absolute("xds-socket", c.XDSSocket), absolute("dns-socket", c.DNSSocket), absolute("admin-socket", c.AdminSocket))
	if c.Sweep <= 0 {
		errs = append(errs, fmt.Errorf("--sweep-interval %s: need a time above 0", c.Sweep))
	}
	if c.DrainWait < 0 {
		errs = append(errs, fmt.Errorf("--drain-wait %s: need 0 or a time", c.DrainWait))
	}
	if c.Mesh.UnknownCap < 1 {
		errs = append(errs, fmt.Errorf("--unknown-names %d: need at least 1", c.Mesh.UnknownCap))
	}
	if c.Mesh.Retention <= 0 {
		errs = append(errs, fmt.Errorf("--service-retention %s: need a time above 0", c.Mesh.Retention))
	}
	errs = append(errs, c.Identity.validate(c.Registry), c.Install.validate())
	if err := loopbackAddress(c.HTTPAddress); err != nil {
		errs = append(errs, fmt.Errorf("--http-address %w", err))
	}
	return errors.Join(errs...)
}

// projection says what of it the projection is made with.
func (c *runConfig) projection(vip4, vip6 netip.Prefix) projection.Config {
	return projection.Config{
		Node: c.Mesh.Node, Domain: c.Mesh.Domain, FlatNamespaces: c.Mesh.FlatNamespaces, VIP4: vip4, VIP6: vip6,
		UnknownCap: c.Mesh.UnknownCap, Retention: c.Mesh.Retention,
	}
}

func loopbackAddress(s string) error {
	ap, err := netip.ParseAddrPort(s)
	if err != nil || !ap.Addr().IsLoopback() {
		return fmt.Errorf("%q: need a loopback address with a port, such as %s", s, defaultHTTP)
	}
	return nil
}

// resolvers turns the flag, or the host's resolv.conf, into addresses. No
// resolver at all is allowed: names outside the mesh then fail at once.
func resolvers(flag []string, resolvConf string) ([]netip.AddrPort, error) {
	if len(flag) == 0 {
		conf, err := dns.ClientConfigFromFile(resolvConf)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read resolvers from %s (or give --dns-upstream): %w", resolvConf, err)
		}
		for _, s := range conf.Servers {
			flag = append(flag, net.JoinHostPort(s, conf.Port))
		}
	}
	out := make([]netip.AddrPort, 0, len(flag))
	for _, s := range flag {
		ap, err := netip.ParseAddrPort(s)
		if err != nil {
			a, err2 := netip.ParseAddr(strings.Trim(s, "[]"))
			if err2 != nil {
				return nil, fmt.Errorf("--dns-upstream %q: need an IP address or address:port", s)
			}
			ap = netip.AddrPortFrom(a, 53)
		}
		out = append(out, ap)
	}
	return out, nil
}
