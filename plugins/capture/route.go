package capture

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeProtocol marks the routes that are ours (a number that no routing daemon
// has): Remove takes only these away.
const routeProtocol netlink.RouteProtocol = 0x70

// withRoutes runs fn with a route connection of the calling thread's namespace.
func withRoutes(fn func(*netlink.Handle) error) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open routes: %w", err)
	}
	defer h.Close()
	if err := h.SetSocketTimeout(ioTimeout); err != nil {
		return fmt.Errorf("open routes: %w", err)
	}
	return fn(h)
}

// addRoutes adds a route for each VIP range that no route covers: without one a
// connection ends with ENETUNREACH before any rule sees it (dataplane decision 8).
func addRoutes(cfg Config) error {
	return withRoutes(func(h *netlink.Handle) error {
		missing, err := missingRoutes(h, cfg)
		for _, r := range missing {
			if e := h.RouteReplace(&r); e != nil {
				err = errors.Join(err, fmt.Errorf("add route to %v: %w", r.Dst, e))
			}
		}
		return err
	})
}

// missingRoutes returns the routes that have to be added. The device is the
// pod's first interface that is up and has an address of the range's family; a
// pod without one cannot send that family at all, and needs no route.
func missingRoutes(h *netlink.Handle, cfg Config) ([]netlink.Route, error) {
	var out []netlink.Route
	for _, vip := range cfg.VIPRanges {
		v4 := vip.Addr().Is4()
		if !v4 && !cfg.IPv6 || covered(h, vip) {
			continue
		}
		link, err := deviceFor(h, v4)
		if err != nil {
			return nil, err
		}
		if link == 0 {
			continue
		}
		r := netlink.Route{LinkIndex: link, Dst: ipNet(vip), Protocol: routeProtocol}
		if v4 {
			r.Scope = netlink.SCOPE_LINK
		}
		out = append(out, r)
	}
	return out, nil
}

// covered reports whether packets to the whole range leave by some interface
// other than loopback, whose packets are never captured.
func covered(h *netlink.Handle, vip netip.Prefix) bool {
	for _, addr := range []netip.Addr{vip.Addr(), lastAddr(vip)} {
		routes, err := h.RouteGet(addr.AsSlice())
		if err != nil || len(routes) == 0 || routes[0].LinkIndex == loopbackIndex {
			return false
		}
	}
	return true
}

// deviceFor returns the index of the interface for a family, 0 without one.
func deviceFor(h *netlink.Handle, v4 bool) (int, error) {
	links, err := h.LinkList()
	if err != nil {
		return 0, fmt.Errorf("list interfaces: %w", err)
	}
	slices.SortFunc(links, func(a, b netlink.Link) int { return a.Attrs().Index - b.Attrs().Index })
	kind := netlink.FAMILY_V6
	if v4 {
		kind = netlink.FAMILY_V4
	}
	for _, l := range links {
		if l.Attrs().Index == loopbackIndex || l.Attrs().Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := h.AddrList(l, kind)
		if err != nil {
			return 0, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
		}
		for _, a := range addrs {
			if a.IP.IsGlobalUnicast() {
				return l.Attrs().Index, nil
			}
		}
	}
	return 0, nil
}

// removeRoutes takes our routes away.
func removeRoutes() error {
	return withRoutes(func(h *netlink.Handle) error {
		ours := netlink.Route{Protocol: routeProtocol}
		routes, err := h.RouteListFiltered(netlink.FAMILY_ALL, &ours, netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if e := h.RouteDel(&r); e != nil && !errors.Is(e, unix.ESRCH) {
				err = errors.Join(err, fmt.Errorf("delete route to %v: %w", r.Dst, e))
			}
		}
		return err
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: netmask(p)}
}

// lastAddr returns the highest address of a masked range.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i, m := range netmask(p) {
		b[i] |= ^m
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}
