package capture

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
)

// Verify compares the namespace at path with what Apply would make of cfg. The
// first thing that is missing or changed gives a *MissingError; TCP ports beyond
// cfg's are fine, since the registrar may know newer ones.
func Verify(path string, cfg Config) error {
	cfg, err := cfg.normal()
	if err != nil {
		return fmt.Errorf("verify capture in %s: %w", path, err)
	}
	err = within(path, func() error {
		err := withConn(dial, func(c *nftables.Conn) error { return verifyTable(c, build(cfg)) })
		if err != nil {
			return err
		}
		return verifyRoutes(cfg)
	})
	if missing, ok := errors.AsType[*MissingError](err); ok {
		missing.NetNS = path
		return missing
	}
	if err != nil {
		return fmt.Errorf("verify capture in %s: %w", path, err)
	}
	return nil
}

func verifyTable(c *nftables.Conn, want ruleset) error {
	sets, err := ourSets(c)
	if errors.Is(err, ErrNoTable) {
		return &MissingError{Kind: "table", Name: "inet " + Table}
	}
	if err != nil {
		return err
	}
	for _, spec := range want.sets {
		got, ok := sets[spec.name]
		if !ok || !spec.matches(got) {
			return &MissingError{Kind: "set", Name: spec.name}
		}
		if err := verifyPorts(c, got, spec); err != nil {
			return err
		}
	}
	chains, err := ourChains(c)
	if err != nil {
		return err
	}
	for _, spec := range want.chains {
		got, ok := chains[spec.name]
		if !ok || !spec.matches(got) {
			return &MissingError{Kind: "chain", Name: spec.name}
		}
		if err := verifyRules(c, spec); err != nil {
			return err
		}
	}
	return nil
}

func verifyPorts(c *nftables.Conn, set *nftables.Set, spec setSpec) error {
	if spec.ports == nil {
		return nil
	}
	have, err := readPorts(c, set)
	if err != nil {
		return err
	}
	if missing, _ := difference(have, spec.ports); len(missing) > 0 {
		return &MissingError{Kind: "element", Name: fmt.Sprintf("%v of set %s", missing[0], spec.name)}
	}
	return nil
}

func verifyRules(c *nftables.Conn, spec chainSpec) error {
	rules, err := c.GetRules(ourTable(), &nftables.Chain{Name: spec.name})
	if err != nil {
		return fmt.Errorf("list rules of chain %s: %w", spec.name, err)
	}
	for i, want := range spec.rules {
		if i >= len(rules) || !sameExprs(rules[i].Exprs, want.exprs) {
			return &MissingError{Kind: "rule", Name: fmt.Sprintf("%d of chain %s (%s)", i+1, spec.name, want.comment)}
		}
	}
	if len(rules) > len(spec.rules) {
		return &MissingError{Kind: "rule", Name: fmt.Sprintf("%d of chain %s (an end of the chain)", len(spec.rules)+1, spec.name)}
	}
	return nil
}

// sameExprs compares expressions as the kernel gives them back with ours.
func sameExprs(got, want []expr.Any) bool {
	return slices.EqualFunc(got, want, func(g, w expr.Any) bool { return reflect.DeepEqual(g, w) })
}

func verifyRoutes(cfg Config) error {
	return withRoutes(func(h *netlink.Handle) error {
		missing, err := missingRoutes(h, cfg)
		if err == nil && len(missing) > 0 {
			return &MissingError{Kind: "route", Name: missing[0].Dst.String()}
		}
		return err
	})
}
