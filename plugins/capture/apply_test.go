package capture_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// The rules, as `nft list` shows them, for each family and each switch of the
// configuration.
func TestApplyGolden(t *testing.T) {
	only := func(p netip.Prefix) capture.Config {
		cfg := dual()
		cfg.VIPRanges = []netip.Prefix{p}
		return cfg
	}
	noDNS := dual()
	noDNS.DNS = false
	excluded := dual()
	excluded.ExcludePorts = []uint16{8443, 22}
	excluded.ExcludeRanges = []netip.Prefix{
		netip.MustParsePrefix("198.18.5.7/24"), netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("198.18.9.9/32"), netip.MustParsePrefix("0.0.0.0/3"),
		netip.MustParsePrefix("fd70:6f72:746f::8000:0:0:0/65"),
	}
	excluded53 := dual()
	excluded53.ExcludePorts = []uint16{53}
	for _, tc := range []struct {
		name string
		cfg  capture.Config
	}{
		{"dual.nft", dual()},
		{"ipv4.nft", only(vip4)},
		{"ipv6.nft", only(vip6)},
		{"no-dns.nft", noDNS},
		{"excluded.nft", excluded},
		{"excluded-53.nft", excluded53},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := nettest.New(t)
			apply(t, n, tc.cfg)
			golden(t, tc.name, list(t, n))
			if err := capture.Verify(n.Path, tc.cfg); err != nil {
				t.Errorf("Verify right after Apply: %v", err)
			}
		})
	}
}

// CNI-55: applying twice leaves a byte-equal table, whatever the order of the
// input (I5), and whatever another configuration left.
func TestApplyTwice(t *testing.T) {
	n := nettest.New(t)
	cfg := dual()
	cfg.ExcludePorts = []uint16{1, 2}
	cfg.ExcludeRanges = []netip.Prefix{vip4, netip.MustParsePrefix("10.0.0.0/8")}
	apply(t, n, cfg)
	want := list(t, n)
	shuffled := cfg
	shuffled.VIPRanges = []netip.Prefix{vip6, vip4}
	shuffled.TCPPorts = []netip.AddrPort{cfg.TCPPorts[1], cfg.TCPPorts[0], cfg.TCPPorts[1]}
	shuffled.ExcludePorts = []uint16{2, 1, 2}
	shuffled.ExcludeRanges = []netip.Prefix{netip.MustParsePrefix("10.1.2.3/8"), vip4}
	other := dual()
	other.DNS, other.VIPRanges, other.TCPPorts = false, []netip.Prefix{vip4}, nil
	more := cfg
	more.TCPPorts = append(slices.Clone(cfg.TCPPorts), netip.MustParseAddrPort("198.18.0.99:1"))
	for i, step := range [][]capture.Config{{cfg}, {shuffled}, {other, cfg}, {dual(), cfg}, {more, cfg}} {
		for _, c := range step {
			apply(t, n, c)
		}
		if got := list(t, n); got != want {
			t.Errorf("step %d: the table changed:\n%s\nwant\n%s", i, got, want)
		}
	}
}

// MESH-46: what Start makes redirects DNS at once, over an older table as well; Apply
// does not, nor does Start for a pod whose DNS is not captured.
func TestStart(t *testing.T) {
	redirected := func(n *nettest.Namespace) bool {
		return strings.Contains(n.Exec(t, "nft", "list", "table", "inet", "portolan"), "elements = { 53 ")
	}
	n := nettest.New(t)
	apply(t, n, dual())
	if redirected(n) {
		t.Error("Apply redirects DNS")
	}
	for range 2 {
		if err := capture.Start(n.Path, dual()); err != nil {
			t.Fatal(err)
		}
		if !redirected(n) {
			t.Error("Start does not redirect DNS")
		}
	}
	bare := dual()
	bare.DNS = false
	if err := capture.Start(n.Path, bare); err != nil {
		t.Fatal(err)
	}
	if redirected(n) {
		t.Error("DNS that is not captured is redirected")
	}
}

// Apply leaves nothing in the caller's configuration changed: it is a value.
func TestApplyKeepsConfig(t *testing.T) {
	cfg := dual()
	cfg.ExcludePorts = []uint16{3, 1}
	cfg.TCPPorts = []netip.AddrPort{cfg.TCPPorts[1], cfg.TCPPorts[0]}
	ports, tcp := slices.Clone(cfg.ExcludePorts), slices.Clone(cfg.TCPPorts)
	apply(t, nettest.New(t), cfg)
	if !slices.Equal(ports, cfg.ExcludePorts) || !slices.Equal(tcp, cfg.TCPPorts) {
		t.Errorf("Apply sorted its caller's slices: %v", cfg)
	}
}

