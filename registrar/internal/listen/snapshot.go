package listen

import (
	"net/netip"
	"slices"
)

// loopbackIndex is the index of lo, the first interface of every namespace.
const loopbackIndex = 1

// socket is one listening socket, as far as it matters who can reach it.
type socket struct {
	addr netip.AddrPort
	// device is the interface that the socket is bound to, 0 for none.
	device uint32
	// v6only: takes no IPv4 connections. Means nothing for an IPv4 address.
	v6only bool
}

func (s socket) compare(o socket) int {
	switch {
	case s.addr.Port() != o.addr.Port():
		return int(s.addr.Port()) - int(o.addr.Port())
	case s.addr != o.addr:
		return s.addr.Addr().Compare(o.addr.Addr())
	case s.device != o.device:
		return int(int64(s.device) - int64(o.device))
	case s.v6only != o.v6only:
		if s.v6only {
			return 1
		}
		return -1
	}
	return 0
}

// everywhere reports whether the socket takes IPv4 connections at any address.
func (s socket) everywhere() bool {
	a := s.addr.Addr()
	return s.device == 0 && a.IsUnspecified() && (a.Is4() || !s.v6only)
}

// reached reports whether a connection to 127.0.0.1 reaches the socket.
func (s socket) reached() bool {
	switch a := s.addr.Addr(); {
	case s.device != 0 && s.device != loopbackIndex:
		return false
	case a.IsUnspecified():
		return a.Is4() || !s.v6only
	default:
		return a == netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
}

// Snapshot is a listen table at one time. It is a value that nobody changes; the
// zero value is an empty table.
type Snapshot struct {
	// sockets, sorted and each one once: a server with a socket per core has one.
	sockets []socket
}

// newSnapshot takes sockets over.
func newSnapshot(sockets []socket) Snapshot {
	slices.SortFunc(sockets, socket.compare)
	return Snapshot{sockets: slices.Compact(sockets)}
}

// NewSnapshot returns the table of listeners at these addresses, bound to no
// interface, an IPv6 one dual-stack.
func NewSnapshot(addrs ...netip.AddrPort) Snapshot {
	sockets := make([]socket, 0, len(addrs))
	for _, a := range addrs {
		sockets = append(sockets, socket{addr: netip.AddrPortFrom(a.Addr().Unmap(), a.Port())})
	}
	return newSnapshot(sockets)
}

// at returns the sockets of a port.
func (s Snapshot) at(port uint16) []socket {
	first, _ := slices.BinarySearchFunc(s.sockets, port, func(x socket, p uint16) int { return int(x.addr.Port()) - int(p) })
	last := first
	for last < len(s.sockets) && s.sockets[last].addr.Port() == port {
		last++
	}
	return s.sockets[first:last]
}

// Listens reports whether a connection to 127.0.0.1:port, the app hop (contract
// 4.3), reaches a listener: one on 127.0.0.1, on 0.0.0.0, or on a dual-stack ::.
// One that is bound to an interface other than lo is not reached.
func (s Snapshot) Listens(port uint16) bool {
	return slices.ContainsFunc(s.at(port), socket.reached)
}

// OnlyOn returns the addresses, ascending, at which the port listens while the app
// hop does not reach any of its listeners; nil when Listens, or when nothing
// listens. The address 0.0.0.0 or :: in it means one interface, or IPv6 only.
func (s Snapshot) OnlyOn(port uint16) []netip.Addr {
	var out []netip.Addr
	for _, x := range s.at(port) {
		if x.reached() {
			return nil
		}
		out = append(out, x.addr.Addr())
	}
	return slices.Compact(out)
}

// Everywhere reports whether the port listens at every IPv4 address of the
// namespace: on 0.0.0.0 or a dual-stack ::, bound to no interface.
func (s Snapshot) Everywhere(port uint16) bool {
	return slices.ContainsFunc(s.at(port), socket.everywhere)
}

// Bound reports whether a socket listens at exactly this address and port, bound
// to no interface. An IPv4-mapped address is the IPv4 address.
func (s Snapshot) Bound(addr netip.AddrPort) bool {
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	return slices.ContainsFunc(s.at(addr.Port()), func(x socket) bool { return x.device == 0 && x.addr == addr })
}

// Len is the number of different listeners.
func (s Snapshot) Len() int { return len(s.sockets) }
