package projection

import (
	"maps"
	"slices"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// AnswerKind is how a request for a cluster by name is answered (XDS-R28).
type AnswerKind uint8

// The kinds of answers.
const (
	// Refused: the name is removed. It is no form of the mesh, or retired, or the cap
	// of remembered names is reached.
	Refused AnswerKind = iota
	// Tombstone: a cluster without endpoints, which fails at once, every time.
	Tombstone
	// Real: the cluster of the answer.
	Real
)

// String returns the lower-case name.
func (k AnswerKind) String() string {
	switch k {
	case Tombstone:
		return "tombstone"
	case Real:
		return "real"
	case Refused:
	}
	return "refused"
}

// Answer is what to send for a cluster name.
type Answer struct {
	// Kind says what.
	Kind AnswerKind
	// Service is whose name it is; the zero key if it is nobody's. A later Change of this
	// service can change the answer.
	Service model.ServiceKey
	// Alias: it is Real, and another spelling of what has a cluster by another name. Only
	// who asks for it by this name needs it.
	Alias bool
	// Cluster is set when Kind is Real. Its name is the one asked for, byte for byte.
	Cluster Cluster
}

// askedNames remembers the names that Envoy asked for and that are no cluster's own:
// nobody's, unserved, or aliases. They are with Envoy for good, so there is a cap (I9).
type askedNames struct {
	byName map[string]*askedName
	byBase map[string][]string
}

// askedName is one name as it was asked.
type askedName struct {
	// base is the name in lower case without the port.
	base string
	// owner is whose it was at the last answer; the zero key if it was nobody's.
	owner model.ServiceKey
	// asleep: the last answer was a tombstone.
	asleep bool
}

func newAskedNames() askedNames {
	return askedNames{byName: map[string]*askedName{}, byBase: map[string][]string{}}
}

// remember notes the name and what it was answered. It reports false if that would
// exceed limit.
func (a *askedNames) remember(name string, now askedName, limit int) bool {
	if n, ok := a.byName[name]; ok {
		*n = now
		return true
	}
	if len(a.byName) >= limit {
		return false
	}
	a.byName[name] = &now
	a.byBase[now.base] = append(a.byBase[now.base], name)
	return true
}

// forget drops a name, if it is remembered.
func (a *askedNames) forget(name string) {
	n, ok := a.byName[name]
	if !ok {
		return
	}
	delete(a.byName, name)
	rest := slices.DeleteFunc(a.byBase[n.base], func(s string) bool { return s == name })
	if len(rest) == 0 {
		delete(a.byBase, n.base)
		return
	}
	a.byBase[n.base] = rest
}

// Resolve answers Envoy's request for a cluster by name. What is nobody's is remembered
// up to the cap, so that the Change of the service to which it later belongs names it.
//
//	a cluster's own name                 Real
//	another spelling of something served Real: a cluster of exactly that name with its
//	  an EDS name of its own, part of later Views too; the one exception of I2
//	an unserved port, an unknown service Tombstone, beyond the cap Refused
//	a retired name, no name of the mesh  Refused
func (e *Engine) Resolve(name string) Answer {
	e.settle()
	f := e.find(name)
	a := Answer{}
	if f.service != nil {
		a.Service = f.service.key
	}
	switch f.reach {
	case canonical:
		e.asked.forget(name)
		a.Kind, a.Cluster = Real, e.build(f.service, f.def)
	case alias:
		if e.asked.remember(name, askedName{base: f.base, owner: a.Service}, e.cfg.UnknownCap) {
			a.Kind, a.Alias, a.Cluster = Real, true, e.build(f.service, f.def)
		}
	case nowhere:
		if e.asked.remember(name, askedName{base: f.base, owner: a.Service, asleep: true}, e.cfg.UnknownCap) {
			a.Kind = Tombstone
		}
	case foreign, retiredName:
	}
	return a
}

// Forget says that no Envoy has what a name was answered with any more: the name counts no
// longer towards the cap. Retired names stay so, as an Envoy that only lost its stream asks
// for them again too (XDS-R2), and a fresh one has the route table before it has a listener.
func (e *Engine) Forget(name string) { e.asked.forget(name) }

// AtCap says whether the cap of remembered names is reached: the route table should
// then answer unknown names itself.
func (e *Engine) AtCap() bool { return len(e.asked.byName) >= e.cfg.UnknownCap }

// Asked is how many names are remembered, for metrics.
func (e *Engine) Asked() int { return len(e.asked.byName) }

// awaken looks at the remembered names of every changed service: those that lead to a
// cluster now, and those that do no more.
func (e *Engine) awaken() {
	if len(e.asked.byName) == 0 {
		return
	}
	for _, key := range slices.Collect(maps.Keys(e.changes)) {
		if !e.changes[key].Shape {
			continue
		}
		for _, base := range e.basesOf(key) {
			// A canonical name is forgotten below, so the list may change.
			for _, name := range slices.Clone(e.asked.byBase[base]) {
				e.recheck(name)
			}
		}
	}
}

// recheck looks at one remembered name again.
func (e *Engine) recheck(name string) {
	n := e.asked.byName[name]
	f := e.find(name)
	owner := model.ServiceKey{}
	if f.service != nil {
		owner = f.service.key
	}
	leads := f.reach == canonical || f.reach == alias
	if f.service != nil && (owner != n.owner || leads && n.asleep) {
		insert(&e.note(f.service).Awakened, name)
	}
	n.owner, n.asleep = owner, !leads
	if f.reach == canonical || f.reach == retiredName {
		e.asked.forget(name)
	}
}

// basesOf returns the lower-case names, without ports, that a service has or had.
func (e *Engine) basesOf(key model.ServiceKey) []string {
	bases := []string{key.Name + "." + key.Namespace + "." + e.cfg.Domain}
	if e.cfg.rank(key.Namespace) >= 0 {
		bases = append(bases, key.Name+"."+e.cfg.Domain)
	}
	if v4, v6 := e.vips.addrs(key); v4.IsValid() {
		bases = append(bases, v4.String(), v6.String())
	}
	return bases
}
