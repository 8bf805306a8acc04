package capture_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

func ports(texts ...string) []netip.AddrPort {
	var out []netip.AddrPort
	for _, text := range texts {
		out = append(out, netip.MustParseAddrPort(text))
	}
	return out
}

// elements returns what nft lists of both sets, sorted.
func elements(t *testing.T, n *nettest.Namespace) []string {
	t.Helper()
	var out []string
	for _, set := range []string{"tcp_ports4", "tcp_ports6"} {
		_, text, found := strings.Cut(n.Exec(t, "nft", "list", "set", "inet", "portolan", set), "elements = {")
		if !found {
			continue
		}
		text, _, _ = strings.Cut(text, "}")
		for e := range strings.SplitSeq(text, ",") {
			out = append(out, strings.TrimSpace(e))
		}
	}
	slices.Sort(out)
	return out
}

// Dataplane decision 8: the sets hold exactly the ports that were given last, in
// both families, and everything else of the table stays as it is.
func TestSetTCPPorts(t *testing.T) {
	n := nettest.New(t)
	apply(t, n, dual())
	keepAlive(t, n)
	rules := n.Exec(t, "nft", "-s", "list", "chain", "inet", "portolan", "output")
	for _, tc := range []struct {
		name string
		set  []netip.AddrPort
		want []string
	}{
		{"grow", ports("198.18.0.10:5432", "198.18.0.10:6379", "[fd70:6f72:746f::11]:1"), []string{"198.18.0.10 . 5432", "198.18.0.10 . 6379", "fd70:6f72:746f::11 . 1"}},
		{"the same", ports("[fd70:6f72:746f::11]:1", "198.18.0.10:6379", "198.18.0.10:5432", "198.18.0.10:5432"), []string{"198.18.0.10 . 5432", "198.18.0.10 . 6379", "fd70:6f72:746f::11 . 1"}},
		{"mapped", ports("[::ffff:198.18.0.10]:5432"), []string{"198.18.0.10 . 5432"}},
		{"swap", ports("198.18.0.11:5432"), []string{"198.18.0.11 . 5432"}},
		{"none", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := capture.SetTCPPorts(n.Path, tc.set); err != nil {
				t.Fatal(err)
			}
			if got := elements(t, n); !slices.Equal(got, tc.want) {
				t.Errorf("elements = %v, want %v", got, tc.want)
			}
		})
	}
	if got := n.Exec(t, "nft", "-s", "list", "chain", "inet", "portolan", "output"); got != rules {
		t.Errorf("rules changed:\n%s", got)
	}
	if !strings.Contains(list(t, n), "53 expires") {
		t.Error("the element of alive is gone")
	}
}

// A port of a family that the pod does not capture is left out; no table is
// ErrNoTable; a bad port and a path that is gone are named.
func TestSetTCPPortsErrors(t *testing.T) {
	n := nettest.New(t)
	if err := capture.SetTCPPorts(n.Path, nil); !errors.Is(err, capture.ErrNoTable) || !strings.Contains(err.Error(), n.Path) {
		t.Errorf("without a table: %v, want ErrNoTable with the path", err)
	}
	cfg := dual()
	cfg.VIPRanges = []netip.Prefix{vip4}
	apply(t, n, cfg)
	if err := capture.SetTCPPorts(n.Path, ports("198.18.0.1:1", "[fd70:6f72:746f::11]:1")); err != nil {
		t.Errorf("a family that is not captured: %v", err)
	}
	if err := capture.SetTCPPorts(n.Path, []netip.AddrPort{{}}); err == nil || !strings.Contains(err.Error(), "TCP port") {
		t.Errorf("a bad port: %v", err)
	}
	if err := capture.SetTCPPorts("/run/netns/gone", nil); err == nil || !strings.Contains(err.Error(), "/run/netns/gone") {
		t.Errorf("a path that is gone: %v", err)
	}
}
