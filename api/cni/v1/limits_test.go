package cniv1

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/limit"
)

// message is what every message of the package offers.
type message interface {
	proto.Message
	Validate() error
}

func attachment() *Attachment { return &Attachment{ContainerId: "c1", Ifname: "eth0"} }

func addRequest(edit func(*AddRequest)) *AddRequest {
	r := &AddRequest{
		Attachment: attachment(), Network: "net", Netns: "/run/portolan/netns/c1-eth0",
		Addresses: []string{"10.0.0.2", "fd00::2"}, CniArgs: map[string]string{"K8S_POD_NAME": "web-0"},
		Annotations: map[string]string{"aether.io/managed": "true"}, AnnotationsKnown: true,
		DnsServers: []string{"10.96.0.10"}, RuntimeNetns: "/run/netns/a",
	}
	edit(r)
	return r
}

func capture(edit func(*Capture)) *Capture {
	c := &Capture{
		VipRanges:    []string{"198.18.0.0/15", "fd70:6f72:746f::/64"},
		TcpPorts:     []*AddressPort{{Address: "198.18.0.10", Port: 5432}},
		ExcludePorts: []uint32{22}, ExcludeRanges: []string{"198.18.5.0/24"}, Dns: true, Ipv6: true,
	}
	edit(c)
	return c
}

func repeat[T any](v T, n int) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

func pairs(n int) map[string]string {
	out := make(map[string]string, n)
	for i := range n {
		out[fmt.Sprintf("k%d", i)] = ""
	}
	return out
}

// Every message at its limits is accepted: the limits of cni.proto are
// inclusive, and the largest message fits MaxMessage.
func TestValidateAcceptsLimits(t *testing.T) {
	longest := &Attachment{ContainerId: strings.Repeat("c", 253), Ifname: strings.Repeat("e", 15)}
	at := addRequest(func(r *AddRequest) {
		r.Attachment = longest
		r.Network = strings.Repeat("n", 253)
		r.Netns = "/" + strings.Repeat("p", 4095)
		r.Addresses = repeat("10.0.0.2", 8)
		r.CniArgs = pairs(31)
		r.CniArgs[strings.Repeat("k", 63)] = strings.Repeat("v", 253)
		r.Annotations = pairs(1023)
		r.Annotations[strings.Repeat("a", 317)] = ""
		used := 0
		for k := range r.GetAnnotations() {
			used += len(k)
		}
		r.Annotations["k0"] = strings.Repeat("v", 256<<10-used)
		r.DnsServers = repeat("10.96.0.10", 16)
		r.RuntimeNetns = strings.Repeat("p", 4096)
	})
	full := capture(func(c *Capture) {
		c.TcpPorts = repeat(&AddressPort{Address: "fd70:6f72:746f::ffff:ffff:ffff:ffff", Port: 65535}, 65536)
		c.ExcludePorts = repeat(uint32(65535), 64)
		c.ExcludeRanges = repeat("fd70:6f72:746f::/128", 64)
	})
	many := repeat(longest, 65536)
	for _, m := range []message{
		longest, at, addRequest(func(*AddRequest) {}), full, capture(func(*Capture) {}),
		&AddResponse{Reason: strings.Repeat("r", 1024)}, &AddResponse{Meshed: true, Capture: full},
		&AddressPort{Address: "::1", Port: 1},
		&DelRequest{Attachment: longest, Network: strings.Repeat("n", 253)}, &DelResponse{},
		&CheckRequest{Attachment: longest}, &CheckResponse{}, &CheckResponse{Meshed: true, Capture: full},
		&GCRequest{Network: "net", Valid: many}, &GCRequest{Network: "net"},
		&GCResponse{Removed: many}, &GCResponse{}, &StatusRequest{},
		&StatusResponse{Ready: true}, &StatusResponse{Limited: true, Reason: strings.Repeat("r", 1024)},
		&Note{UnixNanos: 1, What: &Note_Attached{Attached: at}},
		&Note{UnixNanos: 1, What: &Note_Unmeshed{Unmeshed: at}},
		&Note{UnixNanos: 1, What: &Note_Deleted{Deleted: &DelRequest{Attachment: longest, Network: "net"}}},
	} {
		if err := m.Validate(); err != nil {
			t.Errorf("%T: %v", m, err)
		}
		if got := proto.Size(m); got > MaxMessage {
			t.Errorf("%T has %d bytes, more than MaxMessage %d", m, got, MaxMessage)
		}
	}
}

