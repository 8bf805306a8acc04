package authority

import (
	"errors"
	"strings"
	"testing"
)

const domain = "aether.internal"

// label63 is the longest DNS label.
var label63 = strings.Repeat("a", 63)

// goodNames is the must-match table of XDS-49 and XDS-65: names in lower case
// and without trailing dot, which the parser and the expression both accept.
var goodNames = []struct {
	name string
	want Authority
}{
	{"payments.aether.internal", Authority{Service: "payments"}},
	{"payments.aether.internal:8080", Authority{Service: "payments", Port: 8080}},
	{"payments.aether.internal:9090", Authority{Service: "payments", Port: 9090}},
	{"payments.shop.aether.internal", Authority{Service: "payments", Namespace: "shop"}},
	{"payments.shop.aether.internal:5432", Authority{Service: "payments", Namespace: "shop", Port: 5432}},
	{"p.aether.internal:1", Authority{Service: "p", Port: 1}},
	{"p.aether.internal:80", Authority{Service: "p", Port: 80}},
	{"p.aether.internal:65535", Authority{Service: "p", Port: 65535}},
	{"p.aether.internal:65529", Authority{Service: "p", Port: 65529}},
	{"p.aether.internal:59999", Authority{Service: "p", Port: 59999}},
	{"p.aether.internal:9999", Authority{Service: "p", Port: 9999}},
	{"0.aether.internal", Authority{Service: "0"}},
	{"9090.aether.internal:9090", Authority{Service: "9090", Port: 9090}},
	{"a--b.aether.internal", Authority{Service: "a--b"}},
	{"xn--nxasmq6b.aether.internal", Authority{Service: "xn--nxasmq6b"}},
	{label63 + ".aether.internal", Authority{Service: label63}},
	{label63 + "." + label63 + ".aether.internal:1", Authority{Service: label63, Namespace: label63, Port: 1}},
	{"aether.aether.internal", Authority{Service: "aether"}},
	{"internal.aether.aether.internal", Authority{Service: "internal", Namespace: "aether"}},
}

// badNames is the must-not-match table of XDS-49, XDS-65, XDS-66, XDS-67, XDS-70
// and XDS-71, with what each one is.
var badNames = []struct {
	name string
	kind error
}{
	{"evil.com", ErrForeign},
	{"evil.com:9090", ErrForeign},
	{"", ErrForeign},
	{"*", ErrForeign},
	{"..", ErrForeign},
	{":", ErrForeign},
	{":8080", ErrForeign},
	{"xds_cluster", ErrForeign},
	{"health_pod", ErrForeign},
	{"payments", ErrForeign},
	{"payments.aether.internal.evil.com", ErrForeign},
	{"payments.aetherXinternal", ErrForeign},
	{"payments.xaether.internal", ErrForeign},
	{"paymentsaether.internal", ErrForeign},
	{"xaether.internal", ErrForeign},
	{"10.1.2.3", ErrForeign},
	{"10.1.2.3:9090", ErrForeign},
	{"[::1]:9090", ErrForeign},
	{"::1", ErrForeign},
	{"user:pw@payments.aether.internal", ErrForeign},
	{"payments.aether.internal,payments.aether.internal:9090", ErrBadForm},
	{"payments.aether.internal/x", ErrForeign},
	{"payments.aether.internal\x00", ErrForeign},
	{"payments.aether.internal ", ErrForeign},

	{"aether.internal", ErrBadForm},
	{".aether.internal", ErrBadForm},
	{"aether.internal:8080", ErrBadForm},
	{"*.aether.internal", ErrBadForm},
	{"*.aether.internal:8080", ErrBadForm},
	{"..aether.internal", ErrBadForm},
	{"a..aether.internal", ErrBadForm},
	{"payments.aether.internal:", ErrBadForm},
	{"payments.aether.internal:0", ErrBadForm},
	{"payments.aether.internal:00", ErrBadForm},
	{"payments.aether.internal:08080", ErrBadForm},
	{"payments.aether.internal:65536", ErrBadForm},
	{"payments.aether.internal:65540", ErrBadForm},
	{"payments.aether.internal:65600", ErrBadForm},
	{"payments.aether.internal:66000", ErrBadForm},
	{"payments.aether.internal:70000", ErrBadForm},
	{"payments.aether.internal:99999", ErrBadForm},
	{"payments.aether.internal:12345678901234567890", ErrBadForm},
	{"payments.aether.internal:+80", ErrBadForm},
	{"payments.aether.internal:-1", ErrBadForm},
	{"payments.aether.internal:80a", ErrBadForm},
	{"payments.aether.internal: 80", ErrBadForm},
	{"payments.aether.internal:80 ", ErrBadForm},
	{"payments.aether.internal:８０", ErrBadForm},
	{"payments.aether.internal:1:2", ErrBadForm},
	{"payments.aether.internal::8080", ErrBadForm},
	{"a_b.aether.internal", ErrBadForm},
	{"-a.aether.internal", ErrBadForm},
	{"a-.aether.internal", ErrBadForm},
	{"a.-b.aether.internal", ErrBadForm},
	{"-.aether.internal", ErrBadForm},
	{"a b.aether.internal", ErrBadForm},
	{"user@payments.aether.internal", ErrBadForm},
	{"münchen.aether.internal", ErrBadForm},
	{"a" + label63 + ".aether.internal", ErrBadForm},
	{"a.b" + label63 + ".aether.internal", ErrBadForm},
	{"a.b.c.aether.internal", ErrBadForm},
	{"pod-0.payments.shop.aether.internal", ErrBadForm},
	{"pod-0.payments.shop.aether.internal:9090", ErrBadForm},
	{"evil.com,x.aether.internal", ErrBadForm},
	{"10.0.0.1.aether.internal", ErrBadForm},
	{"[::1].aether.internal", ErrForeign},
}

