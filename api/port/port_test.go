package port

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The mesh's own ports are those of contract 7.
func TestMesh(t *testing.T) {
	var all []int
	for n := range 1 << 16 {
		if Mesh(uint16(n)) {
			all = append(all, n)
		}
	}
	if want := []int{15001, 15002, 15008, 15053}; !slices.Equal(all, want) {
		t.Errorf("%v, want %v", all, want)
	}
}

// A port number has one spelling; every other one has a reason of its own
// (contract 1, XDS-23, XDS-65, CNI-46).
func TestParseNumber(t *testing.T) {
	for _, tt := range []struct {
		text string
		want uint16
		err  string
	}{
		{text: "1", want: 1},
		{text: "80", want: 80},
		{text: "65535", want: 65535},
		{text: "", err: "empty port"},
		{text: "0", err: `port "0": no leading zero, and 0 is no port`},
		{text: "08080", err: `port "08080": no leading zero, and 0 is no port`},
		{text: "65536", err: `port "65536": not in 1-65535`},
		{text: "99999999999999999999", err: `port "99999999999999999999": not in 1-65535`},
		{text: "+80", err: `port "+80": only the digits 0-9 are allowed`},
		{text: "-1", err: `port "-1": only the digits 0-9 are allowed`},
		{text: "8080 ", err: `port "8080 ": only the digits 0-9 are allowed`},
		{text: "1_000", err: `port "1_000": only the digits 0-9 are allowed`},
		{text: "0x50", err: `port "0x50": only the digits 0-9 are allowed`},
		{text: "８０", err: `port "８０": only the digits 0-9 are allowed`},
		{text: "http", err: `port "http": only the digits 0-9 are allowed`},
	} {
		t.Run(tt.text, func(t *testing.T) {
			got, err := ParseNumber(tt.text)
			if tt.err == "" {
				if err != nil || got != tt.want {
					t.Fatalf("got %d, %v; want %d", got, err, tt.want)
				}
				return
			}
			var e *NumberError
			if !errors.As(err, &e) || e.Text != tt.text || err.Error() != tt.err {
				t.Errorf("got  %v\nwant %s", err, tt.err)
			}
		})
	}
}

// Every alias leads to one protocol with one canonical spelling and one wire
// class; what is not known is Unknown and has none (contract 1, MESH-8).
func TestParseProtocol(t *testing.T) {
	for _, tt := range []struct {
		text  string
		want  Protocol
		name  string
		class Class
		ok    bool
	}{
		{"", HTTP, "http", ClassHTTP, true},
		{"http", HTTP, "http", ClassHTTP, true},
		{"h2", H2, "h2", ClassHTTP, true},
		{"grpc", H2, "h2", ClassHTTP, true},
		{"http2", H2, "h2", ClassHTTP, true},
		{"tcp", TCP, "tcp", ClassTCP, true},
		{"h9", Unknown, "unknown", ClassNone, false},
		{"HTTP", Unknown, "unknown", ClassNone, false},
		{"udp", Unknown, "unknown", ClassNone, false},
		{"unknown", Unknown, "unknown", ClassNone, false},
	} {
		got, ok := ParseProtocol(tt.text)
		if got != tt.want || ok != tt.ok || got.String() != tt.name || got.Class() != tt.class {
			t.Errorf("ParseProtocol(%q) = %v, %v with class %v", tt.text, got, ok, got.Class())
		}
	}
}

// FuzzParseNumber holds: exactly the canonical decimal of 1-65535 is accepted.
func FuzzParseNumber(f *testing.F) {
	for _, s := range []string{"1", "65535", "0", "00", "65536", "+1", "1 ", "８０", strings.Repeat("9", 40)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseNumber(s)
		i, atoiErr := strconv.Atoi(s)
		want := atoiErr == nil && i >= 1 && i <= 65535 && strconv.Itoa(i) == s
		if (err == nil) != want || err == nil && int(n) != i {
			t.Fatalf("ParseNumber(%q) = %d, %v", s, n, err)
		}
	})
}
