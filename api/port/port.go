// Package port holds what a port of a pod is to the mesh: a number with one
// protocol. It is shared by the annotation parser, the endpoint record and the
// projection, so that a protocol has one spelling and one meaning everywhere.
package port

import (
	"fmt"
	"strconv"
)

// Protocol is how a port speaks. The zero value is not valid.
type Protocol uint8

// The protocols of contract section 1.
const (
	// Unknown is a protocol that this version does not know (written by a newer
	// one). Such a port is unroutable and reported, never treated as HTTP.
	Unknown Protocol = iota
	// HTTP is HTTP/1.1 and h2c by detection; the default.
	HTTP
	// H2 is HTTP/2 with prior knowledge (gRPC).
	H2
	// TCP is opaque bytes.
	TCP
)

// String returns the canonical spelling used in annotations and records.
func (p Protocol) String() string {
	switch p {
	case HTTP:
		return "http"
	case H2:
		return "h2"
	case TCP:
		return "tcp"
	case Unknown:
	}
	return "unknown"
}

// Class is the wire class of a protocol: endpoints of different classes can
// never share a cluster (contract section 2).
type Class uint8

// The wire classes.
const (
	// ClassNone is the class of an unknown protocol.
	ClassNone Class = iota
	// ClassHTTP covers HTTP and H2.
	ClassHTTP
	// ClassTCP covers TCP.
	ClassTCP
)

// Class returns the wire class of p.
func (p Protocol) Class() Class {
	switch p {
	case HTTP, H2:
		return ClassHTTP
	case TCP:
		return ClassTCP
	case Unknown:
	}
	return ClassNone
}

// ParseProtocol maps a spelling to its protocol: "" and "http", "h2" with the
// aliases "grpc" and "http2", "tcp". Anything else is Unknown and false.
func ParseProtocol(s string) (Protocol, bool) {
	switch s {
	case "", "http":
		return HTTP, true
	case "h2", "grpc", "http2":
		return H2, true
	case "tcp":
		return TCP, true
	}
	return Unknown, false
}

// Port is one served port.
type Port struct {
	// Number is 1-65535.
	Number uint16
	// Protocol is how it speaks.
	Protocol Protocol
}

// Mesh reports whether the mesh itself listens on n in every meshed pod (contract 7), so
// that no pod can serve there.
func Mesh(n uint16) bool {
	switch n {
	case 15001, 15002, 15008, 15053:
		return true
	}
	return false
}

// NumberError says why a text is no port number.
type NumberError struct {
	// Text is what was given, whole.
	Text string
	// Reason is what is wrong with it, without the text.
	Reason string
}

// Error returns the text, quoted, with the reason.
func (e *NumberError) Error() string {
	if e.Text == "" {
		return e.Reason
	}
	return fmt.Sprintf("port %q: %s", e.Text, e.Reason)
}

// ParseNumber reads a port number strictly: decimal ASCII digits, no sign, no
// blank, no leading zero, 1-65535. The error is a *NumberError.
func ParseNumber(s string) (uint16, error) {
	if s == "" {
		return 0, &NumberError{Reason: "empty port"}
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, &NumberError{Text: s, Reason: "only the digits 0-9 are allowed"}
		}
	}
	if s[0] == '0' {
		return 0, &NumberError{Text: s, Reason: "no leading zero, and 0 is no port"}
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, &NumberError{Text: s, Reason: "not in 1-65535"}
	}
	return uint16(n), nil
}
