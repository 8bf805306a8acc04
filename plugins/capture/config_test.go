package capture

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

func addrPorts(t *testing.T, numbers []string) []netip.AddrPort {
	t.Helper()
	var out []netip.AddrPort
	for _, n := range numbers {
		p, err := strconv.ParseUint(n, 10, 16)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, netip.AddrPortFrom(netip.MustParseAddr("198.18.0.1"), uint16(p)))
	}
	return out
}

func texts(ports []netip.AddrPort) string {
	var out []string
	for _, p := range ports {
		out = append(out, strconv.Itoa(int(p.Port())))
	}
	return strings.Join(out, " ")
}

// The registrar's answer survives the way into a Config and back.
func TestFromProtoToProto(t *testing.T) {
	want := Config{
		VIPRanges:     []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")},
		TCPPorts:      []netip.AddrPort{netip.MustParseAddrPort("198.18.0.1:5432"), netip.MustParseAddrPort("[fd70:6f72:746f::1]:65535")},
		ExcludePorts:  []uint16{1, 65535},
		ExcludeRanges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::/0")},
		DNS:           true, IPv6: true,
	}
	for _, cfg := range []Config{want, {VIPRanges: want.VIPRanges[:1]}} {
		got, err := FromProto(cfg.ToProto())
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(cfg, got, cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{})); d != "" {
			t.Errorf("there and back (-want +got):\n%s", d)
		}
	}
}

// What breaks a limit or a form is refused with the field's name.
func TestFromProtoRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		capture *cniv1.Capture
		want    string
	}{
		"nothing":  {nil, "vip_ranges: 0 entries"},
		"range":    {&cniv1.Capture{VipRanges: []string{"198.18.0.0"}}, `vip_ranges[0]: "198.18.0.0" is not a CIDR`},
		"port":     {&cniv1.Capture{VipRanges: []string{"198.18.0.0/15"}, ExcludePorts: []uint32{70000}}, "exclude_ports[0]: 70000"},
		"tcp port": {&cniv1.Capture{VipRanges: []string{"198.18.0.0/15"}, TcpPorts: []*cniv1.AddressPort{{Address: "x", Port: 1}}}, `tcp_ports[0].address: "x"`},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := FromProto(tc.capture); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("FromProto = %v, want an error with %q", err, tc.want)
			}
		})
	}
}

// The element of a set says which pair it is, and only that.
func TestPortKey(t *testing.T) {
	for _, text := range []string{"198.18.0.10:5432", "[fd70:6f72:746f::10]:65535", "[::1]:1"} {
		want := netip.MustParseAddrPort(text)
		got, err := parsePortKey(portKey(want))
		if err != nil || got != want {
			t.Errorf("%s there and back = %v, %v", text, got, err)
		}
	}
	for _, key := range [][]byte{nil, make([]byte, 4), make([]byte, 12), make([]byte, 24)} {
		if got, err := parsePortKey(key); err == nil {
			t.Errorf("parsePortKey(%x) = %v", key, got)
		}
	}
}
