package registry

import (
	"context"
	"errors"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// EventKind says what an Event is.
type EventKind uint8

// The kinds. The zero value is not valid.
const (
	// Upsert puts a record in the place of whatever is known of its UID.
	Upsert EventKind = iota + 1
	// Delete takes a record away.
	Delete
	// Complete says that everything that was there when the watch began has been
	// delivered. It comes exactly once in a watch.
	Complete
)

// String returns the lower-case name.
func (k EventKind) String() string {
	switch k {
	case Upsert:
		return "upsert"
	case Delete:
		return "delete"
	case Complete:
		return "complete"
	}
	return "unknown"
}

// Event is one step of a watch.
type Event struct {
	// Kind says which of the other fields are set.
	Kind EventKind
	// Endpoint is the record of an Upsert; it is the receiver's own.
	Endpoint model.Endpoint
	// UID of the record, for Upsert and Delete.
	UID string
	// Generation of the record that was put, or of the withdrawal.
	Generation uint64
}

var (
	// ErrStale says that a record, or its withdrawal, of a higher generation is
	// there already, so that the call changed nothing. It is no fault of the
	// backend's; the caller was overtaken.
	ErrStale = errors.New("a newer generation of the record is known")
	// ErrClosed says that the backend was closed.
	ErrClosed = errors.New("the registry is closed")
)

// Backend stores the records of the mesh and tells everybody about them. Every
// method is safe for concurrent use. Of the writers of one UID the highest
// generation wins, whatever order the calls come in.
type Backend interface {
	// Publish puts a record. Watchers see it at once; that it is stored for the
	// next start may come later. ErrStale if its generation is not higher than
	// that of the stored or withdrawn record: what was withdrawn stays withdrawn
	// (XDS-47). The record may be changed by the caller after the call.
	Publish(ctx context.Context, ep model.Endpoint) error
	// Withdraw takes a record away. A generation equal to the stored one
	// withdraws it; ErrStale if the stored one is higher (a stale DEL). An unknown
	// UID is no error, and the generation is remembered.
	Withdraw(ctx context.Context, uid string, generation uint64) error
	// Retain withdraws the records of this node's pods that are not among uids: what
	// a crash left behind. Call it once, when it is known which pods are attached; a
	// record of another node is never touched.
	Retain(ctx context.Context, uids []string) error
	// Watch calls sink, one call at a time, with an Upsert for every record, then
	// one Complete, then every change. What changes again before the sink got it
	// is delivered once, in its latest state; a deletion is delivered unless the
	// sink never got the record or a newer record took its place. So a slow sink
	// loses nothing, and holds up no publisher and no other watcher (MESH-30,
	// XDS-R12). Watch returns when ctx ends, with its error, or with ErrClosed.
	Watch(ctx context.Context, sink func(Event)) error
}
