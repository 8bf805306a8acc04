package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// elementsPerMessage keeps one netlink message of set elements under the 64 KiB
// that an attribute can have.
const elementsPerMessage = 1000

// Apply makes the namespace at path capture what cfg says: our table in one
// transaction, then the route. Whatever of ours was there is replaced, and a
// second Apply changes nothing (CNI-55); the element of alive stays. After an
// error the caller undoes with Remove. A kernel that lacks something gives a
// *FeatureError.
func Apply(path string, cfg Config) error { return apply(path, cfg, false) }

// Start is Apply for a pod in which nothing runs yet: if DNS is captured at all it is
// redirected for the first AliveTimeout, in the same transaction. In a fresh namespace
// that transaction only adds, so that nobody waits for a grace period of the kernel.
func Start(path string, cfg Config) error { return apply(path, cfg, true) }

func apply(path string, cfg Config, alive bool) error {
	cfg, err := cfg.normal()
	if err != nil {
		return fmt.Errorf("apply capture in %s: %w", path, err)
	}
	err = within(path, func() error {
		if err := withConn(dial, func(c *nftables.Conn) error { return replaceTable(c, cfg, alive) }); err != nil {
			return err
		}
		return addRoutes(cfg)
	})
	if lacksFeature(err) {
		// The answer of a transaction does not say which part the kernel lacks.
		if feature, ok := errors.AsType[*FeatureError](Probe()); ok {
			err = feature
		}
	}
	if err != nil {
		return fmt.Errorf("apply capture in %s: %w", path, err)
	}
	return nil
}

// Remove takes our table, tables of earlier versions, and our routes out of the
// namespace at path. Nothing to remove, or no such namespace, is success. On return
// nothing is captured; the kernel frees the table later, and until then it keeps the
// socket, and so the namespace: a process that ends waits for it, a registrar does not.
func Remove(path string) error {
	err := within(path, func() error {
		conn, err := dial()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		defer func() { go func() { _ = conn.CloseLasting() }() }()
		return errors.Join(removeTables(conn), removeRoutes())
	})
	if _, gone := errors.AsType[ns.NSPathNotExistErr](err); err == nil || gone {
		return nil
	}
	return fmt.Errorf("remove capture in %s: %w", path, err)
}

func removeTables(c *nftables.Conn) error {
	tables, err := c.ListTables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, t := range tables {
		if isOurs(t) || isOld(t) {
			c.DelTable(t)
		}
	}
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete table: %w", err)
	}
	return nil
}

func isOurs(t *nftables.Table) bool {
	return t.Name == Table && t.Family == nftables.TableFamilyINet
}

// isOld reports whether t is a table that an earlier version of ours made.
func isOld(t *nftables.Table) bool {
	switch t.Family {
	case nftables.TableFamilyINet, nftables.TableFamilyIPv4, nftables.TableFamilyIPv6:
		return slices.Contains(oldTables(), t.Name)
	default:
		return false
	}
}

func ourTable() *nftables.Table {
	return &nftables.Table{Name: Table, Family: nftables.TableFamilyINet}
}

