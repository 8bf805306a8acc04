package projection

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

func portText(number uint16) string { return strconv.Itoa(int(number)) }

func serviceKey(namespace, name string) model.ServiceKey {
	return model.ServiceKey{Namespace: namespace, Name: name}
}

// ClusterID is what a cluster leads to. Two clusters with one ID differ in name only:
// an alias has the ID of what it stands for.
type ClusterID struct {
	// Service that is called.
	Service model.ServiceKey
	// Port of it.
	Port uint16
	// Selector is the subset of its endpoints. Always empty so far: a subset is one more
	// projection of the endpoints, not a filter in Envoy (dataplane decision 10).
	Selector string
}

// definition is a cluster without its endpoints.
type definition struct {
	name string
	// bare is the name without the port; of a tcp cluster its address.
	bare     string
	port     uint16
	protocol port.Protocol
}

// sni returns the server name that the cluster presents: the bare port for HTTP; for
// tcp also the service, so that a re-used address of a pod with the same account is
// refused (dataplane decision 8).
func (d definition) sni(key model.ServiceKey) string {
	if d.protocol.Class() == port.ClassTCP {
		return key.TCPServerName(d.port)
	}
	return portText(d.port)
}

// split says whether the explicit spelling of the default port leads to a cluster of
// its own in this step.
func (s *service) split() bool { return s.step == Splitting || s.step == Moving }

// clustersOf returns the HTTP clusters that carry a name of the service.
func (e *Engine) clustersOf(s *service, name string) []definition {
	var out []definition
	if s.bare.Number != 0 {
		out = append(out, definition{name: name, bare: name, port: s.bare.Number, protocol: s.bare.Protocol})
	}
	for _, p := range s.ports {
		if p.Protocol.Class() != port.ClassHTTP {
			continue
		}
		// While Joining, Envoy may still route by the virtual hosts of a split step.
		if p.Number != s.bare.Number || s.split() || s.step == Joining {
			out = append(out, definition{name: name + ":" + portText(p.Number), bare: name, port: p.Number, protocol: p.Protocol})
		}
	}
	return out
}

// clusterNames returns the names that clusters of the service carry in its step, the
// one that its virtual hosts lead to first.
func (s *service) clusterNames() []string {
	switch s.step {
	case Releasing:
		return []string{s.longName, s.flatName}
	case Renaming:
		return []string{s.flatName, s.longName}
	case Leaving:
		return nil
	case Settled, Splitting, Moving, Joining, Claiming:
	}
	return []string{s.bareName()}
}

// routedName returns the one of clusterNames that the virtual hosts lead to.
func (s *service) routedName() string {
	if s.step == Releasing {
		return s.longName
	}
	return s.bareName()
}

// definitions returns the clusters of a service, aliases aside: HTTP by name and port,
// then tcp by family and port.
func (e *Engine) definitions(s *service) []definition {
	var out []definition
	for _, name := range s.clusterNames() {
		out = append(out, e.clustersOf(s, name)...)
	}
	if s.step == Leaving {
		return out
	}
	v4, v6 := e.vips.addrs(s.key)
	for _, a := range []netip.Addr{v4, v6} {
		for _, p := range s.ports {
			if a.IsValid() && p.Protocol.Class() == port.ClassTCP {
				// What the TCP listener asks for: the connection's original destination.
				out = append(out, definition{
					name: netip.AddrPortFrom(a, p.Number).String(), bare: a.String(), port: p.Number, protocol: p.Protocol,
				})
			}
		}
	}
	return out
}

// reach is what a name leads to.
type reach uint8

const (
	// foreign: not the form of a cluster name; nothing of ours.
	foreign reach = iota
	// nowhere: well-formed, but nobody serves it.
	nowhere
	// retiredName: it led to a cluster that must not come back (I2).
	retiredName
	// alias: a spelling of something served whose cluster has another name.
	alias
	// canonical: the name of a cluster.
	canonical
)

// found is the answer of find.
type found struct {
	reach reach
	// base is the name in lower case without the port.
	base    string
	service *service // nil if nobody's
	def     definition
}

// find says what a cluster name leads to. Names compare in lower case; the definition
// carries the name as it was asked (XDS-R27).
func (e *Engine) find(name string) found {
	if dest, err := netip.ParseAddrPort(name); err == nil {
		return e.findAddress(name, dest)
	}
	a, err := authority.Parse(name, e.cfg.Domain)
	if err != nil {
		return found{reach: foreign}
	}
	f := found{reach: nowhere, base: a.Host(e.cfg.Domain), service: e.ownerOf(a)}
	s := f.service
	if s == nil || s.step == Leaving {
		return f
	}
	lower := a.HostPort(e.cfg.Domain)
	if slices.Contains(s.retired, lower) {
		f.reach = retiredName
		return f
	}
	f.def = definition{name: name, bare: f.base, port: a.Port}
	if a.Port == 0 {
		f.def.port = s.bare.Number
		f.def.protocol = s.bare.Protocol
	} else if p, ok := s.protocol(a.Port); ok {
		f.def.protocol = p
	}
	if f.def.port == 0 || f.def.protocol.Class() != port.ClassHTTP {
		return f
	}
	f.reach = alias
	exact := lower == name
	for _, bare := range s.clusterNames() {
		if exact && bare == f.base && (a.Port != s.bare.Number || s.split() || s.step == Joining) {
			f.reach = canonical
		}
	}
	return f
}

// findAddress is find for the original destination of a TCP connection.
func (e *Engine) findAddress(name string, dest netip.AddrPort) found {
	if !e.vips.contains(dest.Addr()) || dest.Port() == 0 || dest.String() != name {
		return found{reach: foreign}
	}
	f := found{reach: nowhere, base: dest.Addr().String()}
	key, ok := e.vips.owner(dest.Addr())
	if !ok {
		return f
	}
	f.service = e.services[key]
	if f.service == nil {
		return f
	}
	if f.service.step != Leaving && f.service.serves(dest.Port(), port.ClassTCP) {
		f.reach = canonical
		f.def = definition{name: name, bare: f.base, port: dest.Port(), protocol: port.TCP}
	}
	return f
}

// ownerOf returns the known service that answers for a name, nil if there is none.
func (e *Engine) ownerOf(a authority.Authority) *service {
	var s *service
	if a.Namespace == "" {
		s = e.flatOwner(a.Service)
	} else {
		s = e.services[serviceKey(a.Namespace, a.Service)]
	}
	if s == nil || !s.known {
		return nil
	}
	return s
}
