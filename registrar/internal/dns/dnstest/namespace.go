package dnstest

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace with its loopback up, kept by a mount at Path.
type Namespace struct {
	// Path is where the namespace is mounted, like the pin of a pod.
	Path string
}

// NewNamespace makes a namespace that lives until the test ends.
func NewNamespace(tb testing.TB) *Namespace {
	tb.Helper()
	n := &Namespace{Path: filepath.Join(tb.TempDir(), "netns")}
	n.Mount(tb)
	tb.Cleanup(func() { _ = unix.Unmount(n.Path, unix.MNT_DETACH) })
	return n
}

// Mount puts a fresh namespace at the path.
func (n *Namespace) Mount(tb testing.TB) {
	tb.Helper()
	if err := os.WriteFile(n.Path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked: the thread, which is in the new namespace, ends here.
		runtime.LockOSThread()
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", n.Path, "", unix.MS_BIND, "")
		}
	}()
	<-done
	if err != nil {
		tb.Fatalf("make a network namespace (needs root): %v", err)
	}
	n.link(tb, "lo", nil)
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

// Do runs fn on a thread inside the namespace, which is thrown away after. fn
// must not call tb.Fatal.
func (n *Namespace) Do(tb testing.TB, fn func()) {
	tb.Helper()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		var f *os.File
		if f, err = os.Open(n.Path); err != nil {
			return
		}
		defer f.Close()
		if err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err == nil {
			fn()
		}
	}()
	<-done
	if err != nil {
		tb.Fatalf("enter %s: %v", n.Path, err)
	}
}

// End is one end of a pair of interfaces: its namespace, and its addresses as
// CIDRs (IPv6 without duplicate address detection).
type End struct {
	In    *Namespace
	Addrs []string
}

// Connect joins two namespaces by a pair of interfaces with the same name.
func Connect(tb testing.TB, name string, a, b End) {
	tb.Helper()
	target, err := os.Open(b.In.Path)
	if err != nil {
		tb.Fatal(err)
	}
	defer target.Close()
	a.In.Do(tb, func() {
		veth := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: name},
			PeerName:  name, PeerNamespace: netlink.NsFd(target.Fd()),
		}
		if err := netlink.LinkAdd(veth); err != nil {
			tb.Errorf("add a pair of interfaces: %v", err)
		}
	})
	a.In.link(tb, name, a.Addrs)
	b.In.link(tb, name, b.Addrs)
}

func (n *Namespace) link(tb testing.TB, name string, addrs []string) {
	tb.Helper()
	n.Do(tb, func() {
		link, err := netlink.LinkByName(name)
		if err != nil {
			tb.Errorf("find %s: %v", name, err)
			return
		}
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				tb.Error(err)
				return
			}
			addr.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, addr); err != nil {
				tb.Errorf("add %s: %v", a, err)
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			tb.Errorf("set %s up: %v", name, err)
		}
	})
}

// HasLink says whether the namespace has an interface.
func (n *Namespace) HasLink(tb testing.TB, name string) bool {
	tb.Helper()
	found := false
	n.Do(tb, func() {
		_, err := netlink.LinkByName(name)
		found = err == nil
	})
	return found
}

// Route adds a default route of the gateway's family by the interface.
func (n *Namespace) Route(tb testing.TB, name, gateway string) {
	tb.Helper()
	gw := netip.MustParseAddr(gateway)
	n.Do(tb, func() {
		link, err := netlink.LinkByName(name)
		if err == nil {
			all := &net.IPNet{IP: make(net.IP, gw.BitLen()/8), Mask: make(net.IPMask, gw.BitLen()/8)}
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice(), Dst: all})
		}
		if err != nil {
			tb.Errorf("add a default route by %s: %v", gateway, err)
		}
	})
}

// Exec runs a command inside the namespace and returns its standard output.
func (n *Namespace) Exec(tb testing.TB, name string, args ...string) (string, error) {
	tb.Helper()
	cmd := exec.CommandContext(tb.Context(), name, args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	var err error
	n.Do(tb, func() { err = cmd.Run() })
	if err != nil {
		tb.Logf("%v: %v: %s", cmd.Args, err, errs.String())
	}
	return out.String(), err
}
