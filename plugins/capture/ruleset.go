package capture

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Table is the name of our table, of the family inet (contract 7).
const Table = "portolan"

// The names of sets and chains in our table.
const (
	setTCPPorts4 = "tcp_ports4"
	setTCPPorts6 = "tcp_ports6"
	setAlive     = "alive"

	chainOutput     = "output"
	chainRawOutput  = "raw_output"
	chainRawReplies = "raw_prerouting"
)

// AliveTimeout is how long the redirection of DNS outlives the process that
// refreshes it (contract 0).
const AliveTimeout = 5 * time.Second

// oldTables are the names that tables of ours had in earlier versions. They are
// removed when ours is applied: two redirections would fight (CNI-56).
func oldTables() []string { return []string{"aether_capture"} }

// ruleset is everything that our table holds, as values: what Apply programs and
// what Verify compares with the kernel's.
type ruleset struct {
	sets   []setSpec
	chains []chainSpec
}

// setSpec is one named set.
type setSpec struct {
	name    string
	key     nftables.SetDatatype
	concat  bool
	timeout time.Duration
	// ports are the elements that the config asks for; nil for alive, whose
	// element belongs to the mesh-DNS process.
	ports []netip.AddrPort
}

// chainSpec is one base chain with its rules in order.
type chainSpec struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	rules    []ruleSpec
}

// ruleSpec is one rule; comment is what `nft list` shows beside it.
type ruleSpec struct {
	comment string
	exprs   []expr.Any
}

// build makes the table's content from a normal config. It is pure: equal
// configs give equal rulesets.
func build(cfg Config) ruleset {
	var out ruleset
	for _, vip := range cfg.VIPRanges {
		out.sets = append(out.sets, portSet(vip.Addr().Is4(), cfg.TCPPorts))
	}
	output := chainSpec{
		name: chainOutput, kind: nftables.ChainTypeNAT,
		hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityNATDest,
	}
	output.rules = append(output.rules,
		ruleSpec{"loopback is never captured", slices.Concat(onLoopback(expr.MetaKeyOIF), accept())},
		ruleSpec{"the mesh's own sockets", slices.Concat(metaIs(expr.MetaKeyMARK, binaryutil.NativeEndian.PutUint32(Mark)), accept())},
	)
	output.rules = append(output.rules, exclusions(cfg)...)
	for _, vip := range cfg.VIPRanges {
		output.rules = append(output.rules, tcpPortsRule(vip.Addr().Is4()))
	}
	for _, vip := range cfg.VIPRanges {
		output.rules = append(output.rules, ruleSpec{
			"service addresses: HTTP",
			slices.Concat(l4proto(unix.IPPROTO_TCP), destination(vip), redirect(PortHTTP)),
		})
	}
	if cfg.DNS {
		out.sets = append(out.sets, aliveSet())
		output.rules = append(output.rules, dnsRule(unix.IPPROTO_UDP), dnsRule(unix.IPPROTO_TCP))
		out.chains = rawChains()
	}
	out.chains = append(out.chains, output)
	return out
}

// portSet is the set of the raw TCP ports of one family.
func portSet(v4 bool, ports []netip.AddrPort) setSpec {
	s := setSpec{name: setTCPPorts6, key: nftables.MustConcatSetType(nftables.TypeIP6Addr, nftables.TypeInetService), concat: true}
	if v4 {
		s.name, s.key = setTCPPorts4, nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
	}
	s.ports = make([]netip.AddrPort, 0, len(ports))
	for _, p := range ports {
		if p.Addr().Is4() == v4 {
			s.ports = append(s.ports, p)
		}
	}
	return s
}

// exclusions are the rules that let excluded destinations go before anything is
// redirected: one rule each, so that overlapping ranges need no merging.
func exclusions(cfg Config) []ruleSpec {
	var out []ruleSpec
	for _, r := range cfg.ExcludeRanges {
		out = append(out, ruleSpec{"excluded by annotation", slices.Concat(destination(r), accept())})
	}
	for _, p := range cfg.ExcludePorts {
		out = append(out, ruleSpec{
			"excluded by annotation",
			slices.Concat(l4proto(unix.IPPROTO_TCP), portIs(offsetDPort, p), accept()),
		})
	}
	return out
}

// tcpPortsRule sends the (VIP, port) pairs of one family to the TCP listener.
func tcpPortsRule(v4 bool) ruleSpec {
	set, addr := setTCPPorts6, loadDestination(false)
	port := uint32(unix.NFT_REG_2) // 16 bytes after NFT_REG_1: behind an IPv6 address
	if v4 {
		set, addr = setTCPPorts4, loadDestination(true)
		port = unix.NFT_REG32_01 // 4 bytes after NFT_REG_1: behind an IPv4 address
	}
	return ruleSpec{"service addresses: raw TCP", slices.Concat(
		l4proto(unix.IPPROTO_TCP), family(v4), addr,
		[]expr.Any{
			&expr.Payload{DestRegister: port, Base: expr.PayloadBaseTransportHeader, Offset: offsetDPort, Len: 2},
			&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set},
		},
		redirect(PortTCP),
	)}
}

