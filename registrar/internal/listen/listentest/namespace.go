// Package listentest makes network namespaces with listeners in them, for the tests
// of the packages that read listen tables. It needs root.
package listentest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace with lo up, kept by a mount at Path, like the
// pin of a pod.
type Namespace struct {
	// Path is where the namespace is mounted.
	Path string
}

// NewNamespace makes a namespace that lives until the test ends.
func NewNamespace(tb testing.TB) *Namespace {
	tb.Helper()
	n := &Namespace{Path: filepath.Join(tb.TempDir(), "netns")}
	if err := os.WriteFile(n.Path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	fresh, err := ns.TempNetNS()
	if err != nil {
		tb.Fatalf("make a network namespace (needs root): %v", err)
	}
	defer func() { _ = fresh.Close() }()
	if err := fresh.Do(func(ns.NetNS) error {
		return unix.Mount("/proc/thread-self/ns/net", n.Path, "", unix.MS_BIND, "")
	}); err != nil {
		tb.Fatalf("mount a network namespace: %v", err)
	}
	tb.Cleanup(func() { _ = unix.Unmount(n.Path, unix.MNT_DETACH) })
	n.setUp(tb, "lo", nil)
	return n
}

// Unmount takes the namespace from its path, as the plugin does at DEL.
func (n *Namespace) Unmount(tb testing.TB) {
	tb.Helper()
	if err := unix.Unmount(n.Path, unix.MNT_DETACH); err != nil {
		tb.Fatal(err)
	}
	if err := os.Remove(n.Path); err != nil {
		tb.Fatal(err)
	}
}

// Do runs fn on a thread inside the namespace and fails the test with fn's error.
func (n *Namespace) Do(tb testing.TB, fn func() error) {
	tb.Helper()
	if err := ns.WithNetNSPath(n.Path, func(ns.NetNS) error { return fn() }); err != nil {
		tb.Fatalf("in %s: %v", n.Path, err)
	}
}

// Listen listens inside the namespace until the test ends.
func (n *Namespace) Listen(tb testing.TB, cfg net.ListenConfig, network, addr string) net.Listener {
	tb.Helper()
	var l net.Listener
	n.Do(tb, func() (err error) {
		l, err = cfg.Listen(context.Background(), network, addr)
		return err
	})
	tb.Cleanup(func() { _ = l.Close() })
	return l
}

// Connect joins two namespaces by a pair of interfaces named eth0 with these
// addresses (CIDRs; IPv6 without duplicate address detection).
func Connect(tb testing.TB, a *Namespace, addrsA []string, b *Namespace, addrsB []string) {
	tb.Helper()
	target, err := ns.GetNS(b.Path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = target.Close() }()
	a.Do(tb, func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "eth0"},
			PeerName:  "eth0", PeerNamespace: netlink.NsFd(target.Fd()),
		})
	})
	a.setUp(tb, "eth0", addrsA)
	b.setUp(tb, "eth0", addrsB)
}

func (n *Namespace) setUp(tb testing.TB, name string, addrs []string) {
	tb.Helper()
	n.Do(tb, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			addr.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, addr); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(link)
	})
}
