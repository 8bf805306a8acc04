package capture_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/plugins/capture"
)

// CNI-57: whatever a third party takes away or changes is found and named, and
// Apply puts it back; what it adds beside our table is tolerated.
func TestVerify(t *testing.T) {
	const table = "inet portolan"
	for _, tc := range []struct{ name, nft, kind, what string }{
		{"nothing", "", "", ""},
		{"a foreign table", "add table inet other", "", ""},
		{"more TCP ports", "add element " + table + " tcp_ports4 { 198.18.0.77 . 1 }", "", ""},
		{"another chain", "add chain " + table + " more", "", ""},
		{"everything flushed", "flush ruleset", "table", "inet portolan"},
		{"table deleted", "delete table " + table, "table", "inet portolan"},
		{"rules flushed", "flush table " + table, "rule", "1 of chain raw_output (loopback is never captured)"},
		{"one chain's rules", "flush chain " + table + " output", "rule", "1 of chain output (loopback is never captured)"},
		{"a chain deleted", "flush chain " + table + " raw_output; delete chain " + table + " raw_output", "chain", "raw_output"},
		{"a chain that drops", "add chain " + table + " output { type nat hook output priority -100; policy drop; }", "chain", "output"},
		{"a rule before ours", "insert rule " + table + " output tcp dport 5432 accept", "rule", "1 of chain output (loopback is never captured)"},
		{"a rule after ours", "add rule " + table + " output drop", "rule", "9 of chain output (an end of the chain)"},
		{"an element", "delete element " + table + " tcp_ports6 { fd70:6f72:746f::10 . 5432 }", "element", "[fd70:6f72:746f::10]:5432 of set tcp_ports6"},
		{"another redirection", "replace rule", "rule", "5 of chain output (service addresses: HTTP)"},
		{"a set", "delete set", "set", "tcp_ports4"},
		{"a route", "route", "route", "198.18.0.0/15"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n, _ := pod(t, false)
			apply(t, n, dual())
			switch tc.nft {
			case "":
			case "route":
				n.Exec(t, "ip", "route", "del", "198.18.0.0/15")
			case "replace rule":
				n.Exec(t, "nft", "replace rule "+table+" output handle "+handle(t, n.Exec(t, "nft", "-a", "list", "chain", "inet", "portolan", "output"), "ip daddr 198.18.0.0/15")+
					" meta l4proto tcp ip daddr 198.18.0.0/15 redirect to :15009")
			case "delete set":
				n.Exec(t, "nft", "flush chain "+table+" output; delete set "+table+" tcp_ports4")
			default:
				n.Exec(t, "nft", tc.nft)
			}
			err := capture.Verify(n.Path, dual())
			missing, ok := errors.AsType[*capture.MissingError](err)
			switch {
			case tc.kind == "" && err != nil:
				t.Fatalf("Verify = %v, want nil", err)
			case tc.kind == "":
				return
			case !ok || missing.Kind != tc.kind || missing.Name != tc.what || missing.NetNS != n.Path:
				t.Fatalf("Verify = %v, want %s %s", err, tc.kind, tc.what)
			}
			if errors.Is(err, capture.ErrNoTable) != (tc.kind == "table") {
				t.Errorf("%v is ErrNoTable: %t", err, tc.kind != "table")
			}
			apply(t, n, dual())
			if err := capture.Verify(n.Path, dual()); err != nil {
				t.Errorf("after a repair: %v", err)
			}
		})
	}
}

// handle finds the handle of the rule that contains text.
func handle(t *testing.T, listing, text string) string {
	t.Helper()
	for line := range strings.Lines(listing) {
		if strings.Contains(line, text) {
			_, h, _ := strings.Cut(strings.TrimSpace(line), "# handle ")
			return h
		}
	}
	t.Fatalf("no rule with %q in\n%s", text, listing)
	return ""
}

// Verify compares with the configuration that it is given, not with any of ours.
func TestVerifyOtherConfig(t *testing.T) {
	n, _ := pod(t, true)
	apply(t, n, dual())
	noDNS, excluded, more := dual(), dual(), dual()
	noDNS.DNS = false
	excluded.ExcludePorts = []uint16{22}
	more.TCPPorts = append(more.TCPPorts, netip.MustParseAddrPort("198.18.0.11:1"))
	for name, cfg := range map[string]capture.Config{"DNS": noDNS, "exclusions": excluded, "TCP ports": more} {
		if _, ok := errors.AsType[*capture.MissingError](capture.Verify(n.Path, cfg)); !ok {
			t.Errorf("other %s are not noticed", name)
		}
	}
	for path, cfg := range map[string]capture.Config{"/run/netns/gone": dual(), n.Path: {}} {
		err := capture.Verify(path, cfg)
		if _, ok := errors.AsType[*capture.MissingError](err); ok || err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("Verify(%s) = %v, want another error with the path", path, err)
		}
	}
}