// dnsRule sends DNS to the mesh-DNS server while it lives.
func dnsRule(proto byte) ruleSpec {
	return ruleSpec{"DNS while the mesh's server lives", slices.Concat(
		l4proto(proto), portIs(offsetDPort, portDNS),
		[]expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setAlive}},
		redirect(PortDNS),
	)}
}

// rawChains are the pair of notrack rules of dataplane decision 9. Connection
// tracking keeps the redirection of a UDP socket that is held open after alive
// ran empty; an untracked query goes where it was sent, and its untracked answer
// does not collide with the entry that the socket still has.
func rawChains() []chainSpec {
	untracked := func(offset uint32) []expr.Any {
		return slices.Concat(
			l4proto(unix.IPPROTO_UDP), portIs(offset, portDNS),
			[]expr.Any{
				&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setAlive, Invert: true},
				&expr.Notrack{},
			},
		)
	}
	return []chainSpec{
		{
			name: chainRawOutput, kind: nftables.ChainTypeFilter,
			hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityRaw,
			rules: []ruleSpec{
				{"loopback is never captured", slices.Concat(onLoopback(expr.MetaKeyOIF), accept())},
				{"DNS queries fall through when the mesh's server is gone", untracked(offsetDPort)},
			},
		},
		{
			name: chainRawReplies, kind: nftables.ChainTypeFilter,
			hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityRaw,
			rules: []ruleSpec{
				{"loopback is never captured", slices.Concat(onLoopback(expr.MetaKeyIIF), accept())},
				{"DNS answers fall through when the mesh's server is gone", untracked(offsetSPort)},
			},
		},
	}
}

// Offsets of the ports in the headers of TCP and UDP.
const (
	offsetSPort = 0
	offsetDPort = 2
)

// loopbackIndex is the interface index of lo in every network namespace.
const loopbackIndex = 1

func onLoopback(key expr.MetaKey) []expr.Any {
	return metaIs(key, binaryutil.NativeEndian.PutUint32(loopbackIndex))
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

// metaIs matches a packet property that equals data.
func metaIs(key expr.MetaKey, data []byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: unix.NFT_REG_1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: data},
	}
}

func l4proto(proto byte) []expr.Any { return metaIs(expr.MetaKeyL4PROTO, []byte{proto}) }

// family matches packets of one family: a rule of the inet table sees both.
func family(v4 bool) []expr.Any {
	if v4 {
		return metaIs(expr.MetaKeyNFPROTO, []byte{unix.NFPROTO_IPV4})
	}
	return metaIs(expr.MetaKeyNFPROTO, []byte{unix.NFPROTO_IPV6})
}

// loadDestination puts the destination address into NFT_REG_1.
func loadDestination(v4 bool) []expr.Any {
	p := &expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	if v4 {
		p.Offset, p.Len = 16, 4
	}
	return []expr.Any{p}
}

// destination matches a destination inside a range.
func destination(p netip.Prefix) []expr.Any {
	out := append(family(p.Addr().Is4()), loadDestination(p.Addr().Is4())...)
	size := uint32(p.Addr().BitLen() / 8)
	if p.Bits() < p.Addr().BitLen() {
		out = append(out, &expr.Bitwise{
			SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: size,
			Mask: netmask(p), Xor: make([]byte, size),
		})
	}
	return append(out, &expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: p.Addr().AsSlice()})
}

func netmask(p netip.Prefix) []byte {
	mask := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// portIs matches a port and leaves it in NFT_REG_1.
func portIs(offset uint32, port uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: binary.BigEndian.AppendUint16(nil, port)},
	}
}

// redirect sends the connection to a port on this namespace's loopback address.
func redirect(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: unix.NFT_REG_1, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Redir{RegisterProtoMin: unix.NFT_REG_1, RegisterProtoMax: unix.NFT_REG_1, Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED},
	}
}

// portKey is the element of a tcp_ports set: address and port, each padded to
// registers of 4 bytes.
func portKey(p netip.AddrPort) []byte {
	return append(binary.BigEndian.AppendUint16(p.Addr().AsSlice(), p.Port()), 0, 0)
}

// parsePortKey is the reverse of portKey.
func parsePortKey(key []byte) (netip.AddrPort, error) {
	if len(key) == 8 || len(key) == 20 {
		if addr, ok := netip.AddrFromSlice(key[:len(key)-4]); ok {
			return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(key[len(key)-4:])), nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("set element %x is no (address . port)", key)
}
