package netnstest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// patience bounds what the kernel takes to bring an interface up.
const patience = 5 * time.Second

// End is one end of a pair of interfaces.
type End struct {
	// In is the namespace of the interface.
	In *Namespace
	// Addrs are its addresses as CIDRs (IPv6 without duplicate address detection).
	Addrs []string
}

// Connect joins two namespaces by a pair of interfaces, both with the name of the
// device, and returns when packets can flow between all addresses.
func Connect(tb testing.TB, device string, a, b End) {
	tb.Helper()
	target, err := ns.GetNS(b.In.Path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = target.Close() }()
	a.In.Do(tb, func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: device},
			PeerName:  device, PeerNamespace: netlink.NsFd(target.Fd()),
		})
	})
	a.In.SetUp(tb, device, a.Addrs...)
	b.In.SetUp(tb, device, b.Addrs...)
	for _, n := range []*Namespace{a.In, b.In} {
		n.await(tb, "a carrier on "+device, func() bool {
			link, err := netlink.LinkByName(device)
			return err == nil && link.Attrs().OperState == netlink.OperUp
		})
		for _, addr := range slices.Concat(a.Addrs, b.Addrs) {
			n.await(tb, "a route to "+addr, func() bool { return hasRoute(netip.MustParsePrefix(addr).Addr()) })
		}
	}
}

// SetUp adds addresses (CIDRs) to an interface and sets it up.
func (n *Namespace) SetUp(tb testing.TB, device string, addrs ...string) {
	tb.Helper()
	n.Do(tb, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return fmt.Errorf("find %s: %w", device, err)
		}
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			addr.Flags = unix.IFA_F_NODAD // or it could not be bound at once
			if err := netlink.AddrAdd(link, addr); err != nil {
				return fmt.Errorf("add %s to %s: %w", a, device, err)
			}
		}
		return netlink.LinkSetUp(link)
	})
	for _, addr := range addrs {
		own := netip.MustParsePrefix(addr).Addr()
		n.await(tb, "a local route of "+addr, func() bool {
			routes, err := netlink.RouteGet(own.AsSlice())
			return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
		})
	}
}

// await polls a condition inside the namespace: the kernel brings interfaces,
// addresses and their routes up in its own time, and tells nobody when all of it
// is done.
func (n *Namespace) await(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	n.Do(tb, func() error {
		for deadline := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				return fmt.Errorf("not there after %s: %s", patience, what)
			}
		}
		return nil
	})
}

// hasRoute reports whether the calling thread's namespace has a usable route to
// an address, be it its own.
func hasRoute(to netip.Addr) bool {
	routes, err := netlink.RouteGet(to.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Flags&unix.RTNH_F_LINKDOWN == 0
}
