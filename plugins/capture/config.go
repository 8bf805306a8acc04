package capture

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// The ports of the mesh inside a pod's network namespace (contract 7).
const (
	// PortHTTP is the outbound HTTP listener.
	PortHTTP = 15001
	// PortTCP is the outbound TCP listener.
	PortTCP = 15002
	// PortInbound is the inbound listener. Nothing is redirected to it: peers dial it.
	PortInbound = 15008
	// PortDNS is the mesh-DNS server, UDP and TCP.
	PortDNS = 15053
)

// Mark is the socket mark of the mesh's own sockets in a pod's namespace: what
// carries it is never captured (CNI-60).
const Mark uint32 = 0x706f7274

// portDNS is where DNS servers listen.
const portDNS = 53

// Config says what is captured in one pod's namespace. It is a value: every
// function takes its own copy and changes nothing of it.
type Config struct {
	// VIPRanges are the ranges of service addresses, at most one of each family.
	VIPRanges []netip.Prefix
	// TCPPorts are the (VIP, port) pairs of raw TCP. A pair of a family without
	// a VIP range is left out.
	TCPPorts []netip.AddrPort
	// ExcludePorts are the TCP ports that are never captured; 53 among them
	// also leaves DNS alone.
	ExcludePorts []uint16
	// ExcludeRanges are the destinations that are never captured.
	ExcludeRanges []netip.Prefix
	// DNS says whether DNS is captured while the mesh-DNS process lives.
	DNS bool
	// IPv6 says whether the pod has usable IPv6: without it no route is made for
	// the IPv6 range. The rules are there in any case, so that a pod whose IPv6
	// comes up later is refused rather than let past the mesh (CNI-52).
	IPv6 bool
}

// FromProto reads the registrar's answer. The error names the field.
func FromProto(c *cniv1.Capture) (Config, error) {
	if err := c.Validate(); err != nil {
		return Config{}, fmt.Errorf("read capture: %w", err)
	}
	cfg := Config{DNS: c.GetDns(), IPv6: c.GetIpv6()}
	var err error
	if cfg.VIPRanges, err = parsePrefixes(c.GetVipRanges()); err != nil {
		return Config{}, fmt.Errorf("read capture: vip_ranges: %w", err)
	}
	if cfg.ExcludeRanges, err = parsePrefixes(c.GetExcludeRanges()); err != nil {
		return Config{}, fmt.Errorf("read capture: exclude_ranges: %w", err)
	}
	for _, p := range c.GetTcpPorts() {
		addr, err := netip.ParseAddr(p.GetAddress())
		if err != nil {
			return Config{}, fmt.Errorf("read capture: tcp_ports: %w", err)
		}
		cfg.TCPPorts = append(cfg.TCPPorts, netip.AddrPortFrom(addr.Unmap(), uint16(p.GetPort())))
	}
	for _, p := range c.GetExcludePorts() {
		cfg.ExcludePorts = append(cfg.ExcludePorts, uint16(p))
	}
	return cfg, nil
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// ToProto is the reverse of FromProto.
func (c Config) ToProto() *cniv1.Capture {
	out := &cniv1.Capture{Dns: c.DNS, Ipv6: c.IPv6}
	for _, p := range c.VIPRanges {
		out.VipRanges = append(out.VipRanges, p.String())
	}
	for _, p := range c.TCPPorts {
		out.TcpPorts = append(out.TcpPorts, &cniv1.AddressPort{Address: p.Addr().String(), Port: uint32(p.Port())})
	}
	for _, p := range c.ExcludePorts {
		out.ExcludePorts = append(out.ExcludePorts, uint32(p))
	}
	for _, p := range c.ExcludeRanges {
		out.ExcludeRanges = append(out.ExcludeRanges, p.String())
	}
	return out
}

// normal returns the config in the one order and form that the rules are built
// from: equal configs give equal rules whatever order they came in (I5).
func (c Config) normal() (Config, error) {
	out := Config{DNS: c.DNS && !slices.Contains(c.ExcludePorts, portDNS), IPv6: c.IPv6}
	var four, six int
	for _, p := range c.VIPRanges {
		if !p.IsValid() || p.Addr().Is4In6() {
			return Config{}, fmt.Errorf("VIP range %v is not valid", p)
		}
		if p.Addr().Is4() {
			four++
		} else {
			six++
		}
		out.VIPRanges = append(out.VIPRanges, p.Masked())
	}
	if four > 1 || six > 1 || four+six == 0 {
		return Config{}, fmt.Errorf("VIP ranges %v: one of each family is possible, at least one is needed", c.VIPRanges)
	}
	for _, p := range c.ExcludeRanges {
		if !p.IsValid() || p.Addr().Is4In6() {
			return Config{}, fmt.Errorf("excluded range %v is not valid", p)
		}
		out.ExcludeRanges = append(out.ExcludeRanges, p.Masked())
	}
	out.ExcludePorts = sortedUnique(slices.Clone(c.ExcludePorts), cmp.Compare)
	out.ExcludeRanges = sortedUnique(out.ExcludeRanges, netip.Prefix.Compare)
	slices.SortFunc(out.VIPRanges, netip.Prefix.Compare)
	var err error
	out.TCPPorts, err = normalPorts(c.TCPPorts)
	return out, err
}

// normalPorts sorts, unmaps and checks (address, port) pairs.
func normalPorts(ports []netip.AddrPort) ([]netip.AddrPort, error) {
	out := make([]netip.AddrPort, 0, len(ports))
	for _, p := range ports {
		if !p.IsValid() || p.Port() == 0 || p.Addr().Zone() != "" {
			return nil, fmt.Errorf("TCP port %v is not valid", p)
		}
		out = append(out, netip.AddrPortFrom(p.Addr().Unmap(), p.Port()))
	}
	return sortedUnique(out, netip.AddrPort.Compare), nil
}

func sortedUnique[T comparable](list []T, order func(a, b T) int) []T {
	slices.SortFunc(list, order)
	return slices.Compact(list)
}
