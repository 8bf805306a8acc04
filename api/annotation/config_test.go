package annotation

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/portolan-mesh/portolan/api/port"
)

func http(n uint16) port.Port { return port.Port{Number: n, Protocol: port.HTTP} }
func h2(n uint16) port.Port   { return port.Port{Number: n, Protocol: port.H2} }
func tcp(n uint16) port.Port  { return port.Port{Number: n, Protocol: port.TCP} }

// compare lets nil and empty lists be the same and compares prefixes by value.
var compare = cmp.Options{cmpopts.EquateEmpty(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })}

// The port keys: which set and which default each pair of values gives
// (contract 1, the rows `port` and `ports`; MESH-6, MESH-8).
func TestParsePorts(t *testing.T) {
	const absent = "<absent>"
	for _, tt := range []struct {
		name, port, ports string
		want              []port.Port
		def               uint16
	}{
		{"nothing said", absent, absent, []port.Port{http(8080)}, 8080},
		{"port alone", "9000", absent, []port.Port{http(9000)}, 9000},
		{"ports with 8080 first", absent, "8080,9090", []port.Port{http(8080), http(9090)}, 8080},
		{"ports with 8080 last", absent, "9090=h2,8080", []port.Port{http(8080), h2(9090)}, 8080},
		{"8080 is tcp", absent, "9090,8080=tcp", []port.Port{tcp(8080), http(9090)}, 8080},
		{"ports without 8080: the first listed", absent, "9090,3000", []port.Port{http(3000), http(9090)}, 9090},
		{"the first listed may be tcp", absent, "5432=tcp,9090", []port.Port{tcp(5432), http(9090)}, 5432},
		{"port wins over 8080", "9090", "8080,9090", []port.Port{http(8080), http(9090)}, 9090},
		{"port is added to the set", "7000", "8080,9090", []port.Port{http(7000), http(8080), http(9090)}, 7000},
		{"port keeps the protocol of its entry", "9090", "8080,9090=h2", []port.Port{http(8080), h2(9090)}, 9090},
		{"duplicates fold", absent, "80,80", []port.Port{http(80)}, 80},
		{"aliases fold", absent, "9090=h2,9090=grpc,9090=http2", []port.Port{h2(9090)}, 9090},
		{"http by name", absent, "8080=http,8080", []port.Port{http(8080)}, 8080},
		{"blanks around commas", absent, " 8080 ,\t9090=tcp ", []port.Port{http(8080), tcp(9090)}, 8080},
		{"80 as the default", "80", "8080", []port.Port{http(80), http(8080)}, 80},
		{"80 as the first listed", absent, "80,9090", []port.Port{http(80), http(9090)}, 80},
		{"80 as tcp", absent, "8080,80=tcp", []port.Port{tcp(80), http(8080)}, 8080},
		{"the bounds", absent, "1,65535", []port.Port{http(1), http(65535)}, 1},
		{"a pure client", absent, "none", nil, 0},
		{"a pure client with blanks", absent, " none ", nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := map[string]string{KeyManaged: "true"}
			if tt.port != absent {
				in[KeyPort] = tt.port
			}
			if tt.ports != absent {
				in[KeyPorts] = tt.ports
			}
			got, err := Parse(in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got.Ports, compare); diff != "" || got.Default != tt.def {
				t.Errorf("default %d, want %d; ports (-want +got):\n%s", got.Default, tt.def, diff)
			}
		})
	}
}

