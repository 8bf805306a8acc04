package projection

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// View is one service as Envoy, DNS and status are told about it: a value that shares
// nothing mutable with the Engine but the pods' metadata.
type View struct {
	// Service is whose View it is.
	Service model.ServiceKey
	// Name is F of contract 2: the cluster name that the virtual hosts lead to.
	Name string
	// Spellings are the names under which DNS answers for the service; Name is first
	// unless the flat name is on its way to or from another service. Empty when Leaving.
	Spellings []string
	// VIP4 and VIP6 are the virtual addresses; invalid while the range is used up.
	VIP4, VIP6 netip.Addr
	// VirtualHosts of the route table, in a fixed order. No domain is in two Views.
	VirtualHosts []VirtualHost
	// Clusters are all that a name of the service leads to: HTTP by port, tcp by family
	// and port, then aliases that were Resolved.
	Clusters []Cluster
	// Retired are cluster names that Envoy must not keep; remove them where it holds
	// them. If one is in Clusters of a later View it has to be sent unasked, because the
	// subscription stands (XDS-D4).
	Retired []string
	// TCPPorts are the tcp ports, ascending: what the pods capture to the TCP listener.
	TCPPorts []uint16
	// Ports is the advertised union with counts.
	Ports []PortView
	// Default is the default port as the pods decide it, and DefaultProtocol its
	// protocol. 0 before any pod was seen.
	Default         uint16
	DefaultProtocol port.Protocol
	// Committed is the port that the cluster called Name stands for in this step. It is
	// 0 if there is no such cluster, because the default is no HTTP port.
	Committed uint16
	// Step, Token and Await: hand Token to Advance when all of Await is acknowledged.
	Step  Step
	Token uint64
	Await []Await
	// Conflicts are what the pods disagree about, for people.
	Conflicts []string
}

// VirtualHost is one entry of the route table.
type VirtualHost struct {
	// Name is unique in the table.
	Name string
	// Domains are the authorities, in lower case; "name:*" is every other port.
	Domains []string
	// Cluster is where they lead; empty refuses them: 503 for a portless name or a
	// valid port, else 404.
	Cluster string
}

// PortView is one port of the advertised union.
type PortView struct {
	port.Port
	// Advertised counts the endpoints that list the port.
	Advertised int
	// Healthy and Draining count those that are in its endpoint set so.
	Healthy, Draining int
	// LeftOut counts those that list it in another wire class or an unknown protocol.
	LeftOut int
}

// View returns the service with all its clusters and their endpoints. The cost is that
// of its endpoints times its clusters; Shape and Cluster are the cheaper halves.
func (e *Engine) View(key model.ServiceKey) (View, bool) {
	v, ok := e.Shape(key)
	for i := range v.Clusters {
		c := &v.Clusters[i]
		c.Endpoints = e.services[key].endpoints(c.ID.Port, c.Protocol.Class())
	}
	return v, ok
}

// Shape is View with clusters that have no endpoints: it does not cost more for a
// service with many.
func (e *Engine) Shape(key model.ServiceKey) (View, bool) {
	e.settle()
	s := e.services[key]
	if s == nil || !s.known {
		return View{}, false
	}
	v := View{
		Service: key, Name: s.routedName(), Spellings: e.spellings(s),
		VirtualHosts: e.virtualHosts(s), Retired: slices.Clone(s.retired),
		Default: s.def.Number, DefaultProtocol: s.def.Protocol, Committed: s.bare.Number,
		Step: s.step, Token: s.token, Await: e.awaits(s),
	}
	v.VIP4, v.VIP6 = e.vips.addrs(key)
	for _, d := range e.definitions(s) {
		v.Clusters = append(v.Clusters, s.describe(d))
	}
	for _, d := range e.aliases(s) {
		v.Clusters = append(v.Clusters, s.describe(d))
	}
	for _, p := range s.ports {
		if p.Protocol.Class() == port.ClassTCP {
			v.TCPPorts = append(v.TCPPorts, p.Number)
		}
	}
	v.Ports, v.Conflicts = e.report(s)
	return v, true
}

