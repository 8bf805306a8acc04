package limit

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// Every check accepts what is exactly at its limit and refuses what is one past
// it, or out of form, with a *FieldError that names the field, what was met and
// the limit (contract 2, contract 3).
func TestChecks(t *testing.T) {
	list := func(ports ...uint32) error { return List("ports", ports, 3, Port) }
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{name: "bytes at the limit", err: Bytes("f", "abc", 3)},
		{name: "bytes past it", err: Bytes("f", "abcd", 3), want: "f: 4 bytes, at most 3 are allowed"},
		{name: "bytes, not characters", err: Bytes("f", "äö", 3), want: "f: 4 bytes, at most 3 are allowed"},
		{name: "no text that a message carries", err: Bytes("f", "\xff", 3), want: `f: "\xff" is no UTF-8`},

		{name: "no entries", err: Count("f", 0, 0)},
		{name: "entries at the limit", err: Count("f", 2, 2)},
		{name: "entries past it", err: Count("f", 3, 2), want: "f: 3 entries, at most 2 are allowed"},

		{name: "empty list", err: list()},
		{name: "list at the limit", err: list(1, 2, 65535)},
		{name: "list past it, before its entries", err: list(0, 0, 0, 0), want: "ports: 4 entries, at most 3 are allowed"},
		{name: "first bad entry", err: list(1, 0, 65536), want: "ports[1]: 0 is not in 1-65535"},

		{name: "IPv4", err: Address("ip", "255.255.255.255", 15)},
		{name: "IPv6", err: Address("ip", "fd70:6f72:746f::1", 45)},
		{name: "longest IPv6", err: Address("ip", "0000:0000:0000:0000:0000:ffff:255.255.255.255", 45)},
		{name: "long address", err: Address("ip", strings.Repeat("1", 46), 45), want: "ip: 46 bytes, at most 45 are allowed"},
		{name: "no address", err: Address("ip", "", 45), want: `ip: "" is not an IP address without zone`},
		{name: "zone", err: Address("ip", "fe80::1%eth0", 45), want: `ip: "fe80::1%eth0" is not an IP address without zone`},
		{name: "prefix", err: Address("ip", "10.0.0.2/24", 45), want: `ip: "10.0.0.2/24" is not an IP address without zone`},
		{name: "leading zero", err: Address("ip", "10.0.0.01", 45), want: `ip: "10.0.0.01" is not an IP address without zone`},

		{name: "least port", err: Port("p", 1)},
		{name: "largest port", err: Port("p", 65535)},
		{name: "port 0", err: Port("p", 0), want: "p: 0 is not in 1-65535"},
		{name: "port of 17 bits", err: Port("p", 65536), want: "p: 65536 is not in 1-65535"},

		{name: "formatted", err: Errorf("a.b", "%q occurs twice", "x"), want: `a.b: "x" occurs twice`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.want == "" {
				if tt.err != nil {
					t.Fatalf("refused: %v", tt.err)
				}
				return
			}
			field, ok := errors.AsType[*FieldError](tt.err)
			if !ok || tt.err.Error() != tt.want {
				t.Fatalf("got  %v (%T)\nwant %s", tt.err, tt.err, tt.want)
			}
			if path, problem, _ := strings.Cut(tt.want, ": "); field.Field != path || field.Problem != problem {
				t.Errorf("field %q and problem %q, want %q and %q", field.Field, field.Problem, path, problem)
			}
		})
	}
}

// First keeps the order of its checks and runs none after the first error, so a
// message is reported by its first bad field in the order of the .proto.
func TestFirst(t *testing.T) {
	var ran []string
	check := func(name string, err error) func() error {
		return func() error {
			ran = append(ran, name)
			return err
		}
	}
	bad := Errorf("b", "is missing")
	if err := First(check("a", nil), check("b", bad), check("c", Errorf("c", "is missing"))); !errors.Is(err, bad) {
		t.Errorf("First() = %v, want %v", err, bad)
	}
	if want := []string{"a", "b"}; !slices.Equal(ran, want) {
		t.Errorf("ran %q, want %q", ran, want)
	}
	if err := First(check("a", nil)); err != nil {
		t.Errorf("First() = %v, want no error", err)
	}
	if err := First(); err != nil {
		t.Errorf("First() without checks = %v", err)
	}
}
