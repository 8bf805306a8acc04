package model

import "net/netip"

// Ranges are the ranges of the mesh's service addresses. No pod may have an address of
// them: what is sent there is taken for a call of a service.
type Ranges []netip.Prefix

// Hit returns the first of the addresses that is a service's, and the range it is in.
func (r Ranges) Hit(addrs []netip.Addr) (addr netip.Addr, in netip.Prefix, hit bool) {
	for _, addr := range addrs {
		for _, in := range r {
			if in.Contains(addr.Unmap()) {
				return addr, in, true
			}
		}
	}
	return netip.Addr{}, netip.Prefix{}, false
}