// Exactly 64 ports are served, one more is refused, whether listed or added by
// the default (contract 1, XDS-23).
func TestParsePortCount(t *testing.T) {
	list := func(n int) string {
		numbers := make([]string, n)
		for i := range numbers {
			numbers[i] = fmt.Sprint(2000 + i)
		}
		return strings.Join(numbers, ",")
	}
	if got, err := Parse(map[string]string{KeyPorts: list(64) + "," + list(64)}); err != nil || len(got.Ports) != 64 {
		t.Errorf("64 ports, each listed twice: %d, %v", len(got.Ports), err)
	}
	for name, in := range map[string]map[string]string{
		"65 ports":           {KeyPorts: list(65)},
		"64 and the default": {KeyPorts: list(64), KeyPort: "8080"},
		"300 ports":          {KeyPorts: list(300)},
	} {
		if _, err := Parse(in); err == nil || !strings.Contains(err.Error(), "more than 64; serve at most 64 ports per pod") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whether a pod joins by its own word (contract 1, the row `managed`, and the
// opt-in of contract 4.1): OptIn, Managed and Meshed for every combination.
func TestOptIn(t *testing.T) {
	for _, tt := range []struct {
		name    string
		in      map[string]string
		want    Managed
		managed Managed
	}{
		{"nothing", nil, Unset, Unset},
		{"keys of others", map[string]string{"example.org/port": "8080"}, Unset, Unset},
		{"other keys of ours", map[string]string{KeyService: "x", KeyWeight: "0"}, Unset, Unset},
		{"true", map[string]string{KeyManaged: "true"}, Joined, Joined},
		{"false", map[string]string{KeyManaged: "false"}, Out, Out},
		{"port", map[string]string{KeyPort: "8080"}, Joined, Unset},
		{"ports", map[string]string{KeyPorts: "8080"}, Joined, Unset},
		{"none is a port annotation too", map[string]string{KeyPorts: "none"}, Joined, Unset},
		{"bad port", map[string]string{KeyPort: ""}, Joined, Unset},
		{"bad managed", map[string]string{KeyManaged: "yes"}, Joined, Unset},
		{"empty managed", map[string]string{KeyManaged: ""}, Joined, Unset},
		{"false wins over port", map[string]string{KeyManaged: "false", KeyPort: "8080", KeyPorts: "8080"}, Out, Out},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := OptIn(tt.in); got != tt.want {
				t.Errorf("OptIn = %v, want %v", got, tt.want)
			}
			got, _ := Parse(tt.in)
			if got.Managed != tt.managed || got.Meshed != (tt.want == Joined) {
				t.Errorf("Parse: managed %v meshed %v, want %v %v", got.Managed, got.Meshed, tt.managed, tt.want == Joined)
			}
		})
	}
}

// A pod that stays out starts whatever else its annotations say; unknown keys
// are still reported.
func TestParseOut(t *testing.T) {
	got, err := Parse(map[string]string{
		KeyManaged: "false", KeyPorts: "garbage", KeyWeight: "-1", KeyAllow: "x", KeyStrict: "true", "endpoint.aether.io/prots": "1",
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Config{Managed: Out, Unknown: []string{"endpoint.aether.io/prots"}}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The rows of contract 1 other than the ports, all at once.
func TestParseAll(t *testing.T) {
	got, err := Parse(map[string]string{
		KeyManaged:                         "true",
		KeyPort:                            "8080",
		KeyPorts:                           "8080,9090=h2,5432=tcp",
		KeyService:                         "payments",
		KeyWeight:                          "65535",
		KeyMetadataPrefix + "version":      "v2",
		KeyMetadataPrefix + "track":        "",
		KeyUpstreams:                       "stock, payments.shop,stock , a-1",
		KeyExcludePorts:                    "3306, 25,25, 15001",
		KeyExcludeRanges:                   "10.1.2.3/8, fd00::1/8,10.0.0.0/8,10.9.0.0/16, 192.168.1.1/32,::/128",
		KeyRedirectAll:                     "false",
		KeyStrict:                          "false",
		"prometheus.io/port":               "9090",
		"endpoint.aether.io/prots":         "1",
		"aether.io/manged":                 "true",
		"metadata.endpoint.aether.io":      "no slash: not a key of ours",
		"endpoints.aether.io/port":         "1",
		"Inbound.Aether.IO/strict":         "true",
		"notaether.io/port":                "1",
		"aether.io.example.org/port":       "1",
		"config.aether.io/":                "1",
		"k8s.v1.cni.cncf.io/networks":      "x",
		"capture.aether.io/exclude/ranges": "x",
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Managed: Joined, Meshed: true,
		Default:      8080,
		Ports:        []port.Port{tcp(5432), http(8080), h2(9090)},
		Service:      "payments",
		Weight:       65535,
		Metadata:     map[string]string{"version": "v2", "track": ""},
		Upstreams:    []string{"a-1", "payments.shop", "stock"},
		ExcludePorts: []uint16{25, 3306, 15001},
		ExcludeRanges: []netip.Prefix{
			netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.168.1.1/32"),
			netip.MustParsePrefix("::/128"), netip.MustParsePrefix("fd00::/8"),
		},
		Unknown: []string{
			"Inbound.Aether.IO/strict", "aether.io/manged", "capture.aether.io/exclude/ranges",
			"config.aether.io/", "endpoint.aether.io/prots", "endpoints.aether.io/port",
		},
	}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The defaults of contract 1.
func TestParseDefaults(t *testing.T) {
	got, err := Parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := Config{Default: 8080, Ports: []port.Port{http(8080)}, Weight: 1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A result shares nothing with the input or with another result (MESH-23).
func TestParseOwnsResult(t *testing.T) {
	in := map[string]string{KeyPorts: "8080,9090", KeyMetadataPrefix + "a": "1", KeyUpstreams: "x,y"}
	one, err := Parse(in)
	if err != nil {
		t.Fatal(err)
	}
	one.Ports[0], one.Metadata["a"], one.Upstreams[0] = tcp(1), "2", "z"
	two, err := Parse(in)
	if err != nil || two.Ports[0] != http(8080) || two.Metadata["a"] != "1" || two.Upstreams[0] != "x" {
		t.Errorf("%+v, %v", two, err)
	}
}

// A label's value is read as strictly as the annotation's (contract 1: the opt-in
// may be a label of the same name).
func TestParseManaged(t *testing.T) {
	for _, tt := range []struct {
		value string
		want  Managed
		bad   bool
	}{{"true", Joined, false}, {"false", Out, false}, {"", Unset, true}, {"True", Unset, true}, {"1", Unset, true}, {"true ", Unset, true}} {
		got, err := ParseManaged(tt.value)
		var e *Error
		if got != tt.want || (err != nil) != tt.bad || tt.bad && (!errors.As(err, &e) || e.Key != KeyManaged || e.Value != tt.value) {
			t.Errorf("ParseManaged(%q) = %v, %v", tt.value, got, err)
		}
	}
}

// FuzzParse holds for any values of all keys: no panic; every message line is
// shorter than 200 bytes and names its key; what is accepted is within the limits,
// sorted, and the same again when it is written out and parsed.
func FuzzParse(f *testing.F) {
	f.Add("true", "8080", "8080,9090=h2,5432=tcp", "payments", "1", "v1", "stock,payments.shop", "25", "10.0.0.0/8,fd00::/8")
	f.Add("", "", "", "", "", "", "", "", "")
	f.Add("false", "0", "8080,", "A", "0", "\xff", "a.b.c", "65536", "10.0.0.0/33")
	f.Add("True", "65536", "abc", "-a", "1.5", strings.Repeat("x", 300), ",", "80,80", "::ffff:10.0.0.0/104")
	f.Add("true", "8080 ", "9090=h9,none", strings.Repeat("a", 64), "+1", "", "payments:80", " 1 , 2 ", "1.2.3.4")
	f.Add("true", "８０", "none", "x", "65535", "\x00", "*", "http", "10.0.0.0/8,10.1.0.0/16")
	f.Add("true", "15008", "80,15001=tcp,9090=h2,9090=tcp", "x", "1", "\u202e", "\u202e\u202e", "\t", strings.Repeat("\xff", 400))
	f.Fuzz(func(t *testing.T, managed, one, many, service, weight, metadata, upstreams, ports, ranges string) {
		in := map[string]string{
			KeyManaged: managed, KeyPort: one, KeyPorts: many, KeyService: service, KeyWeight: weight,
			KeyMetadataPrefix + "m": metadata, KeyMetadataPrefix + metadata: "v", KeyUpstreams: upstreams,
			KeyExcludePorts: ports, KeyExcludeRanges: ranges, KeyStrict: managed,
		}
		_, err := Parse(in)
		checkErrors(t, in, err)
		for _, mostlyBad := range []string{KeyManaged, KeyPort, KeyMetadataPrefix + metadata, KeyStrict} {
			delete(in, mostlyBad)
		}
		got, err := Parse(in)
		checkErrors(t, in, err)
		if err != nil {
			return
		}
		checkConfig(t, got)
		again, err := Parse(written(got))
		if diff := cmp.Diff(got, again, compare); err != nil || diff != "" {
			t.Fatalf("written out and parsed: %v\n%s", err, diff)
		}
	})
}

// checkErrors holds the bounds of every message.
func checkErrors(t *testing.T, in map[string]string, err error) {
	t.Helper()
	if err == nil {
		return
	}
	var list Errors
	if !errors.As(err, &list) || len(list) == 0 || len(list) > maxErrors {
		t.Fatalf("not a list of 1 to %d errors: %#v", maxErrors, err)
	}
	for _, e := range list {
		line := e.Error()
		if len(line) >= 200 || strings.ContainsAny(line, "\n\r\x00") {
			t.Fatalf("a line of %d bytes: %s", len(line), line)
		}
		if value, ok := in[e.Key]; !ok || value != e.Value || e.Problem == "" || e.Remedy == "" {
			t.Fatalf("incomplete: %#v", e)
		}
	}
}

// checkConfig holds what the doc comments of Config promise.
func checkConfig(t *testing.T, c Config) {
	t.Helper()
	hasDefault := len(c.Ports) == 0 && c.Default == 0
	for i, p := range c.Ports {
		if p.Number == 0 || p.Protocol == port.Unknown || i > 0 && c.Ports[i-1].Number >= p.Number {
			t.Fatalf("ports: %v", c.Ports)
		}
		hasDefault = hasDefault || p.Number == c.Default
	}
	if !hasDefault || len(c.Ports) > MaxPorts || c.Weight < 1 || c.Weight > 65535 || len(c.Metadata) > MaxMetadata ||
		len(c.Upstreams) > MaxUpstreams || len(c.ExcludePorts) > MaxExclusions || len(c.ExcludeRanges) > MaxExclusions {
		t.Fatalf("past a limit: %+v", c)
	}
	for i, a := range c.ExcludeRanges {
		for _, b := range c.ExcludeRanges[i+1:] {
			if a.Overlaps(b) {
				t.Fatalf("%v overlaps %v", a, b)
			}
		}
	}
	if !slices.IsSorted(c.Upstreams) || !slices.IsSorted(c.ExcludePorts) {
		t.Fatalf("not sorted: %+v", c)
	}
}

// written returns annotations that say exactly c.
func written(c Config) map[string]string {
	var ports, excluded, ranges []string
	for _, p := range c.Ports {
		ports = append(ports, fmt.Sprintf("%d=%v", p.Number, p.Protocol))
	}
	for _, n := range c.ExcludePorts {
		excluded = append(excluded, fmt.Sprint(n))
	}
	for _, r := range c.ExcludeRanges {
		ranges = append(ranges, r.String())
	}
	out := map[string]string{KeyPorts: noPorts, KeyService: c.Service, KeyWeight: fmt.Sprint(c.Weight)}
	if len(ports) > 0 {
		out[KeyPorts], out[KeyPort] = strings.Join(ports, ","), fmt.Sprint(c.Default)
	}
	for key, list := range map[string][]string{KeyUpstreams: c.Upstreams, KeyExcludePorts: excluded, KeyExcludeRanges: ranges} {
		if len(list) > 0 {
			out[key] = strings.Join(list, ", ")
		}
	}
	for key, value := range c.Metadata {
		out[KeyMetadataPrefix+key] = value
	}
	return out
}

func BenchmarkParse(b *testing.B) {
	in := map[string]string{
		KeyPorts: "8080,9090=h2,5432=tcp", KeyService: "payments", KeyUpstreams: "stock,payments.shop",
		KeyMetadataPrefix + "version": "v2", "prometheus.io/scrape": "true",
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(in); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOptIn(b *testing.B) {
	in := map[string]string{"a": "b", KeyPorts: "8080"}
	for b.Loop() {
		OptIn(in)
	}
}
