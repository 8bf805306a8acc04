package projection

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Entry is what must survive a restart of one service, so that names, addresses and
// bytes are the same after it, and a change of the default port goes on where it was.
type Entry struct {
	// Service is the key.
	Service model.ServiceKey
	// VIP4 and VIP6 are its virtual addresses; invalid if it has none.
	VIP4, VIP6 netip.Addr
	// ReleasedAt is when the service was forgotten. Then only the addresses count: they
	// are kept for the case that it comes back. Zero while it is known.
	ReleasedAt time.Time
	// Ports is the last known table, so that a service without endpoints keeps it.
	Ports []port.Port
	// Default is the default port; one of Ports.
	Default uint16
	// Committed is what the cluster with the bare name stands for, as Envoy has it or is
	// about to. Number 0: there is none.
	Committed port.Port
	// Flat says that the clusters carry the flat name.
	Flat bool
	// Step is the step of an unfinished change.
	Step Step
	// Accounts are the SPIFFE IDs pinned while the service is known, sorted.
	Accounts []string
	// Retired are cluster names that Envoy must not keep, sorted.
	Retired []string
	// LastSeen is when the last endpoint went; zero while there is one.
	LastSeen time.Time
}

// Entry returns what to save of a service. ok is false if nothing is to be kept: what
// was saved is to be deleted.
func (e *Engine) Entry(key model.ServiceKey) (entry Entry, ok bool) {
	e.settle()
	v4, v6 := e.vips.addrs(key)
	entry = Entry{Service: key, VIP4: v4, VIP6: v6}
	s := e.services[key]
	if s == nil || !s.known {
		entry.ReleasedAt, ok = e.vips.releasedAt(key)
		return entry, ok
	}
	entry.Ports, entry.Default = slices.Clone(s.ports), s.def.Number
	entry.Committed, entry.Flat, entry.Step = s.bare, s.flat, s.step
	entry.Accounts, entry.Retired = slices.Clone(s.accounts), slices.Clone(s.retired)
	entry.LastSeen = s.idleSince
	return entry, true
}

// EntryError is about one saved entry; without that entry New may succeed.
type EntryError struct {
	// Service is the entry's key.
	Service model.ServiceKey
	// Err says what is wrong with it.
	Err error
}

// Error names the service and the reason.
func (e *EntryError) Error() string {
	return fmt.Sprintf("projection: saved service %s: %v", e.Service, e.Err)
}

// Unwrap returns the reason.
func (e *EntryError) Unwrap() error { return e.Err }

// validate refuses an entry that this package cannot have made.
func (n Entry) validate() error {
	if len(n.Ports) == 0 {
		return fmt.Errorf("it has no ports")
	}
	def := false
	for i, p := range n.Ports {
		if p.Number == 0 || i > 0 && n.Ports[i-1].Number >= p.Number {
			return fmt.Errorf("ports are not ascending from 1 at %d", p.Number)
		}
		def = def || p.Number == n.Default
	}
	switch {
	case !def:
		return fmt.Errorf("default port %d is not among its ports", n.Default)
	case n.Committed.Number != 0 && n.Committed.Protocol.Class() != port.ClassHTTP:
		return fmt.Errorf("committed port %d is no HTTP port", n.Committed.Number)
	case n.Step > lastStep:
		return fmt.Errorf("step %d is unknown", n.Step)
	case n.Committed.Number == 0 && (n.Step == Splitting || n.Step == Moving || n.Step == Joining):
		return fmt.Errorf("it is %s without a committed port", n.Step)
	case !slices.IsSorted(n.Accounts) || !slices.IsSorted(n.Retired):
		return fmt.Errorf("accounts or retired names are not sorted")
	}
	return nil
}

// load makes a saved service known, or keeps the address of a forgotten one.
func (e *Engine) load(n Entry) error {
	if !authority.ValidLabel(n.Service.Name) || !authority.ValidLabel(n.Service.Namespace) {
		return fmt.Errorf("it is not two DNS labels: its names could be another service's")
	}
	housed, err := e.vips.restore(n.Service, n.VIP4, n.ReleasedAt)
	if err != nil {
		return err
	}
	if !n.ReleasedAt.IsZero() {
		if !housed {
			e.noteKey(n.Service).Entry = true // its address is of another range: nothing to keep
		}
		return nil
	}
	if err := n.validate(); err != nil {
		return err
	}
	s := e.service(n.Service)
	if s.known {
		return fmt.Errorf("it is saved twice")
	}
	s.known = true
	s.ports = slices.Clone(n.Ports)
	protocol, _ := s.protocol(n.Default)
	s.def = port.Port{Number: n.Default, Protocol: protocol}
	s.bare, s.step = n.Committed, n.Step
	s.accounts, s.retired = slices.Compact(slices.Clone(n.Accounts)), slices.Compact(slices.Clone(n.Retired))
	s.idleSince = n.LastSeen
	if s.idleSince.IsZero() {
		s.idleSince = e.now
	}
	e.idle[s] = struct{}{}
	if !housed {
		e.homeless[s] = struct{}{}
		e.note(s).Entry = true
	}
	e.tokens++
	s.token = e.tokens
	s.refuseBare = s.step == Splitting && s.wanted().Number == 0
	if err := e.loadFlat(s, n); err != nil {
		return err
	}
	e.unretire(s)
	return nil
}

// heatFlats makes newcomers claim a flat name step by step if a saved service may have
// had clusters of it with Envoy.
func (e *Engine) heatFlats() {
	for _, s := range e.services {
		if s.flatName != "" && e.flats[s.key.Name] == nil {
			e.flats[s.key.Name] = &flatName{hot: true}
		}
	}
}

// loadFlat goes on with what the service has of its flat name.
func (e *Engine) loadFlat(s *service, n Entry) error {
	claims := n.Step == Claiming
	if !n.Flat && !claims {
		if n.Step == Releasing || n.Step == Renaming {
			return fmt.Errorf("it is %s without the flat name", n.Step)
		}
		return nil
	}
	// A namespace that is not flat any more still has the name until it is released.
	s.flat, s.flatName = n.Flat, n.Service.Name+"."+e.cfg.Domain
	f := e.flats[n.Service.Name]
	if f == nil {
		f = &flatName{}
		e.flats[n.Service.Name] = f
	}
	switch {
	case n.Flat && claims:
		return fmt.Errorf("it is %s with the flat name", n.Step)
	case f.holder != nil || f.claimant != nil:
		return fmt.Errorf("its flat name belongs to two services")
	case claims:
		f.claimant, f.hot = s, true
	default:
		f.holder = s
	}
	return nil
}
