// Package limit holds the checks that every wire message of the mesh is held to
// before an end acts on it, and the one error that they give. The messages' own
// packages (api/cni/v1, api/dns/v1, api/endpoint/v1) state the limits and put the
// checks together in Validate; the texts are the same whichever message fails.
package limit

import (
	"fmt"
	"net/netip"
	"unicode/utf8"
)

// FieldError is the error of every Validate: one field of a message breaks its
// limit or its form. A gRPC server answers it as InvalidArgument, the CNI plugin
// as code 7, and a reader of records leaves the record out.
type FieldError struct {
	// Field is the path of the field in the message, as the .proto spells it:
	// "capture.tcp_ports[3].port".
	Field string
	// Problem says what is wrong with it, with the value or length met and the limit.
	Problem string
}

// Error returns field and problem.
func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// Errorf returns a *FieldError for field. The problem is formatted as by
// fmt.Sprintf: it is a text for people and wraps nothing.
func Errorf(field, format string, args ...any) error {
	return &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)}
}

// Bytes refuses a text longer than most bytes, and one that is no UTF-8: no
// message could carry it. The error is a *FieldError.
func Bytes(field, value string, most int) error {
	if len(value) > most {
		return Errorf(field, "%d bytes, at most %d are allowed", len(value), most)
	}
	if !utf8.ValidString(value) {
		return Errorf(field, "%.64q is no UTF-8", value)
	}
	return nil
}

// Count refuses a list or map of n entries when that is more than most. The error
// is a *FieldError.
func Count(field string, n, most int) error {
	if n > most {
		return Errorf(field, "%d entries, at most %d are allowed", n, most)
	}
	return nil
}

// List refuses a list with more than most entries, before it looks at any of
// them, and then the first entry that check refuses. Check is given the path of
// the entry, field[i]. The error is a *FieldError if those of check are.
func List[T any](field string, list []T, most int, check func(field string, entry T) error) error {
	if err := Count(field, len(list), most); err != nil {
		return err
	}
	for i, entry := range list {
		if err := check(fmt.Sprintf("%s[%d]", field, i), entry); err != nil {
			return err
		}
	}
	return nil
}

// Address refuses what is longer than most bytes or is no IP address, and one
// with a zone: that means nothing on another host. The error is a *FieldError.
func Address(field, text string, most int) error {
	if err := Bytes(field, text, most); err != nil {
		return err
	}
	if addr, err := netip.ParseAddr(text); err != nil || addr.Zone() != "" {
		return Errorf(field, "%q is not an IP address without zone", text)
	}
	return nil
}

// Port refuses what is no number of a port (contract 1): 0 and what 16 bits do
// not hold. The error is a *FieldError.
func Port(field string, number uint32) error {
	if number < 1 || number > 65535 {
		return Errorf(field, "%d is not in 1-65535", number)
	}
	return nil
}

// First runs checks in order and returns the first error: the checks after it may
// rely on what the ones before have held.
func First(checks ...func() error) error {
	for _, check := range checks {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}