// aliases returns the definitions of the spellings that Envoy asked for, by name.
func (e *Engine) aliases(s *service) []definition {
	if len(e.asked.byName) == 0 {
		return nil
	}
	var names []string
	for _, base := range e.basesOf(s.key) {
		names = append(names, e.asked.byBase[base]...)
	}
	slices.Sort(names)
	var out []definition
	for _, name := range names {
		if f := e.find(name); f.reach == alias && f.service == s {
			out = append(out, f.def)
		}
	}
	return out
}

// spellings returns the names under which the service is found.
func (e *Engine) spellings(s *service) []string {
	flat := e.flatHeir(s.key.Name) == s
	switch {
	case s.step == Leaving:
		return nil
	case flat && s.flat:
		return []string{s.flatName, s.longName}
	case flat:
		return []string{s.longName, s.flatName}
	}
	return []string{s.longName}
}

// virtualHosts returns the service's part of the route table (dataplane decision 6).
func (e *Engine) virtualHosts(s *service) []VirtualHost {
	if s.step == Leaving {
		return nil
	}
	name := s.routedName()
	names := []string{name}
	if s.flat && name == s.flatName {
		names = append(names, s.longName)
	}
	withPort := func(p string) []string {
		out := make([]string, len(names))
		for i, n := range names {
			out[i] = n + ":" + p
		}
		return out
	}
	bare := VirtualHost{Name: name}
	bare.Domains = append(bare.Domains, names...)
	if s.bare.Number != 0 && (s.step != Splitting || !s.refuseBare) {
		bare.Cluster = name
	}
	if s.bare.Number != 0 && !s.split() {
		bare.Domains = withDefault(names, portText(s.bare.Number))
	}
	out := []VirtualHost{bare}
	for _, p := range s.ports {
		if p.Protocol.Class() != port.ClassHTTP || p.Number == s.bare.Number && !s.split() {
			continue
		}
		text := portText(p.Number)
		out = append(out, VirtualHost{Name: name + ":" + text, Domains: withPort(text), Cluster: name + ":" + text})
	}
	out = append(out, VirtualHost{Name: name + ":*", Domains: withPort("*")})
	if s.refusesFlat() {
		out = append(out, VirtualHost{Name: s.flatName, Domains: []string{s.flatName, s.flatName + ":*"}})
	}
	return out
}

// withDefault returns each name without and with the default port.
func withDefault(names []string, text string) []string {
	out := make([]string, 0, 2*len(names))
	for _, n := range names {
		out = append(out, n, n+":"+text)
	}
	return out
}

// report returns the union with its counts, and what the pods disagree about.
func (e *Engine) report(s *service) ([]PortView, []string) {
	var conflicts []string
	if heir := e.flatHeir(s.key.Name); s.flatName != "" && heir != nil && heir != s {
		conflicts = append(conflicts, fmt.Sprintf("name %s belongs to service %s, whose namespace is listed before", s.flatName, heir.key))
	}
	if _, homeless := e.homeless[s]; homeless {
		conflicts = append(conflicts, fmt.Sprintf("no virtual address is left in %s; use a larger range", e.cfg.VIP4))
	}
	out := make([]PortView, len(s.ports))
	if len(s.records) == 0 {
		for i, p := range s.ports {
			out[i].Port = p
		}
		return out, conflicts
	}
	for i, v := range decide(s.profiles).votes {
		p := s.ports[i]
		other, unknown := v.leftOut(p.Protocol)
		out[i] = PortView{Port: p, Advertised: v.pods, LeftOut: other + unknown}
		for _, pr := range s.profiles {
			switch health, ok := pr.callable(p.Number, p.Protocol.Class()); {
			case ok && health == model.Healthy:
				out[i].Healthy += pr.pods
			case ok:
				out[i].Draining += pr.pods
			}
		}
		conflicts = append(conflicts, v.conflicts(p, s.def.Number, len(s.records))...)
	}
	return out, conflicts
}