// replaceTable programs the rules of a normal config in one transaction, and with
// alive the redirection of DNS.
func replaceTable(c *nftables.Conn, cfg Config, alive bool) error {
	tables, err := c.ListTables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	want := build(cfg)
	replace := slices.ContainsFunc(tables, isOurs)
	for _, t := range tables {
		if isOld(t) {
			c.DelTable(t)
		}
	}
	table := c.AddTable(ourTable())
	if replace {
		same, err := sameShape(c, table, want)
		switch {
		case err != nil:
			return err
		case same:
			// Keeps the element of alive, and pays fewer grace periods of the
			// kernel than a deletion.
			c.FlushTable(table)
		default:
			c.DelTable(table)
			c.AddTable(table)
			replace = false
		}
	}
	if err := want.add(c, table, replace); err != nil {
		return err
	}
	if alive && cfg.DNS {
		begin := addAlive
		if replace {
			begin = renewAlive
		}
		if err := begin(c, aliveSet().set(table)); err != nil {
			return fmt.Errorf("element of set %s: %w", setAlive, err)
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("program table inet %s: %w", Table, err)
	}
	return nil
}

// sameShape reports whether the sets and chains of the table are those of want,
// so that only rules and elements have to be replaced.
func sameShape(c *nftables.Conn, table *nftables.Table, want ruleset) (bool, error) {
	sets, err := c.GetSets(table)
	if err != nil {
		return false, fmt.Errorf("list sets: %w", err)
	}
	chains, err := ourChains(c)
	if err != nil {
		return false, err
	}
	for _, s := range want.sets {
		if !slices.ContainsFunc(sets, s.matches) {
			return false, nil
		}
	}
	for _, ch := range want.chains {
		if got, ok := chains[ch.name]; !ok || !ch.matches(got) {
			return false, nil
		}
	}
	return len(sets) == len(want.sets) && len(chains) == len(want.chains), nil
}

// ourChains returns the chains of our table by name.
func ourChains(c *nftables.Conn) (map[string]*nftables.Chain, error) {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	out := map[string]*nftables.Chain{}
	for _, ch := range chains {
		if ch.Table.Name == Table {
			out[ch.Name] = ch
		}
	}
	return out, nil
}

// add queues sets, elements, chains and rules. With replace the table was there
// and its rules are flushed in the same transaction.
func (r ruleset) add(c *nftables.Conn, table *nftables.Table, replace bool) error {
	for i, spec := range r.sets {
		set := spec.set(table)
		// Given here because the library would count in a variable that it
		// shares between connections without a lock (CNI-54).
		set.ID = uint32(i + 1)
		if err := c.AddSet(set, nil); err != nil {
			return fmt.Errorf("set %s: %w", spec.name, err)
		}
		if spec.ports == nil {
			continue
		}
		if replace {
			c.FlushSet(set)
		}
		if err := changePorts(c.SetAddElements, set, spec.ports); err != nil {
			return err
		}
	}
	policy := nftables.ChainPolicyAccept
	for _, spec := range r.chains {
		chain := c.AddChain(&nftables.Chain{
			Name: spec.name, Table: table, Type: spec.kind,
			Hooknum: spec.hook, Priority: spec.priority, Policy: &policy,
		})
		for _, rule := range spec.rules {
			c.AddRule(&nftables.Rule{
				Table: table, Chain: chain, Exprs: rule.exprs,
				UserData: userdata.AppendString(nil, userdata.TypeComment, rule.comment),
			})
		}
	}
	return nil
}

// changePorts queues the addition or deletion of elements in messages that the
// kernel can take.
func changePorts(change func(*nftables.Set, []nftables.SetElement) error, set *nftables.Set, ports []netip.AddrPort) error {
	for part := range slices.Chunk(ports, elementsPerMessage) {
		elements := make([]nftables.SetElement, len(part))
		for i, p := range part {
			elements[i].Key = portKey(p)
		}
		if err := change(set, elements); err != nil {
			return fmt.Errorf("elements of set %s: %w", set.Name, err)
		}
	}
	return nil
}

// set returns the library's form of a set.
func (s setSpec) set(table *nftables.Table) *nftables.Set {
	return &nftables.Set{
		Table: table, Name: s.name, KeyType: s.key, Concatenation: s.concat,
		HasTimeout: s.timeout != 0, Timeout: s.timeout, KeyByteOrder: bigEndian(),
	}
}

// matches reports whether the kernel's set is the one that the spec describes.
func (s setSpec) matches(got *nftables.Set) bool {
	return got.Name == s.name && got.KeyType.Name == s.key.Name && got.HasTimeout == (s.timeout != 0) &&
		got.Timeout == s.timeout && !got.Interval && !got.IsMap && !got.Constant
}

// matches reports whether the kernel's chain is the one that the spec describes.
func (ch chainSpec) matches(got *nftables.Chain) bool {
	return got.Type == ch.kind && got.Hooknum != nil && *got.Hooknum == *ch.hook &&
		got.Priority != nil && *got.Priority == *ch.priority &&
		got.Policy != nil && *got.Policy == nftables.ChainPolicyAccept
}