// Every field of every message past its limit, or out of its form, is refused
// with an error that names field, length and limit.
func TestValidateRefuses(t *testing.T) {
	edit := func(f func(*AddRequest)) message { return addRequest(f) }
	capt := func(f func(*Capture)) message { return capture(f) }
	for _, tc := range []struct {
		name string
		msg  message
		want string
	}{
		{"no attachment", edit(func(r *AddRequest) { r.Attachment = nil }), `attachment: is missing`},
		{"empty container id", &Attachment{Ifname: "eth0"}, `attachment.container_id: "" does not match`},
		{"long container id", &Attachment{ContainerId: strings.Repeat("c", 254), Ifname: "eth0"}, "attachment.container_id: 254 bytes, at most 253"},
		{"container id with slash", &Attachment{ContainerId: "../c", Ifname: "eth0"}, `attachment.container_id: "../c" does not match`},
		{"container id starts with dash", &Attachment{ContainerId: "-c", Ifname: "eth0"}, `attachment.container_id: "-c" does not match`},
		{"long ifname", &Attachment{ContainerId: "c", Ifname: "eth0123456789012"}, "attachment.ifname: 16 bytes, at most 15"},
		{"empty ifname", &Attachment{ContainerId: "c"}, `attachment.ifname: "" is no interface name`},
		{"ifname slash", &Attachment{ContainerId: "c", Ifname: "a/b"}, `attachment.ifname: "a/b"`},
		{"ifname colon", &Attachment{ContainerId: "c", Ifname: "a:b"}, `attachment.ifname: "a:b"`},
		{"ifname blank", &Attachment{ContainerId: "c", Ifname: "a b"}, `attachment.ifname: "a b"`},
		{"ifname dots", &Attachment{ContainerId: "c", Ifname: ".."}, `attachment.ifname: ".."`},
		{"ifname zero byte", &Attachment{ContainerId: "c", Ifname: "a\x00"}, `attachment.ifname: "a\x00"`},

		{"add network", edit(func(r *AddRequest) { r.Network = strings.Repeat("n", 254) }), "network: 254 bytes, at most 253"},
		{"add network empty", edit(func(r *AddRequest) { r.Network = "" }), `network: "" does not match`},
		{"add netns relative", edit(func(r *AddRequest) { r.Netns = "netns/x" }), `netns: "netns/x" is not an absolute path`},
		{"add netns empty", edit(func(r *AddRequest) { r.Netns = "" }), `netns: "" is not an absolute path`},
		{"add netns long", edit(func(r *AddRequest) { r.Netns = "/" + strings.Repeat("n", 4096) }), "netns: 4097 bytes, at most 4096"},
		{"add no address", edit(func(r *AddRequest) { r.Addresses = nil }), "addresses: 0 entries, at least 1"},
		{"add nine addresses", edit(func(r *AddRequest) { r.Addresses = repeat("10.0.0.1", 9) }), "addresses: 9 entries, at most 8"},
		{"add bad address", edit(func(r *AddRequest) { r.Addresses = []string{"10.0.0.2", "10.0.0.2/24"} }), `addresses[1]: "10.0.0.2/24" is not an IP address`},
		{"add zone", edit(func(r *AddRequest) { r.Addresses = []string{"fe80::1%eth0"} }), `addresses[0]: "fe80::1%eth0" is not an IP address`},
		{"add long address", edit(func(r *AddRequest) { r.Addresses = []string{strings.Repeat("1", 46)} }), "addresses[0]: 46 bytes, at most 45"},
		{"args count", edit(func(r *AddRequest) { r.CniArgs = pairs(33) }), "cni_args: 33 entries, at most 32"},
		{"args key", edit(func(r *AddRequest) { r.CniArgs = map[string]string{strings.Repeat("k", 64): ""} }), `kkk": 64 bytes, at most 63`},
		{"args empty key", edit(func(r *AddRequest) { r.CniArgs = map[string]string{"": "v"} }), "cni_args: an empty key"},
		{"args value", edit(func(r *AddRequest) { r.CniArgs = map[string]string{"K": strings.Repeat("v", 254)} }), `cni_args["K"]: 254 bytes, at most 253`},
		{"annotations count", edit(func(r *AddRequest) { r.Annotations = pairs(1025) }), "annotations: 1025 entries, at most 1024"},
		{"annotation key", edit(func(r *AddRequest) { r.Annotations = map[string]string{strings.Repeat("k", 318): ""} }), `k": 318 bytes, at most 317`},
		{"annotation empty key", edit(func(r *AddRequest) { r.Annotations = map[string]string{"": ""} }), "annotations: an empty key"},
		{"annotations total", edit(func(r *AddRequest) { r.Annotations = map[string]string{"k": strings.Repeat("v", 256<<10)} }), "annotations: 262145 bytes in total, at most 262144"},
		{"annotations unknown", edit(func(r *AddRequest) { r.AnnotationsKnown = false }), "annotations: 1 entries although annotations_known is false"},
		{"dns count", edit(func(r *AddRequest) { r.DnsServers = repeat("10.0.0.1", 17) }), "dns_servers: 17 entries, at most 16"},
		{"dns form", edit(func(r *AddRequest) { r.DnsServers = []string{"ns1"} }), `dns_servers[0]: "ns1" is not an IP address`},
		{"runtime netns", edit(func(r *AddRequest) { r.RuntimeNetns = strings.Repeat("n", 4097) }), "runtime_netns: 4097 bytes, at most 4096"},

		{"add reason", &AddResponse{Reason: strings.Repeat("r", 1025)}, "reason: 1025 bytes, at most 1024"},
		{"meshed without capture", &AddResponse{Meshed: true}, "capture: present is false although meshed is true"},
		{"capture without meshed", &AddResponse{Capture: capture(func(*Capture) {})}, "capture: present is true although meshed is false"},
		{"add response's capture", &AddResponse{Meshed: true, Capture: &Capture{}}, "capture.vip_ranges: 0 entries, at least 1"},
		{"check response", &CheckResponse{Meshed: true}, "capture: present is false although meshed is true"},

		{"vip range", capt(func(c *Capture) { c.VipRanges = []string{"198.18.0.0"} }), `vip_ranges[0]: "198.18.0.0" is not a CIDR`},
		{"vip range mapped", capt(func(c *Capture) { c.VipRanges = []string{"::ffff:198.18.0.0/111"} }), `vip_ranges[0]: "::ffff:198.18.0.0/111" is not a CIDR`},
		{"vip range long", capt(func(c *Capture) { c.VipRanges = []string{strings.Repeat("1", 50)} }), "vip_ranges[0]: 50 bytes, at most 49"},
		{"second v4 range", capt(func(c *Capture) { c.VipRanges = []string{"198.18.0.0/15", "10.0.0.0/8"} }), "vip_ranges[1]: 10.0.0.0/8 is a second range of its family"},
		{"second v6 range", capt(func(c *Capture) { c.VipRanges = []string{"fd00::/64", "fd01::/64"} }), "vip_ranges[1]: fd01::/64 is a second range of its family"},
		{"tcp ports", capt(func(c *Capture) { c.TcpPorts = repeat(&AddressPort{Address: "10.0.0.1", Port: 1}, 65537) }), "tcp_ports: 65537 entries, at most 65536"},
		{"tcp port missing", capt(func(c *Capture) { c.TcpPorts = []*AddressPort{nil} }), "tcp_ports[0]: is missing"},
		{"tcp port zero", capt(func(c *Capture) { c.TcpPorts = []*AddressPort{{Address: "10.0.0.1"}} }), "tcp_ports[0].port: 0 is not in 1-65535"},
		{"address port", &AddressPort{Address: "10.0.0.1", Port: 65536}, "address_port.port: 65536 is not in 1-65535"},
		{"address port address", &AddressPort{Address: "x", Port: 1}, `address_port.address: "x" is not an IP address`},
		{"exclude ports", capt(func(c *Capture) { c.ExcludePorts = repeat(uint32(1), 65) }), "exclude_ports: 65 entries, at most 64"},
		{"exclude port", capt(func(c *Capture) { c.ExcludePorts = []uint32{65536} }), "exclude_ports[0]: 65536 is not in 1-65535"},
		{"exclude ranges", capt(func(c *Capture) { c.ExcludeRanges = repeat("10.0.0.0/8", 65) }), "exclude_ranges: 65 entries, at most 64"},
		{"exclude range", capt(func(c *Capture) { c.ExcludeRanges = []string{"10.0.0.0/33"} }), `exclude_ranges[0]: "10.0.0.0/33" is not a CIDR`},

		{"del", &DelRequest{Network: "net"}, "attachment: is missing"},
		{"del network", &DelRequest{Attachment: attachment(), Network: "a/b"}, `network: "a/b" does not match`},
		{"check", &CheckRequest{}, "attachment: is missing"},
		{"gc network", &GCRequest{}, `network: "" does not match`},
		{"gc count", &GCRequest{Network: "net", Valid: repeat(attachment(), 65537)}, "valid: 65537 entries, at most 65536"},
		{"gc entry", &GCRequest{Network: "net", Valid: []*Attachment{attachment(), {}}}, `valid[1].container_id: "" does not match`},
		{"gc nil entry", &GCRequest{Network: "net", Valid: []*Attachment{nil}}, "valid[0]: is missing"},
		{"gc removed", &GCResponse{Removed: repeat(attachment(), 65537)}, "removed: 65537 entries, at most 65536"},
		{"status reason", &StatusResponse{Reason: strings.Repeat("r", 1025)}, "reason: 1025 bytes, at most 1024"},
		{"status limited", &StatusResponse{Ready: true, Limited: true}, "limited: is true although ready is true"},

		{"note time", &Note{What: &Note_Deleted{}}, "unix_nanos: 0 is no time"},
		{"note empty", &Note{UnixNanos: 1}, "what: is missing"},
		{"note attached", &Note{UnixNanos: 1, What: &Note_Attached{}}, "attached: attachment: is missing"},
		{"note unmeshed", &Note{UnixNanos: 1, What: &Note_Unmeshed{}}, "unmeshed: attachment: is missing"},
		{"note deleted", &Note{UnixNanos: 1, What: &Note_Deleted{}}, "deleted: attachment: is missing"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.msg.Validate()
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("Validate() = %v, want an error with %q", err, tc.want)
			}
			if _, ok := errors.AsType[*limit.FieldError](err); !ok {
				t.Errorf("%T is no *limit.FieldError", err)
			}
		})
	}
}