// Parse holds contract 2's grammar: the accepted names and what they mean.
func TestParseGood(t *testing.T) {
	for _, tt := range goodNames {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.name, domain)
			if err != nil {
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			if back := got.HostPort(domain); back != tt.name {
				t.Errorf("HostPort is %q, want %q", back, tt.name)
			}
			if host, _, _ := strings.Cut(tt.name, ":"); got.Host(domain) != host {
				t.Errorf("Host is %q, want %q", got.Host(domain), host)
			}
		})
	}
}

// Capitals and one trailing dot, before the port as HTTP clients send it, are
// the same name (contract 2, XDS-63, XDS-64).
func TestParseFolds(t *testing.T) {
	want := Authority{Service: "payments", Namespace: "shop", Port: 9090}
	for _, name := range []string{
		"PAYMENTS.shop.aether.internal:9090",
		"payments.Shop.AETHER.Internal:9090",
		"payments.shop.aether.internal.:9090",
		"PAYMENTS.SHOP.AETHER.INTERNAL.:9090",
	} {
		if got, err := Parse(name, domain); err != nil || got != want {
			t.Errorf("Parse(%q) = %+v, %v; want %+v", name, got, err, want)
		}
	}
	if got, err := Parse("Payments.aether.internal.", domain); err != nil || got != (Authority{Service: "payments"}) {
		t.Errorf("portless: got %+v, %v", got, err)
	}
}

// Every refused name says whether it is foreign (forwarded by DNS) or a bad form
// of ours (NXDOMAIN): XDS-65, XDS-66, XDS-67, XDS-70, XDS-71.
func TestParseBad(t *testing.T) {
	for _, tt := range badNames {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.name, domain)
			if !errors.Is(err, tt.kind) {
				t.Fatalf("got %+v, %v; want %v", got, err, tt.kind)
			}
			var e *Error
			if !errors.As(err, &e) || e.Name != tt.name {
				t.Errorf("the error does not carry the name: %#v", err)
			}
			if got != (Authority{}) {
				t.Errorf("an authority beside the error: %+v", got)
			}
		})
	}
}

// What folds in Unicode but not in ASCII is not ours, and dots beyond one are no
// form of ours (XDS-64, XDS-66).
func TestParseBadFolds(t *testing.T) {
	for _, tt := range []struct {
		name string
		kind error
	}{
		{"PAYMENTS.aether.\u0130nternal", ErrForeign},
		{"\u212a.aether.internal", ErrBadForm}, // the Kelvin sign, whose lower case is k
		{"payments.aether.internal..", ErrBadForm},
		{"payments.aether.internal..:8080", ErrBadForm},
		{"payments.aether.internal:8080.", ErrBadForm},
		{"aether.internal.", ErrBadForm},
		{"aether.internal..", ErrBadForm},
		{"evil.com.", ErrForeign},
		{".", ErrForeign},
	} {
		if got, err := Parse(tt.name, domain); !errors.Is(err, tt.kind) {
			t.Errorf("Parse(%q) = %+v, %v; want %v", tt.name, got, err, tt.kind)
		}
	}
}