// A configuration that cannot be programmed is refused with its value, and
// nothing is programmed; a path that is no namespace is named.
func TestApplyRefuses(t *testing.T) {
	n := nettest.New(t)
	bad := func(edit func(*capture.Config)) capture.Config {
		cfg := dual()
		edit(&cfg)
		return cfg
	}
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, path string
		cfg        capture.Config
		want       string
	}{
		{"no range", n.Path, bad(func(c *capture.Config) { c.VIPRanges = nil }), "VIP ranges []: one of each family"},
		{"two of a family", n.Path, bad(func(c *capture.Config) { c.VIPRanges = []netip.Prefix{vip4, vip4} }), "one of each family"},
		{"zero range", n.Path, bad(func(c *capture.Config) { c.VIPRanges = []netip.Prefix{{}} }), "VIP range invalid Prefix is not valid"},
		{"zero exclude", n.Path, bad(func(c *capture.Config) { c.ExcludeRanges = []netip.Prefix{{}} }), "excluded range invalid Prefix is not valid"},
		{"port zero", n.Path, bad(func(c *capture.Config) { c.TCPPorts = []netip.AddrPort{netip.MustParseAddrPort("198.18.0.1:0")} }), "TCP port 198.18.0.1:0 is not valid"},
		{"gone", "/run/netns/gone", dual(), "/run/netns/gone"},
		{"regular file", file, dual(), file},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := capture.Apply(tc.path, tc.cfg)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Apply = %v, want an error with %q", err, tc.want)
			}
		})
	}
	if n.HasTable(t, "inet portolan") {
		t.Error("a refused configuration was programmed")
	}
}

// CNI-56: tables of earlier versions go in the same step in which ours comes;
// CNI-57: foreign tables are never touched, also by Remove.
func TestForeignAndOldTables(t *testing.T) {
	n := nettest.New(t)
	for _, old := range []string{"inet aether_capture", "ip aether_capture", "ip6 aether_capture"} {
		n.Exec(t, "nft", "add table "+old+"; add chain "+old+" c { type nat hook output priority -100; }")
	}
	foreign := []string{"inet firewalld", "ip portolan", "ip nat", "netdev aether_capture"}
	for _, f := range foreign {
		n.Exec(t, "nft", "add table "+f)
	}
	n.Exec(t, "nft", "add chain ip nat OUTPUT { type nat hook output priority -100; }; add rule ip nat OUTPUT counter")
	check := func(ours bool) {
		t.Helper()
		for _, f := range foreign {
			if !n.HasTable(t, f) {
				t.Errorf("foreign table %s is gone", f)
			}
		}
		if !strings.Contains(n.Exec(t, "nft", "list", "table", "ip", "nat"), "counter") {
			t.Error("a foreign rule is gone")
		}
		for _, old := range []string{"inet aether_capture", "ip aether_capture", "ip6 aether_capture"} {
			if n.HasTable(t, old) {
				t.Errorf("old table %s is still there", old)
			}
		}
		if got := n.HasTable(t, "inet portolan"); got != ours {
			t.Errorf("our table is there: %t, want %t", got, ours)
		}
	}
	apply(t, n, dual())
	check(true)
	for range 2 {
		if err := capture.Remove(n.Path); err != nil {
			t.Fatal(err)
		}
		check(false)
	}
	if err := capture.Remove("/run/netns/gone"); err != nil {
		t.Errorf("Remove in a namespace that is gone: %v", err)
	}
}

// A table of our name that an unknown version made, with other chains and sets,
// is replaced as a whole.
func TestApplyOverUnknownVersion(t *testing.T) {
	fresh, n := nettest.New(t), nettest.New(t)
	apply(t, fresh, dual())
	n.Exec(t, "nft", `add table inet portolan
		add set inet portolan alive { type ipv4_addr; }
		add set inet portolan more { type mark; }
		add chain inet portolan output { type filter hook output priority 0; policy drop; }
		add chain inet portolan other { type nat hook output priority -100; }
		add rule inet portolan other tcp dport 1-65535 redirect to :1`)
	apply(t, n, dual())
	if got, want := list(t, n), list(t, fresh); got != want {
		t.Errorf("table after Apply:\n%s\nwant\n%s", got, want)
	}
}

