package netnstest

import (
	"context"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that a path leads to.
type Namespace struct {
	// Path is where the namespace is mounted, like the pin of a pod.
	Path string
}

// New makes a namespace with lo up that lives until the test ends.
func New(tb testing.TB) *Namespace {
	tb.Helper()
	n := &Namespace{Path: filepath.Join(tb.TempDir(), "netns")}
	n.Mount(tb)
	tb.Cleanup(func() { _ = unix.Unmount(n.Path, unix.MNT_DETACH) })
	return n
}

// Mount puts a fresh namespace with lo up at the path, where nothing is mounted.
func (n *Namespace) Mount(tb testing.TB) {
	tb.Helper()
	if err := os.WriteFile(n.Path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	fresh, err := ns.TempNetNS()
	if err != nil {
		tb.Fatalf("make a network namespace (needs root): %v", err)
	}
	defer func() { _ = fresh.Close() }()
	err = fresh.Do(func(ns.NetNS) error { return unix.Mount("/proc/thread-self/ns/net", n.Path, "", unix.MS_BIND, "") })
	if err != nil {
		tb.Fatalf("mount a network namespace: %v", err)
	}
	n.SetUp(tb, "lo")
}

// Unmount takes the namespace from its path, as a runtime does that removes it
// and the plugin at DEL.
func (n *Namespace) Unmount(tb testing.TB) {
	tb.Helper()
	if err := unix.Unmount(n.Path, unix.MNT_DETACH); err != nil {
		tb.Fatal(err)
	}
	if err := os.Remove(n.Path); err != nil {
		tb.Fatal(err)
	}
}

// Do runs fn on a thread inside the namespace, which serves nothing else until it
// is back, and fails the test with fn's error. fn must not call tb.Fatal.
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

// Route adds a default route of the gateway's family by the device.
func (n *Namespace) Route(tb testing.TB, device, gateway string) {
	tb.Helper()
	gw := netip.MustParseAddr(gateway)
	n.Do(tb, func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		all := &net.IPNet{IP: make(net.IP, gw.BitLen()/8), Mask: make(net.IPMask, gw.BitLen()/8)}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice(), Dst: all})
	})
}

// HasLink reports whether the namespace has an interface. One end of a pair is
// gone when the namespace of the other end has been freed.
func (n *Namespace) HasLink(tb testing.TB, device string) bool {
	tb.Helper()
	found := false
	n.Do(tb, func() error {
		_, err := netlink.LinkByName(device)
		found = err == nil
		return nil
	})
	return found
}

// Output runs a command inside the namespace and returns what it printed on
// standard output. When it fails, the log of the test has its standard error.
func (n *Namespace) Output(tb testing.TB, name string, args ...string) (string, error) {
	tb.Helper()
	cmd := exec.CommandContext(tb.Context(), name, args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	var err error
	n.Do(tb, func() error {
		// The child is forked from this thread, and so is inside.
		err = cmd.Run()
		return nil
	})
	if err != nil {
		tb.Logf("%v: %v: %s", cmd.Args, err, errs.String())
	}
	return out.String(), err
}

// Exec is Output for a command that must succeed: the test fails otherwise, and
// goes on.
func (n *Namespace) Exec(tb testing.TB, name string, args ...string) string {
	tb.Helper()
	out, err := n.Output(tb, name, args...)
	if err != nil {
		tb.Errorf("run %s in %s: %v", name, n.Path, err)
	}
	return out
}