// The message of a refused name names it, cut to a bounded length, and the reason.
func TestErrorMessage(t *testing.T) {
	for _, tt := range []struct{ name, want string }{
		{"evil.com", `authority "evil.com": not under the mesh domain`},
		{"a.b.c.aether.internal", `authority "a.b.c.aether.internal": not of the form service[.namespace].domain[:port]: more than two labels before the domain`},
		{"x.aether.internal:0", `authority "x.aether.internal:0": not of the form service[.namespace].domain[:port]: port "0": no leading zero, and 0 is no port`},
		{"aether.internal", `authority "aether.internal": not of the form service[.namespace].domain[:port]: it names no service`},
	} {
		if _, err := Parse(tt.name, domain); err == nil || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
	}
	_, err := Parse(strings.Repeat("x", 100_000), domain)
	if err == nil || len(err.Error()) > 400 {
		t.Errorf("the message of a long name has %d bytes", len(err.Error()))
	}
}

// The mesh domain is checked once, at start (contract 7).
func TestValidateDomain(t *testing.T) {
	long := strings.Repeat("a", 62) + "." + strings.Repeat("b", MaxDomain-63)
	for _, good := range []string{"aether.internal", "mesh", "a.b.c.example", "cluster-1.mesh", "1.mesh", "x1", long} {
		if err := ValidateDomain(good); err != nil {
			t.Errorf("ValidateDomain(%q) = %v", good, err)
		}
		full := Authority{Service: label63, Namespace: label63}
		if n := len(full.Host(good)); n > 253 {
			t.Errorf("under %q the longest name has %d bytes", good, n)
		}
	}
	for name, bad := range map[string]string{
		"empty":        "",
		"upper case":   "Aether.internal",
		"leading dot":  ".aether.internal",
		"trailing dot": "aether.internal.",
		"two dots":     "aether..internal",
		"underscore":   "ae_ther.internal",
		"port":         "aether.internal:80",
		"number":       "10.0.0.1",
		"number only":  "1",
		"long label":   strings.Repeat("a", 64) + ".internal",
		"too long":     long + "c",
		"blank":        "aether internal",
		"hyphen":       "-aether.internal",
		"regex":        `aether.*`,
	} {
		if err := ValidateDomain(bad); err == nil {
			t.Errorf("%s: ValidateDomain(%q) accepted it", name, bad)
		}
	}
}

// A label is what contract 1 and 2 call a DNS label.
func TestValidLabel(t *testing.T) {
	for _, good := range []string{"a", "0", "a-b", "a1", "1a", "xn--a", label63} {
		if !ValidLabel(good) {
			t.Errorf("ValidLabel(%q) = false", good)
		}
	}
	for _, bad := range []string{"", "A", "-a", "a-", "-", "a.b", "a_b", "a b", "ä", "\u212a", "a" + label63, "a\n", "a:1"} {
		if ValidLabel(bad) {
			t.Errorf("ValidLabel(%q) = true", bad)
		}
	}
}

// FuzzParse holds: no input panics, what is accepted reads back to itself, and
// the expression agrees with the parser on lower-case names without trailing dot
// (XDS-49, XDS-R27).
func FuzzParse(f *testing.F) {
	for _, tt := range goodNames {
		f.Add(tt.name, domain)
	}
	for _, tt := range badNames {
		f.Add(tt.name, domain)
	}
	f.Fuzz(func(t *testing.T, name, under string) {
		if ValidateDomain(under) != nil {
			return
		}
		got, err := Parse(name, under)
		if err != nil {
			if errors.Is(err, ErrForeign) == errors.Is(err, ErrBadForm) {
				t.Fatalf("Parse(%q) = %v: neither foreign nor a bad form", name, err)
			}
		} else if back, err := Parse(got.HostPort(under), under); err != nil || back != got {
			t.Fatalf("Parse(%q) = %+v, which reads back as %+v, %v", name, got, back, err)
		}
		if name != strings.ToLower(name) || strings.HasSuffix(hostOf(name), ".") {
			return
		}
		if matched := fullMatch(t, MeshRegex(under), name); matched != (err == nil) {
			t.Fatalf("under %q the expression says %v of %q, the parser %v", under, matched, name, err)
		}
		if err == nil && got.Port != 0 && !fullMatch(t, PortRegex(), name) {
			t.Fatalf("PortRegex refuses %q", name)
		}
	})
}

func hostOf(name string) string {
	host, _, _ := strings.Cut(name, ":")
	return host
}

func BenchmarkParse(b *testing.B) {
	for _, name := range []string{"payments.aether.internal:9090", "payments.shop.aether.internal", "PAYMENTS.aether.internal", "www.example.org"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = Parse(name, domain)
			}
		})
	}
}
