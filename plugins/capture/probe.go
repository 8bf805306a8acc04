package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Probe programs every kind of rule in a throw-away network namespace. It is run
// once when the registrar starts (CNI-51); a kernel that lacks something gives a
// *FeatureError that names it. Nothing is left behind.
func Probe() error {
	netns, err := ns.TempNetNS()
	if err != nil {
		return fmt.Errorf("make a network namespace to probe the kernel in: %w", err)
	}
	defer func() { _ = netns.Close() }()
	return netns.Do(func(ns.NetNS) error { return probe(dial) })
}

// probe tries the whole ruleset, and only when that fails its parts, each one on
// top of those before it.
func probe(dial dialer) error {
	whole := Config{
		VIPRanges:     []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")},
		TCPPorts:      []netip.AddrPort{netip.MustParseAddrPort("198.18.0.1:1"), netip.MustParseAddrPort("[fd70:6f72:746f::1]:1")},
		ExcludeRanges: []netip.Prefix{netip.MustParsePrefix("198.18.0.0/24")}, ExcludePorts: []uint16{1}, DNS: true,
	}
	cause := withConn(dial, func(c *nftables.Conn) error { return replaceTable(c, whole, true) })
	if cause == nil {
		return nil
	}
	missing := &FeatureError{Feature: "the nft rules of the capture", Err: cause}
	for _, f := range features() {
		err := withConn(dial, func(c *nftables.Conn) error {
			if err := f.rules.add(c, c.AddTable(ourTable()), false); err != nil {
				return err
			}
			return c.Flush()
		})
		if err != nil {
			missing = &FeatureError{Feature: f.name, Err: err}
			break
		}
	}
	return errors.Join(missing, withConn(dial, removeTables))
}

// feature is one thing that the kernel must have.
type feature struct {
	name  string
	rules ruleset
}

func features() []feature {
	nat := chainSpec{
		name: chainOutput, kind: nftables.ChainTypeNAT,
		hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityNATDest,
	}
	raw := rawChains()[0]
	raw.rules = nil
	with := func(ch chainSpec, exprs ...expr.Any) ruleset {
		ch.rules = []ruleSpec{{"probe", exprs}}
		return ruleset{chains: []chainSpec{ch}}
	}
	alive := aliveSet()
	return []feature{
		{"nft tables of the family inet", ruleset{}},
		{"nft chains of the type nat in the family inet", ruleset{chains: []chainSpec{nat}}},
		{"nft chains of the priority raw", ruleset{chains: []chainSpec{raw}}},
		{"nft meta expressions", with(nat, slices.Concat(onLoopback(expr.MetaKeyOIF), l4proto(unix.IPPROTO_TCP), accept())...)},
		{"nft payload expressions", with(nat, destination(netip.MustParsePrefix("198.18.0.0/15"))...)},
		{"nft redirect", with(nat, redirect(PortHTTP)...)},
		{"nft notrack", with(raw, &expr.Notrack{})},
		{"nft sets of (address . port)", ruleset{sets: []setSpec{portSet(true, nil), portSet(false, nil)}}},
		{"nft sets with a timeout", ruleset{sets: []setSpec{alive}}},
	}
}
