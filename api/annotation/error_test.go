package annotation

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Every refused value of contract 1's table has a message of its own, naming key,
// value, problem and remedy (CNI-46, XDS-23, XDS-24, MESH-6).
func TestParseRefuses(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, tt := range []struct{ key, value, want string }{
		{KeyManaged, "", `aether.io/managed="": neither "true" nor "false"; write "true" to join the mesh, "false" to stay out`},
		{KeyManaged, "True", `aether.io/managed="True": neither "true" nor "false"; write "true" to join the mesh, "false" to stay out`},

		{KeyPort, "", `endpoint.aether.io/port="": empty value; write a number in 1-65535, such as 8080`},
		{KeyPort, "0", `endpoint.aether.io/port="0": "0": no leading zero, and 0 is no port; write a number in 1-65535, such as 8080`},
		{KeyPort, "08080", `endpoint.aether.io/port="08080": "08080": no leading zero, and 0 is no port; write a number in 1-65535, such as 8080`},
		{KeyPort, "65536", `endpoint.aether.io/port="65536": "65536": not in 1-65535; write a number in 1-65535, such as 8080`},
		{KeyPort, "+80", `endpoint.aether.io/port="+80": "+80": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "8080 ", `endpoint.aether.io/port="8080 ": "8080 ": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "80 80", `endpoint.aether.io/port="80 80": "80 80": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "http", `endpoint.aether.io/port="http": "http": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "８０", `endpoint.aether.io/port="８０": "８０": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "8080=h2", `endpoint.aether.io/port="8080=h2": "8080=h2": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "8080,9090", `endpoint.aether.io/port="8080,9090": "8080,9090": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "none", `endpoint.aether.io/port="none": "none": only the digits 0-9 are allowed; write a number in 1-65535, such as 8080`},
		{KeyPort, "15008", `endpoint.aether.io/port="15008": port 15008 belongs to the mesh; serve on another port`},

		{KeyPorts, "", `endpoint.aether.io/ports="": empty value; remove the key, or list something`},
		{KeyPorts, " \t", `endpoint.aether.io/ports=" \t": empty value; remove the key, or list something`},
		{KeyPorts, "8080,", `endpoint.aether.io/ports="8080,": empty element; remove the extra comma`},
		{KeyPorts, ",8080", `endpoint.aether.io/ports=",8080": empty element; remove the extra comma`},
		{KeyPorts, "8080,,9090", `endpoint.aether.io/ports="8080,,9090": empty element; remove the extra comma`},
		{KeyPorts, ",", `endpoint.aether.io/ports=",": empty element; remove the extra comma`},
		{KeyPorts, "abc", `endpoint.aether.io/ports="abc": "abc": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "8080;9090", `endpoint.aether.io/ports="8080;9090": "8080;9090": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "8080 9090", `endpoint.aether.io/ports="8080 9090": "8080 9090": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "8080,9090\n", `endpoint.aether.io/ports="8080,9090\n": "9090\n": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "8080,0", `endpoint.aether.io/ports="8080,0": "0": no leading zero, and 0 is no port; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "8080,65536", `endpoint.aether.io/ports="8080,65536": "65536": not in 1-65535; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "=h2", `endpoint.aether.io/ports="=h2": empty value; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "9090=", `endpoint.aether.io/ports="9090=": port 9090: unknown protocol ""; use http, h2 (grpc, http2) or tcp`},
		{KeyPorts, "9090=h9", `endpoint.aether.io/ports="9090=h9": port 9090: unknown protocol "h9"; use http, h2 (grpc, http2) or tcp`},
		{KeyPorts, "9090=H2", `endpoint.aether.io/ports="9090=H2": port 9090: unknown protocol "H2"; use http, h2 (grpc, http2) or tcp`},
		{KeyPorts, "9090= h2", `endpoint.aether.io/ports="9090= h2": port 9090: unknown protocol " h2"; use http, h2 (grpc, http2) or tcp`},
		{KeyPorts, "9090=h2=tcp", `endpoint.aether.io/ports="9090=h2=tcp": port 9090: unknown protocol "h2=tcp"; use http, h2 (grpc, http2) or tcp`},
		{KeyPorts, "53=udp", `endpoint.aether.io/ports="53=udp": port 53: udp is not meshed; leave the port out of the list`},
		{KeyPorts, "9090=h2,9090=tcp", `endpoint.aether.io/ports="9090=h2,9090=tcp": port 9090 is both h2 and tcp; list the port once`},
		{KeyPorts, "9090,9090=h2", `endpoint.aether.io/ports="9090,9090=h2": port 9090 is both http and h2; list the port once`},
		{KeyPorts, "8080,15001", `endpoint.aether.io/ports="8080,15001": port 15001 belongs to the mesh; serve on another port`},
		{KeyPorts, "15002=tcp", `endpoint.aether.io/ports="15002=tcp": port 15002 belongs to the mesh; serve on another port`},
		{KeyPorts, "15008", `endpoint.aether.io/ports="15008": port 15008 belongs to the mesh; serve on another port`},
		{KeyPorts, "15053", `endpoint.aether.io/ports="15053": port 15053 belongs to the mesh; serve on another port`},
		{KeyPorts, "8080,80", `endpoint.aether.io/ports="8080,80": 80 must be the default HTTP port: clients drop ":80"; set endpoint.aether.io/port to 80, or drop it`},
		{KeyPorts, "8080,80=h2", `endpoint.aether.io/ports="8080,80=h2": 80 must be the default HTTP port: clients drop ":80"; set endpoint.aether.io/port to 80, or drop it`},
		{KeyPorts, "8080,none", `endpoint.aether.io/ports="8080,none": "none" stands beside ports; write "none" alone, or only ports`},
		{KeyPorts, "None", `endpoint.aether.io/ports="None": "None": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},
		{KeyPorts, "NONE,x", `endpoint.aether.io/ports="NONE,x": "NONE": only the digits 0-9 are allowed; write 1-65535, as in "8080,9090=h2"`},

		{KeyService, "", `endpoint.aether.io/service="": not a DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyService, "Payments", `endpoint.aether.io/service="Payments": not a DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyService, "payments.shop", `endpoint.aether.io/service="payments.shop": not a DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyService, long, `endpoint.aether.io/service="` + strings.Repeat("x", 33) + `...": not a DNS label; use a-z, 0-9 and "-" inside, at most 63`},

		{KeyWeight, "0", `endpoint.aether.io/weight="0": not a whole number in 1-65535; write one, such as 10`},
		{KeyWeight, "65536", `endpoint.aether.io/weight="65536": not a whole number in 1-65535; write one, such as 10`},
		{KeyWeight, "", `endpoint.aether.io/weight="": not a whole number in 1-65535; write one, such as 10`},
		{KeyWeight, "1.5", `endpoint.aether.io/weight="1.5": not a whole number in 1-65535; write one, such as 10`},

		{KeyMetadataPrefix + "Version", "v", `metadata.endpoint.aether.io/Version="v": the key is no DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyMetadataPrefix, "v", `metadata.endpoint.aether.io/="v": the key is no DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyMetadataPrefix + "a/b", "v", `metadata.endpoint.aether.io/a/b="v": the key is no DNS label; use a-z, 0-9 and "-" inside, at most 63`},
		{KeyMetadataPrefix + "ip", "v", `metadata.endpoint.aether.io/ip="v": the key is reserved; use a name other than ip, pod, node, namespace`},
		{KeyMetadataPrefix + "pod", "v", `metadata.endpoint.aether.io/pod="v": the key is reserved; use a name other than ip, pod, node, namespace`},
		{KeyMetadataPrefix + "node", "v", `metadata.endpoint.aether.io/node="v": the key is reserved; use a name other than ip, pod, node, namespace`},
		{KeyMetadataPrefix + "namespace", "v", `metadata.endpoint.aether.io/namespace="v": the key is reserved; use a name other than ip, pod, node, namespace`},
		{KeyMetadataPrefix + "a", long, `metadata.endpoint.aether.io/a="` + strings.Repeat("x", 33) + `...": value of 300 bytes; use at most 253 bytes`},
		{KeyMetadataPrefix + "a", "\xff", `metadata.endpoint.aether.io/a="\xff": value is not UTF-8; write it as text`},

		{KeyUpstreams, "", `config.aether.io/upstreams="": empty value; remove the key, or list something`},
		{KeyUpstreams, "payments,", `config.aether.io/upstreams="payments,": empty element; remove the extra comma`},
		{KeyUpstreams, "payments:9090", `config.aether.io/upstreams="payments:9090": "payments:9090" is no service name; write "payments" or "payments.shop"`},
		{KeyUpstreams, "payments.aether.internal", `config.aether.io/upstreams="payments.aether.internal": "payments.aether.i..." is no service name; write "payments" or "payments.shop"`},
		{KeyUpstreams, "payments.", `config.aether.io/upstreams="payments.": "payments." is no service name; write "payments" or "payments.shop"`},
		{KeyUpstreams, "*", `config.aether.io/upstreams="*": "*" is no service name; write "payments" or "payments.shop"`},

		{KeyExcludePorts, "", `capture.aether.io/exclude-outbound-ports="": empty value; remove the key, or list something`},
		{KeyExcludePorts, "25,0", `capture.aether.io/exclude-outbound-ports="25,0": "0": no leading zero, and 0 is no port; write 1-65535, as in "25,3306"`},
		{KeyExcludePorts, "25-30", `capture.aether.io/exclude-outbound-ports="25-30": "25-30": only the digits 0-9 are allowed; write 1-65535, as in "25,3306"`},
		{KeyExcludePorts, "*", `capture.aether.io/exclude-outbound-ports="*": "*": only the digits 0-9 are allowed; write 1-65535, as in "25,3306"`},

		{KeyExcludeRanges, "", `capture.aether.io/exclude-outbound-ip-ranges="": empty value; remove the key, or list something`},
		{KeyExcludeRanges, "10.0.0.1", `capture.aether.io/exclude-outbound-ip-ranges="10.0.0.1": "10.0.0.1" is no CIDR; write "10.0.0.0/8" or "fd00::/8"`},
		{KeyExcludeRanges, "10.0.0.0/33", `capture.aether.io/exclude-outbound-ip-ranges="10.0.0.0/33": "10.0.0.0/33" is no CIDR; write "10.0.0.0/8" or "fd00::/8"`},
		{KeyExcludeRanges, "10.0.0.0/08", `capture.aether.io/exclude-outbound-ip-ranges="10.0.0.0/08": "10.0.0.0/08" is no CIDR; write "10.0.0.0/8" or "fd00::/8"`},
		{KeyExcludeRanges, "fd00::%eth0/8", `capture.aether.io/exclude-outbound-ip-ranges="fd00::%eth0/8": "fd00::%eth0/8" is no CIDR; write "10.0.0.0/8" or "fd00::/8"`},
		{KeyExcludeRanges, "::ffff:10.0.0.0/104", `capture.aether.io/exclude-outbound-ip-ranges="::ffff:10.0.0.0/104": "::ffff:10.0.0.0/104" is IPv4 in IPv6; write "10.0.0.0/8" or "fd00::/8"`},
		{KeyExcludeRanges, "*", `capture.aether.io/exclude-outbound-ip-ranges="*": "*" is no CIDR; write "10.0.0.0/8" or "fd00::/8"`},

		{KeyRedirectAll, "true", `capture.aether.io/redirect-all="true": not supported by this version; remove the key or set it to "false"`},
		{KeyRedirectAll, "yes", `capture.aether.io/redirect-all="yes": only "false" is supported by this version; remove the key`},
		{KeyRedirectAll, "", `capture.aether.io/redirect-all="": only "false" is supported by this version; remove the key`},
		{KeyStrict, "true", `inbound.aether.io/strict="true": not supported by this version; remove the key or set it to "false"`},
		{KeyStrict, "False", `inbound.aether.io/strict="False": only "false" is supported by this version; remove the key`},
		{KeyAllow, "", `inbound.aether.io/allow="": not supported by this version; remove the key`},
		{KeyAllow, "9090=ns/shop/sa/checkout", `inbound.aether.io/allow="9090=ns/shop/sa/checkout": not supported by this version; remove the key`},
	} {
		t.Run(fmt.Sprintf("%s=%.40q", tt.key, tt.value), func(t *testing.T) {
			got, err := Parse(map[string]string{tt.key: tt.value})
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("accepted: %+v", got)
			}
			if e.Key != tt.key || e.Value != tt.value {
				t.Errorf("the error is about %s=%q", e.Key, e.Value)
			}
			if line, _, _ := strings.Cut(err.Error(), "\n"); line != tt.want {
				t.Errorf("got  %s\nwant %s", line, tt.want)
			}
			if len(tt.want) >= 200 {
				t.Errorf("the line has %d bytes", len(tt.want))
			}
			if len(got.Ports) != 0 || got.Weight != 0 || got.Service != "" {
				t.Errorf("values beside the error: %+v", got)
			}
		})
	}
}

