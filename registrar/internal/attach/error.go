package attach

import "errors"

// Kind says what an error means to the runtime.
type Kind uint8

// The kinds; podserver maps each to one gRPC status code, the plugin that to a
// CNI code.
const (
	// Internal is a fault of the registrar.
	Internal Kind = iota
	// BadInput is an annotation or argument that must be corrected (CNI 102).
	BadInput
	// NotReady means that something the pod needs is away; the same request may
	// succeed later (CNI 11).
	NotReady
	// NotFound is an attachment that is not registered (CNI 101).
	NotFound
)

// Error is an error with a meaning to the runtime. Its text is shown to users.
type Error struct {
	// Kind is the meaning.
	Kind Kind
	// Err is the cause.
	Err error
}

// Error returns the cause's text.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of err; Internal when it carries none.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return Internal
}
