package wiretest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// Lab is a node: a namespace with a bridge, to which pods are attached. Envoy runs
// in it.
type Lab struct {
	// Node is the node's namespace.
	Node *Namespace
	tb   testing.TB
	next int
}

// Pod is one pod's namespace, attached to the node's bridge.
type Pod struct {
	*Namespace
	// Addr and Addr6 are the pod's addresses.
	Addr, Addr6 netip.Addr
}

// NewLab makes a node.
func NewLab(tb testing.TB) *Lab {
	tb.Helper()
	lab := &Lab{Node: newNamespace(tb), tb: tb, next: 10}
	h := lab.handle(lab.Node)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	lab.must(h.LinkAdd(bridge))
	lab.must(h.AddrAdd(bridge, addr("10.77.0.1/16")))
	lab.must(h.AddrAdd(bridge, addr("fd77::1/64")))
	lab.must(h.LinkSetUp(bridge))
	return lab
}

// AddPod attaches a pod.
func (l *Lab) AddPod() *Pod {
	l.tb.Helper()
	n := l.next
	l.next++
	pod := &Pod{
		Namespace: newNamespace(l.tb),
		Addr:      netip.MustParseAddr(fmt.Sprintf("10.77.0.%d", n)),
		Addr6:     netip.MustParseAddr(fmt.Sprintf("fd77::%d", n)),
	}
	node, inside := l.handle(l.Node), l.handle(pod.Namespace)
	peer := fmt.Sprintf("veth%d", n)
	l.must(node.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: peer},
		PeerName:  "eth0", PeerNamespace: netlink.NsFd(int(pod.handle)),
	}))
	outer := l.link(node, peer)
	l.must(node.LinkSetMaster(outer, l.link(node, "br0")))
	l.must(node.LinkSetUp(outer))
	eth := l.link(inside, "eth0")
	l.must(inside.AddrAdd(eth, addr(pod.Addr.String()+"/16")))
	l.must(inside.AddrAdd(eth, addr(pod.Addr6.String()+"/64")))
	l.must(inside.LinkSetUp(eth))
	for _, gateway := range []string{"10.77.0.1", "fd77::1"} {
		l.must(inside.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: net.IP(netip.MustParseAddr(gateway).AsSlice())}))
	}
	return pod
}

// RedirectTCP captures what the pod sends to the ranges: HTTP to 15001, and the
// destinations named by tcpPorts ("address . port") to 15002.
func (l *Lab) RedirectTCP(pod *Pod, ranges []netip.Prefix, tcpPorts ...netip.AddrPort) {
	l.tb.Helper()
	l.next++ // each call adds a table of its own, which is looked at before earlier ones
	var rules strings.Builder
	_, _ = fmt.Fprintf(&rules, "table inet wiretest%d {\n chain output {\n  type nat hook output priority %d; policy accept;\n", l.next, -100-l.next)
	for _, d := range tcpPorts {
		_, _ = fmt.Fprintf(&rules, "  %s daddr %s tcp dport %d redirect to :15002\n", family(d.Addr()), d.Addr(), d.Port())
	}
	for _, r := range ranges {
		_, _ = fmt.Fprintf(&rules, "  %s daddr %s meta l4proto tcp redirect to :15001\n", family(r.Addr()), r)
	}
	rules.WriteString(" }\n}\n")
	path := l.tb.TempDir() + "/rules.nft"
	if err := os.WriteFile(path, []byte(rules.String()), 0o600); err != nil {
		l.tb.Fatal(err)
	}
	if out, err := pod.Run(context.Background(), "nft", "-f", path); err != nil {
		l.tb.Fatalf("nft: %v\n%s\n%s", err, out, &rules)
	}
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "ip"
	}
	return "ip6"
}

func (l *Lab) handle(n *Namespace) *netlink.Handle {
	l.tb.Helper()
	h, err := netlink.NewHandleAt(n.handle)
	if err != nil {
		l.tb.Fatalf("netlink in %s: %v", n.Path, err)
	}
	l.tb.Cleanup(h.Close)
	return h
}

func (l *Lab) link(h *netlink.Handle, name string) netlink.Link {
	l.tb.Helper()
	link, err := h.LinkByName(name)
	if err != nil {
		l.tb.Fatalf("link %s: %v", name, err)
	}
	return link
}

func (l *Lab) must(err error) {
	l.tb.Helper()
	if err != nil {
		l.tb.Fatal(err)
	}
}

func addr(s string) *netlink.Addr {
	a, err := netlink.ParseAddr(s)
	if err != nil {
		panic(err)
	}
	if a.IP.To4() == nil {
		// Duplicate address detection would hold the address back for a second.
		a.Flags = 0x02
	}
	return a
}