// Two keys that contradict each other are refused on the one that can go.
func TestParseNoneWithPort(t *testing.T) {
	_, err := Parse(map[string]string{KeyPorts: "none", KeyPort: "8080"})
	const want = `endpoint.aether.io/ports="none": contradicts endpoint.aether.io/port; remove one of the two keys`
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// Too many of anything is refused: the records that carry them have limits.
func TestParseCounts(t *testing.T) {
	list := func(n int, format string) string {
		elements := make([]string, n)
		for i := range elements {
			elements[i] = fmt.Sprintf(format, i+1)
		}
		return strings.Join(elements, ",")
	}
	metadata := map[string]string{}
	for i := range MaxMetadata + 1 {
		metadata[fmt.Sprintf("%sk%d", KeyMetadataPrefix, i)] = "v"
	}
	for name, tt := range map[string]struct {
		in   map[string]string
		want string
	}{
		"upstreams": {map[string]string{KeyUpstreams: list(MaxUpstreams+1, "s%d")}, "257 entries, more than 256; remove some"},
		"ports":     {map[string]string{KeyExcludePorts: list(MaxExclusions+1, "%d")}, "65 entries, more than 64; remove some"},
		"ranges":    {map[string]string{KeyExcludeRanges: list(MaxExclusions+1, "10.%d.0.0/16")}, "65 entries, more than 64; remove some"},
		"metadata":  {metadata, "more than 32 subset keys; remove some"},
	} {
		if _, err := Parse(tt.in); err == nil || !strings.HasSuffix(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", name, err, tt.want)
		}
	}
}

// All bad values are reported, in the order of the contract's table whatever the
// order of the map, and not without bound (XDS-23).
func TestParseReportsAll(t *testing.T) {
	in := map[string]string{
		KeyAllow: "x", KeyWeight: "w", KeyPorts: "a,b,a,9090=h9", KeyPort: "p", KeyManaged: "m",
		KeyMetadataPrefix + "B": "", KeyMetadataPrefix + "A": "", KeyService: "S", KeyExcludeRanges: "r", KeyUpstreams: "U",
	}
	for range 20 {
		_, err := Parse(in)
		var got []string
		for line := range strings.SplitSeq(err.Error(), "\n") {
			got = append(got, line[:strings.Index(line, ";")])
		}
		want := []string{
			`aether.io/managed="m": neither "true" nor "false"`,
			`endpoint.aether.io/port="p": "p": only the digits 0-9 are allowed`,
			`endpoint.aether.io/ports="a,b,a,9090=h9": "a": only the digits 0-9 are allowed`,
			`endpoint.aether.io/ports="a,b,a,9090=h9": "b": only the digits 0-9 are allowed`,
			`endpoint.aether.io/ports="a,b,a,9090=h9": port 9090: unknown protocol "h9"`,
			`endpoint.aether.io/service="S": not a DNS label`,
			`endpoint.aether.io/weight="w": not a whole number in 1-65535`,
			`metadata.endpoint.aether.io/A="": the key is no DNS label`,
			`metadata.endpoint.aether.io/B="": the key is no DNS label`,
			`config.aether.io/upstreams="U": "U" is no service name`,
			`capture.aether.io/exclude-outbound-ip-ranges="r": "r" is no CIDR`,
			`inbound.aether.io/allow="x": not supported by this version`,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
	}
	many := strings.Repeat("x,y,z1,z2,z3,z4,z5,z6,z7,z8,", 30) + strings.Repeat("q", 1000)
	for i := range 300 {
		many += fmt.Sprintf(",bad%d", i)
	}
	_, err := Parse(map[string]string{KeyPorts: many})
	var list Errors
	if !errors.As(err, &list) || len(list) != maxErrors {
		t.Errorf("300 bad entries give %d errors", len(list))
	}
}

// Text from outside is cut at whole characters and cannot put a line break, a
// control character or a reversal of direction into a message.
func TestErrorText(t *testing.T) {
	for _, tt := range []struct{ value, want string }{
		{"plain", `"plain"`},
		{`a"b\c`, `"a\"b\\c"`},
		{"a\nb\r\x00\u202e", `"a\nb\r\x00\u202e"`},
		{strings.Repeat("ä", 18), `"` + strings.Repeat("ä", 18) + `"`},
		{strings.Repeat("ä", 19), `"` + strings.Repeat("ä", 16) + `..."`},
		{strings.Repeat("\xff", 9), `"` + strings.Repeat(`\xff`, 9) + `"`},
		{strings.Repeat("\xff", 10), `"` + strings.Repeat(`\xff`, 8) + `..."`},
		{strings.Repeat("x", 1_000_000), `"` + strings.Repeat("x", 33) + `..."`},
	} {
		if got := quote(tt.value, maxValueText); got != tt.want {
			t.Errorf("got %s, want %s", got, tt.want)
		}
	}
	e := &Error{Key: KeyMetadataPrefix + strings.Repeat("k", 300) + "\n", Value: strings.Repeat("v", 300), Problem: "p", Remedy: "r"}
	if s := e.Error(); len(s) >= 200 || strings.Contains(s, "\n") || !strings.HasPrefix(s, `"`+KeyMetadataPrefix) {
		t.Errorf("%d bytes: %s", len(s), s)
	}
}
