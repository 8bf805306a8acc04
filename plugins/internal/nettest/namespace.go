package nettest

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Timeout bounds every network operation of a test.
const Timeout = 5 * time.Second

// Namespace is a network namespace with lo up, kept by a mount at Path.
type Namespace struct {
	// Path is where the namespace is mounted.
	Path string
}

// New makes a namespace that lives until the test ends.
func New(tb testing.TB) *Namespace {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	fresh, err := ns.TempNetNS()
	if err != nil {
		tb.Fatalf("make a network namespace (needs root): %v", err)
	}
	defer func() { _ = fresh.Close() }()
	err = fresh.Do(func(ns.NetNS) error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") })
	if err != nil {
		tb.Fatalf("mount a network namespace: %v", err)
	}
	tb.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	n := &Namespace{Path: path}
	n.SetUp(tb, "lo")
	return n
}

// Unmount takes the mount away, as a runtime does that removes the namespace.
func (n *Namespace) Unmount(tb testing.TB) {
	tb.Helper()
	if err := unix.Unmount(n.Path, unix.MNT_DETACH); err != nil {
		tb.Fatal(err)
	}
	if err := os.Remove(n.Path); err != nil {
		tb.Fatal(err)
	}
}

// Do runs fn on a thread inside the namespace. fn must not call tb.Fatal.
func (n *Namespace) Do(tb testing.TB, fn func()) {
	tb.Helper()
	err := ns.WithNetNSPath(n.Path, func(ns.NetNS) error {
		fn()
		return nil
	})
	if err != nil {
		tb.Fatalf("enter %s: %v", n.Path, err)
	}
}

// Connect joins two namespaces by a pair of interfaces named eth0 with these
// addresses (CIDRs; IPv6 without duplicate address detection).
func Connect(tb testing.TB, a *Namespace, addrsA []string, b *Namespace, addrsB []string) {
	tb.Helper()
	target, err := ns.GetNS(b.Path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = target.Close() }()
	a.Do(tb, func() {
		veth := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "eth0"},
			PeerName:  "eth0", PeerNamespace: netlink.NsFd(target.Fd()),
		}
		if err := netlink.LinkAdd(veth); err != nil {
			tb.Errorf("add a pair of interfaces: %v", err)
		}
	})
	a.SetUp(tb, "eth0", addrsA...)
	b.SetUp(tb, "eth0", addrsB...)
	for _, n := range []*Namespace{a, b} {
		n.await(tb, "a carrier on eth0", func() bool {
			link, err := netlink.LinkByName("eth0")
			return err == nil && link.Attrs().OperState == netlink.OperUp
		})
		for _, addr := range append(slices.Clone(addrsA), addrsB...) {
			n.await(tb, "a route to "+addr, func() bool { return hasRoute(netip.MustParsePrefix(addr).Addr()) })
		}
	}
}

// await polls a condition inside the namespace: the kernel brings interfaces,
// addresses and their routes up in its own time, and tells nobody when all of it
// is done.
func (n *Namespace) await(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	n.Do(tb, func() {
		for deadline := time.Now().Add(Timeout); !done(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				tb.Errorf("%s: no %s", n.Path, what)
				return
			}
		}
	})
}

// hasRoute reports whether the calling thread's namespace has a usable route to
// an address, be it its own.
func hasRoute(to netip.Addr) bool {
	routes, err := netlink.RouteGet(to.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Flags&unix.RTNH_F_LINKDOWN == 0
}

// SetUp adds addresses (CIDRs) to an interface and sets it up.
func (n *Namespace) SetUp(tb testing.TB, device string, addrs ...string) {
	tb.Helper()
	n.Do(tb, func() {
		link, err := netlink.LinkByName(device)
		if err != nil {
			tb.Errorf("find %s: %v", device, err)
			return
		}
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				tb.Error(err)
				return
			}
			addr.Flags = unix.IFA_F_NODAD // or it could not be bound at once
			if err := netlink.AddrAdd(link, addr); err != nil {
				tb.Errorf("add %s: %v", a, err)
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			tb.Errorf("set %s up: %v", device, err)
		}
	})
	for _, addr := range addrs {
		own := netip.MustParsePrefix(addr).Addr()
		n.await(tb, "local route of "+addr, func() bool {
			routes, err := netlink.RouteGet(own.AsSlice())
			return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		})
	}
}

// Route adds a default route of the gateway's family.
func (n *Namespace) Route(tb testing.TB, gateway string) {
	tb.Helper()
	gw := netip.MustParseAddr(gateway)
	n.Do(tb, func() {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			all := &net.IPNet{IP: make(net.IP, gw.BitLen()/8), Mask: make(net.IPMask, gw.BitLen()/8)}
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice(), Dst: all})
		}
		if err != nil {
			tb.Errorf("add a default route by %s: %v", gateway, err)
		}
	})
}

// Exec runs a command inside the namespace and returns what it printed on
// standard output.
func (n *Namespace) Exec(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	cmd := exec.CommandContext(tb.Context(), name, args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	n.Do(tb, func() {
		// The child is forked from this thread, and so is inside.
		if err := cmd.Run(); err != nil {
			tb.Errorf("%v: %v: %s", cmd.Args, err, errs.String())
		}
	})
	return out.String()
}

// HasTable reports whether the namespace has the nftables table "family name".
func (n *Namespace) HasTable(tb testing.TB, table string) bool {
	tb.Helper()
	return strings.Contains("\n"+n.Exec(tb, "nft", "list", "tables"), "\ntable "+table+"\n")
}
