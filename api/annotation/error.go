package annotation

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// The longest texts of a message, in bytes, so that one always fits on a line of
// less than 200 bytes.
const (
	maxKeyText   = 60
	maxValueText = 36
	maxEntryText = 20 // one element of a list
)

// maxErrors is how many bad values are reported; what comes after them is left out.
const maxErrors = 16

// Error is one bad value. It is what a user reads in `kubectl describe pod`.
type Error struct {
	// Key is the annotation's key.
	Key string
	// Value is the annotation's value, whole.
	Value string
	// Problem says what is wrong with it.
	Problem string
	// Remedy says what to write instead.
	Remedy string
}

// Error returns key, value, problem and remedy on one line of less than 200
// bytes; a long key or value is cut.
func (e *Error) Error() string {
	key := quote(e.Key, maxKeyText)
	if plain := key[1 : len(key)-1]; plain == e.Key {
		key = plain
	}
	return key + "=" + quote(e.Value, maxValueText) + ": " + e.Problem + "; " + e.Remedy
}

// Errors are all the bad values of one pod, in the order of contract 1's table
// and, within a list, in the list's order. Never empty; at most 16. errors.As
// finds the first one.
type Errors []*Error

// Error returns one line for each bad value.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, one := range e {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the single errors.
func (e Errors) Unwrap() []error {
	list := make([]error, len(e))
	for i, one := range e {
		list[i] = one
	}
	return list
}

// Quote returns a value as messages show it: in double quotes, escaped, and cut when it is
// long.
func Quote(value string) string { return quote(value, maxValueText) }

// quote returns s in double quotes, escaped, with at most limit bytes between
// them; what is cut off is marked by three dots.
func quote(s string, limit int) string {
	if len(s) <= limit {
		if quoted := strconv.Quote(s); len(quoted) <= limit+len(`""`) {
			return quoted
		}
	}
	const dots = "..."
	var b strings.Builder
	for i := 0; i < len(s); {
		_, size := utf8.DecodeRuneInString(s[i:])
		piece := strconv.Quote(s[i : i+size])
		piece = piece[1 : len(piece)-1]
		if b.Len()+len(piece)+len(dots) > limit {
			break
		}
		b.WriteString(piece)
		i += size
	}
	return `"` + b.String() + dots + `"`
}
