package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"golang.org/x/sys/unix"
)

// changeAttempts is how often SetTCPPorts reads and changes the sets when
// somebody else changed them in between.
const changeAttempts = 3

// SetTCPPorts makes the raw TCP ports of the namespace at path exactly these, in
// one transaction that adds and deletes only the difference: a port that stays is
// captured without a gap. Pairs of a family that is not captured are left out. A
// namespace without our table gives ErrNoTable.
func SetTCPPorts(path string, ports []netip.AddrPort) error {
	ports, err := normalPorts(ports)
	if err == nil {
		err = within(path, func() error {
			return withConn(dial, func(c *nftables.Conn) error { return setTCPPorts(c, ports) })
		})
	}
	if err != nil {
		return fmt.Errorf("set TCP ports in %s: %w", path, err)
	}
	return nil
}

func setTCPPorts(c *nftables.Conn, ports []netip.AddrPort) error {
	for attempt := 1; ; attempt++ {
		if err := queuePortChanges(c, ports); err != nil {
			return err
		}
		err := c.Flush()
		// An element that we wanted to delete went away since we read the set.
		if err == nil || attempt == changeAttempts || !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
}

// queuePortChanges queues the difference between the kernel's sets and ports.
func queuePortChanges(c *nftables.Conn, ports []netip.AddrPort) error {
	sets, err := ourSets(c)
	if err != nil {
		return err
	}
	for _, v4 := range []bool{true, false} {
		want := portSet(v4, ports)
		set, ok := sets[want.name]
		if !ok {
			continue
		}
		have, err := readPorts(c, set)
		if err != nil {
			return err
		}
		added, removed := difference(have, want.ports)
		if err := changePorts(c.SetDeleteElements, set, removed); err != nil {
			return err
		}
		if err := changePorts(c.SetAddElements, set, added); err != nil {
			return err
		}
	}
	return nil
}

// ourSets returns the sets of our table by name; without the table ErrNoTable.
func ourSets(c *nftables.Conn) (map[string]*nftables.Set, error) {
	tables, err := c.ListTables()
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, isOurs) {
		return nil, ErrNoTable
	}
	sets, err := c.GetSets(ourTable())
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	out := make(map[string]*nftables.Set, len(sets))
	for _, s := range sets {
		out[s.Name] = s
	}
	return out, nil
}

// readPorts returns the sorted elements of a tcp_ports set.
func readPorts(c *nftables.Conn, set *nftables.Set) ([]netip.AddrPort, error) {
	elements, err := c.GetSetElements(set)
	if err != nil {
		return nil, fmt.Errorf("list elements of set %s: %w", set.Name, err)
	}
	out := make([]netip.AddrPort, 0, len(elements))
	for _, e := range elements {
		p, err := parsePortKey(e.Key)
		if err != nil {
			return nil, fmt.Errorf("set %s: %w", set.Name, err)
		}
		out = append(out, p)
	}
	return sortedUnique(out, netip.AddrPort.Compare), nil
}

// difference returns what is in want but not in have, and the reverse; both are sorted.
func difference(have, want []netip.AddrPort) (added, removed []netip.AddrPort) {
	for len(have) > 0 || len(want) > 0 {
		switch {
		case len(have) == 0 || len(want) > 0 && want[0].Compare(have[0]) < 0:
			added, want = append(added, want[0]), want[1:]
		case len(want) == 0 || have[0].Compare(want[0]) < 0:
			removed, have = append(removed, have[0]), have[1:]
		default:
			have, want = have[1:], want[1:]
		}
	}
	return added, removed
}

// bigEndian is the byte order of addresses and ports in sets.
func bigEndian() binaryutil.ByteOrder { return binaryutil.BigEndian }
