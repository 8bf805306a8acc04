package projection

import (
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Step is how far a service is with a change that Envoy has to follow in order. A
// View shows the virtual hosts and clusters of one step. F is the bare name, d the
// port that cluster F stands for (View.Committed), p any HTTP port.
//
// A change of the default port (contract 2), where a tcp default is "F is refused":
//
//	Settled   [F, F:d] -> F      [F:p] -> F:p            nothing awaited
//	Splitting [F] -> F           [F:p] -> F:p, also d    the route table
//	Moving    as Splitting, cluster F is the new d's     cluster F, its load assignment;
//	                                                     the same of the other spelling
//	Joining   as Settled, with the new d                 the route table
//
// A default that changes again on the way goes back to a step that splits, so F:p
// never leads to a cluster that is about to mean another port.
//
// A change of the owner of a flat name, first the loser, then the winner:
//
//	Releasing the loser's other spelling gets clusters   the route table
//	          of its own name; the flat name is refused
//	Claiming  the winner is still under its long name;   the route table, and that the
//	          the flat name is refused                   flat-named clusters are tombstones
//	Renaming  both spellings -> the flat-named clusters  the route table
//
// The end of a service: Leaving has no virtual hosts and no clusters. It awaits the
// route table and what became of the clusters, so that a service which comes back at
// once does not meet its own old meaning.
//
// The numbers are saved with an Entry: append, never renumber.
type Step uint8

// The steps of a service.
const (
	// Settled is the state at rest.
	Settled Step = iota
	// Splitting takes the explicit ports off cluster F.
	Splitting
	// Moving gives cluster F its new port.
	Moving
	// Joining puts the new default port's explicit spelling onto cluster F.
	Joining
	// Releasing gives up the flat name.
	Releasing
	// Claiming waits until the flat name is nobody's with Envoy.
	Claiming
	// Renaming routes the owner's names to the flat-named clusters.
	Renaming
	// Leaving is a service that is forgotten once the route table is without it.
	Leaving
	lastStep = Leaving
)

// String returns the lower-case name, as status shows it.
func (s Step) String() string {
	names := [...]string{"settled", "splitting", "moving", "joining", "releasing", "claiming", "renaming", "leaving"}
	if int(s) < len(names) {
		return names[s]
	}
	return "unknown"
}

// AwaitKind is what kind of acknowledgement a step awaits.
type AwaitKind uint8

// The kinds of acknowledgement.
const (
	// AwaitRoutes is the acknowledgement of a route table that has the View's virtual
	// hosts.
	AwaitRoutes AwaitKind = iota + 1
	// AwaitCluster is the acknowledgement of the named cluster.
	AwaitCluster
	// AwaitEndpoints is the acknowledgement of the named cluster's load assignment,
	// sent after the cluster's own acknowledgement.
	AwaitEndpoints
	// AwaitClusters is the acknowledgement of every cluster that Envoy has of this name or
	// of this name with a port.
	AwaitClusters
)

// Await is one acknowledgement that Advance needs: of what the name is now, a cluster, a
// tombstone or its removal. One about a cluster that Envoy never had counts as given, as
// does every one while no Envoy is connected.
type Await struct {
	// Kind says which resource.
	Kind AwaitKind
	// Name is that of the cluster, or of the clusters without their ports; empty for
	// AwaitRoutes.
	Name string
}

// Advance says that everything which the View with this token awaited has been
// acknowledged. It reports whether the step was taken: a token of an earlier step, or
// one that changes since have overtaken, does nothing. TakeDirty has what follows.
func (e *Engine) Advance(key model.ServiceKey, token uint64) bool {
	e.settle()
	s := e.services[key]
	if s == nil || !s.known || s.step == Settled || s.token != token {
		return false
	}
	switch s.step {
	case Splitting:
		e.advanceSplit(s)
	case Moving:
		if want := s.wanted(); want.Number != s.bare.Number {
			e.split(s, want)
		} else {
			e.begin(s, Joining)
		}
	case Joining:
		e.rested(s)
	case Releasing:
		e.released(s)
	case Claiming:
		e.claimed(s)
	case Renaming:
		e.renamed(s)
	case Leaving:
		e.forget(s)
	case Settled:
	}
	if s.known {
		e.unsettle(s)
	}
	return true
}

// advanceSplit goes on from Splitting: no explicit port leads to the bare cluster now.
func (e *Engine) advanceSplit(s *service) {
	want := s.wanted()
	switch want.Number {
	case s.bare.Number:
		e.begin(s, Joining) // it changed back meanwhile
	case 0:
		s.bare = port.Port{} // nothing is routed to it either, refuseBare saw to that
		e.rested(s)
	default:
		s.bare = want
		e.begin(s, Moving)
	}
}

// stepDefault starts or redirects a change of the default port. A service in a step
// of another kind is left alone; it is looked at again when it has settled.
func (e *Engine) stepDefault(s *service) {
	want := s.wanted()
	if s.virgin {
		s.bare = want
		return
	}
	same := want.Number == s.bare.Number
	switch s.step {
	case Settled:
		switch {
		case same:
		case s.bare.Number == 0:
			// Nothing explicit is routed to the bare cluster: that is split already.
			s.bare = want
			e.begin(s, Moving)
		default:
			e.split(s, want)
		}
	case Splitting:
		if s.refuseBare != (want.Number == 0) {
			e.split(s, want) // the virtual hosts are others: await them anew
		}
	case Moving:
		// Towards no port at all only when the cluster is acknowledged: Splitting must know
		// what it stands for with Envoy.
		if !same && want.Number != 0 {
			s.bare = want
			e.begin(s, Moving)
		}
	case Joining:
		if !same {
			e.split(s, want)
		}
	case Releasing, Claiming, Renaming, Leaving:
	}
}

// split begins Splitting towards want.
func (e *Engine) split(s *service, want port.Port) {
	s.refuseBare = want.Number == 0
	// The default port's explicit spellings mean something of their own again.
	suffix := ":" + portText(s.bare.Number)
	s.retired = slices.DeleteFunc(s.retired, func(name string) bool { return strings.HasSuffix(name, suffix) })
	e.begin(s, Splitting)
}

// rested ends a change: the service is Settled, and the explicit spellings of its
// default port are nobody's, as every route takes them to the bare cluster (I2). They may
// have been clusters of their own before, or aliases of what was another port then.
func (e *Engine) rested(s *service) {
	e.begin(s, Settled)
	if s.bare.Number == 0 {
		return
	}
	e.retire(s, s.longName+":"+portText(s.bare.Number))
	if s.flat {
		e.retire(s, s.flatName+":"+portText(s.bare.Number))
	}
}

// begin puts a service into a step.
func (e *Engine) begin(s *service, step Step) {
	s.step = step
	e.tokens++
	s.token = e.tokens
	e.unretire(s)
	if s.bare.Number != 0 {
		s.touched.add(s.bare.Number)
	}
	c := e.note(s)
	c.Shape, c.Clusters, c.Entry = true, true, true
}

// retire lists a cluster name that no route needs any more and that must not stay
// (I2). Were it asked for as an alias before, in whatever case, that is forgotten when
// the names of the service are looked at again.
func (e *Engine) retire(s *service, name string) { insert(&s.retired, name) }

// unretire drops the names that are clusters in the present step: those are not
// retired any more.
func (e *Engine) unretire(s *service) {
	if len(s.retired) == 0 {
		return
	}
	for _, d := range e.definitions(s) {
		if i, ok := slices.BinarySearch(s.retired, d.name); ok {
			s.retired = slices.Delete(s.retired, i, i+1)
		}
	}
}

// awaits returns what the service's step awaits, in the order in which it is to be
// sent. Every step's clusters go out before its route table.
func (e *Engine) awaits(s *service) []Await {
	routes := Await{Kind: AwaitRoutes}
	switch s.step {
	case Splitting, Joining, Releasing, Renaming:
		return []Await{routes}
	case Claiming:
		return []Await{routes, {Kind: AwaitClusters, Name: s.flatName}}
	case Moving:
		var out []Await
		for _, name := range s.bareNames() {
			out = append(out, Await{Kind: AwaitCluster, Name: name}, Await{Kind: AwaitEndpoints, Name: name})
		}
		return out
	case Leaving:
		out := []Await{routes}
		for _, name := range s.bareNames() {
			out = append(out, Await{Kind: AwaitClusters, Name: name})
		}
		return out
	case Settled:
	}
	return nil
}

// bareNames returns the cluster names of the service that have no port, as those change
// their meaning: the bare one, and the other spelling, which may be with Envoy as an
// alias or from the time when the service had no flat name, and which routes lead to
// again should it lose that.
func (s *service) bareNames() []string {
	if s.flat {
		return []string{s.flatName, s.longName}
	}
	return []string{s.longName}
}
