package capture_test

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The tests run in a sandbox: real namespaces, nothing left behind.
func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

var (
	vip4 = netip.MustParsePrefix("198.18.0.0/15")
	vip6 = netip.MustParsePrefix("fd70:6f72:746f::/64")
)

// dual is what a registrar answers for a pod with both families.
func dual() capture.Config {
	return capture.Config{
		VIPRanges: []netip.Prefix{vip4, vip6},
		TCPPorts: []netip.AddrPort{
			netip.MustParseAddrPort("198.18.0.10:5432"),
			netip.MustParseAddrPort("[fd70:6f72:746f::10]:5432"),
		},
		DNS: true, IPv6: true,
	}
}

// pod makes a pod's namespace and its world, with both families. The pod has a
// default route in each when routed.
func pod(t *testing.T, routed bool) (pod, world *nettest.Namespace) {
	t.Helper()
	pod, world = nettest.New(t), nettest.New(t)
	netnstest.Connect(t, "eth0",
		netnstest.End{In: pod.Namespace, Addrs: []string{"10.0.0.2/24", "fd00::2/64"}},
		netnstest.End{In: world.Namespace, Addrs: []string{"10.0.0.1/24", "10.0.0.53/24", "10.0.0.54/24", "fd00::1/64", "fd00::53/64"}})
	if routed {
		pod.Route(t, "eth0", "10.0.0.1")
		pod.Route(t, "eth0", "fd00::1")
	}
	return pod, world
}

func apply(t *testing.T, n *nettest.Namespace, cfg capture.Config) {
	t.Helper()
	if err := capture.Apply(n.Path, cfg); err != nil {
		t.Fatal(err)
	}
}

// list is what an operator sees.
func list(t *testing.T, n *nettest.Namespace) string {
	t.Helper()
	return n.Exec(t, "nft", "list", "table", "inet", "portolan")
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got):\n%s", path, d)
	}
}
