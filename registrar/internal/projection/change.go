package projection

import (
	"slices"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Change says what differs about one service since the last TakeDirty.
type Change struct {
	// Service is whose View to take.
	Service model.ServiceKey
	// Shape: names, ports, virtual hosts, address, step or retired names differ. The
	// route table is to be built anew. Send Envoy each cluster of the View that it is
	// subscribed to, whatever it was answered before: a name that was asked for and refused
	// is never asked for again (XDS-D3). And Resolve again each other name that an Answer
	// said was this service's: it may lead elsewhere now, or nowhere.
	Shape bool
	// Clusters: the bytes of at least one cluster differ, which can also be without a
	// new Shape, as with a new account.
	Clusters bool
	// Endpoints: the load assignments of Ports may differ.
	Endpoints bool
	// Ports are the ports whose endpoint sets may differ, ascending. The cluster with
	// the bare name has those of View.Committed.
	Ports []uint16
	// Gone: the service is forgotten; View does not know it any more.
	Gone bool
	// Entry: what Entry returns differs. It is to be saved before anything of this
	// Change is sent to Envoy: a restart goes on with the saved step.
	Entry bool
	// Awakened are names to Resolve again although the last answer was a tombstone or did
	// not name this service: they are its own now. As they were asked, sorted.
	Awakened []string
}

// TakeDirty settles all changes and returns what differs since the last call, in
// ascending order of services. It is empty before the first Synced.
func (e *Engine) TakeDirty() []Change {
	if !e.synced {
		return nil
	}
	e.settle()
	e.awaken()
	out := make([]Change, 0, len(e.changes))
	for key, c := range e.changes {
		if s := e.services[key]; s != nil && s.known && len(s.touched) > 0 {
			c.Endpoints, c.Ports = true, s.touched
			s.touched = nil
		}
		out = append(out, *c)
	}
	clear(e.changes)
	slices.SortFunc(out, func(a, b Change) int { return a.Service.Compare(b.Service) })
	return out
}

// empty says whether c tells nothing; ports and awakened names come last.
func (c *Change) empty() bool { return !c.Shape && !c.Clusters && !c.Gone && !c.Entry }

// note returns the pending Change of a service.
func (e *Engine) note(s *service) *Change { return e.noteKey(s.key) }

func (e *Engine) noteKey(key model.ServiceKey) *Change {
	c, ok := e.changes[key]
	if !ok {
		c = &Change{Service: key}
		e.changes[key] = c
	}
	return c
}