// A nil message is refused or harmless, never a panic: what arrives over the
// wire may leave out any message field.
func TestValidateNil(t *testing.T) {
	for _, m := range []message{
		(*Attachment)(nil), (*AddRequest)(nil), (*Capture)(nil), (*AddressPort)(nil), (*DelRequest)(nil),
		(*CheckRequest)(nil), (*GCRequest)(nil), (*Note)(nil),
	} {
		if m.Validate() == nil {
			t.Errorf("nil %T is accepted", m)
		}
	}
	for _, m := range []message{
		(*AddResponse)(nil), (*CheckResponse)(nil), (*GCResponse)(nil), (*StatusRequest)(nil), (*StatusResponse)(nil), (*DelResponse)(nil),
	} {
		if err := m.Validate(); err != nil {
			t.Errorf("nil %T, which is empty, is refused: %v", m, err)
		}
	}
}

// FuzzAddRequestValidate proves that no bytes from the wire make Validate panic,
// and that what it accepts names a file safely (C3).
func FuzzAddRequestValidate(f *testing.F) {
	for _, r := range []*AddRequest{{}, addRequest(func(*AddRequest) {})} {
		b, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r AddRequest
		if proto.Unmarshal(b, &r) != nil || r.Validate() != nil {
			return
		}
		if name := r.GetAttachment().GetContainerId() + "-" + r.GetAttachment().GetIfname(); strings.ContainsAny(name, "/\x00 ") {
			t.Fatalf("accepted as part of a file name: %q", name)
		}
	})
}