// The remedies of what the pods of a service disagree about. Which pod says what, the
// records say: to keep the pods' names here would cost memory for each pod of the mesh.
const (
	oneDefault  = "; give all pods of the service one default port"
	oneProtocol = "; give all pods of the service one protocol for the port, or serve the other on another port"
	oneVersion  = "; update the registrar of this node"
)

// conflicts says what the pods disagree about on one port, and what to do about it.
func (v *vote) conflicts(decided port.Port, def uint16, pods int) []string {
	var out []string
	if v.declared > 0 && decided.Number != def {
		out = append(out, fmt.Sprintf("default port: %s %d, decided is %d",
			share(v.declared, pods, "declares", "declare"), decided.Number, def)+oneDefault)
	}
	other, unknown := v.leftOut(decided.Protocol)
	if other > 0 {
		out = append(out, fmt.Sprintf("port %d: %s another protocol than the decided %s and %s left out",
			decided.Number, share(other, v.pods, "speaks", "speak"), decided.Protocol, verb(other, "is", "are"))+oneProtocol)
	}
	if unknown > 0 {
		out = append(out, fmt.Sprintf("port %d: %s a protocol that this version does not know and %s left out",
			decided.Number, share(unknown, v.pods, "speaks", "speak"), verb(unknown, "is", "are"))+oneVersion)
	}
	if a, b := v.by[port.HTTP], v.by[port.H2]; a > 0 && b > 0 && decided.Protocol.Class() == port.ClassHTTP {
		out = append(out, fmt.Sprintf("port %d: %d %s http and %d %s h2, decided is %s",
			decided.Number, a, verb(a, "endpoint says", "endpoints say"), b, verb(b, "says", "say"), decided.Protocol)+oneProtocol)
	}
	return out
}

// share says that n of so many endpoints do something.
func share(n, of int, one, many string) string {
	return fmt.Sprintf("%d of %d %s %s", n, of, verb(of, "endpoint", "endpoints"), verb(n, one, many))
}

// verb returns the word that goes with n.
func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// LookUp returns the addresses that a DNS name resolves to: the service's virtual ones.
// ok is false for a name that is no service's, whose answer is NXDOMAIN.
func (e *Engine) LookUp(name string) (v4, v6 netip.Addr, ok bool) {
	e.settle()
	a, err := authority.Parse(name, e.cfg.Domain)
	if err != nil || a.Port != 0 {
		return v4, v6, false
	}
	s := e.services[serviceKey(a.Namespace, a.Service)]
	if a.Namespace == "" {
		s = e.flatHeir(a.Service)
	}
	if s == nil || !s.known || s.step == Leaving {
		return v4, v6, false
	}
	v4, v6 = e.vips.addrs(s.key)
	return v4, v6, v4.IsValid()
}

// UpstreamClusters returns the HTTP clusters behind an entry of config.aether.io/upstreams,
// "service" or "service.namespace", of a pod in the given namespace: what to have ready
// before the pod's first request. A bare service is what its one-label name leads to; if
// no flat namespace has it, that of the pod's own namespace. It is empty while there is
// no such service; ask again when a Shape changes.
func (e *Engine) UpstreamClusters(ref, fromNamespace string) []string {
	e.settle()
	a, err := authority.Parse(ref+"."+e.cfg.Domain, e.cfg.Domain)
	if err != nil || a.Port != 0 {
		return nil
	}
	s := e.services[serviceKey(a.Namespace, a.Service)]
	if a.Namespace == "" {
		if s = e.flatHeir(a.Service); s == nil {
			s = e.services[serviceKey(fromNamespace, a.Service)]
		}
	}
	if s == nil || !s.known || s.step == Leaving {
		return nil
	}
	var out []string
	name := s.routedName()
	for _, d := range e.clustersOf(s, name) {
		// The bare cluster's port has a cluster of its own only for a moment.
		if d.name == name || d.port != s.bare.Number {
			out = append(out, d.name)
		}
	}
	return out
}