// CNI-54: fifty namespaces at once; run with -race.
func TestApplyParallel(t *testing.T) {
	namespaces := make([]*nettest.Namespace, 50)
	for i := range namespaces {
		namespaces[i] = nettest.New(t)
	}
	var all sync.WaitGroup
	errs := make([]error, len(namespaces))
	for i, n := range namespaces {
		all.Go(func() {
			errs[i] = errors.Join(
				capture.Apply(n.Path, dual()),
				capture.SetTCPPorts(n.Path, []netip.AddrPort{netip.MustParseAddrPort("198.18.0.1:1")}),
				capture.Apply(n.Path, dual()), capture.Verify(n.Path, dual()),
			)
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	want := list(t, namespaces[0])
	for i, n := range namespaces {
		if got := list(t, n); got != want {
			t.Errorf("namespace %d differs:\n%s", i, got)
		}
	}
}

// CNI-63: the namespace belongs to a user namespace of a child.
func TestApplyUserNamespace(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	n := nettest.At(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	apply(t, n, dual())
	if err := capture.Verify(n.Path, dual()); err != nil {
		t.Error(err)
	}
	if err := capture.Remove(n.Path); err != nil {
		t.Error(err)
	}
	if n.HasTable(t, "inet portolan") {
		t.Error("the table is still there")
	}
}

// CNI-49: a namespace without interface, route or resolver takes no longer:
// nothing is resolved and nothing is run. The bound is far below the timeout of
// any resolver.
func TestApplyEmptyNamespace(t *testing.T) {
	n := nettest.New(t)
	t.Setenv("PATH", "")
	start := time.Now()
	if err := errors.Join(capture.Apply(n.Path, dual()), capture.Verify(n.Path, dual()), capture.Remove(n.Path)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
}

// CNI-65: no file descriptor stays open, after success and after errors.
func TestNoDescriptorLeft(t *testing.T) {
	n := nettest.New(t)
	cycle := func() {
		alive, err := capture.OpenAlive(n.Path)
		if err != nil {
			t.Fatal(err)
		}
		if err := alive.Refresh(); !errors.Is(err, capture.ErrNoTable) {
			t.Fatalf("Refresh without a table = %v, want ErrNoTable", err)
		}
		err = errors.Join(
			capture.Apply(n.Path, dual()), alive.Refresh(), capture.Verify(n.Path, dual()),
			capture.SetTCPPorts(n.Path, nil), alive.Withdraw(), alive.Close(), capture.Remove(n.Path),
		)
		if err != nil {
			t.Fatal(err)
		}
		if capture.Apply("/dev/null", dual()) == nil {
			t.Fatal("/dev/null is a namespace")
		}
	}
	open := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	cycle()
	before := open()
	for range 30 {
		cycle()
	}
	if after := open(); after > before {
		t.Errorf("%d descriptors after 30 cycles, %d before", after, before)
	}
}

// The largest configuration of the contract fits: 65,536 TCP ports and 64
// exclusions of each kind.
func TestApplyLargest(t *testing.T) {
	cfg := dual()
	cfg.TCPPorts = nil
	v4, v6 := netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd70:6f72:746f::1")
	for i := range 32768 {
		cfg.TCPPorts = append(cfg.TCPPorts, netip.AddrPortFrom(v4, uint16(i+1)), netip.AddrPortFrom(v6, uint16(i+1)))
	}
	for i := range 64 {
		cfg.ExcludePorts = append(cfg.ExcludePorts, uint16(i+1000))
		cfg.ExcludeRanges = append(cfg.ExcludeRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), 0}), 24))
	}
	n := nettest.New(t)
	for range 2 {
		apply(t, n, cfg)
		if err := capture.Verify(n.Path, cfg); err != nil {
			t.Fatal(err)
		}
	}
	if err := capture.SetTCPPorts(n.Path, cfg.TCPPorts[:1]); err != nil {
		t.Fatal(err)
	}
	if got := bytes.Count([]byte(list(t, n)), []byte(" . ")); got != 5 { // two set types, two rules, one element
		t.Errorf("%d concatenations are left, want 5", got)
	}
}
