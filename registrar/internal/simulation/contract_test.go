package simulation

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	domain        = "aether.internal"
	flatNamespace = "default" // the first of flatNamespaces
)

// flatNamespaces is what the tests configure: default goes before shop.
func flatNamespaces() []string { return []string{flatNamespace, "shop"} }

// member is one endpoint of a set.
type member struct {
	weight   uint32
	draining bool
}

// set is who serves one port of one service, by address.
type set map[netip.Addr]member

// contract says, of the records of a mesh, which endpoints an authority may reach
// (contract 2 to 4).
type contract struct{ records map[string]model.Endpoint }

// of returns the records of a service that count: those with ports whose address was
// not given to a later pod.
func (c contract) of(key model.ServiceKey) []model.Endpoint {
	owner := map[netip.Addr]model.Endpoint{}
	for _, ep := range c.records {
		old, taken := owner[ep.Addresses[0]]
		if later := cmp.Or(ep.Since.Compare(old.Since), cmp.Compare(ep.UID, old.UID)); !taken || later > 0 {
			owner[ep.Addresses[0]] = ep
		}
	}
	return slices.DeleteFunc(slices.Collect(maps.Values(owner)), func(ep model.Endpoint) bool {
		return ep.Service != key || len(ep.Ports) == 0
	})
}

// healthy are those of eps with a HEALTHY port, or all of them while none has one.
func healthy(eps []model.Endpoint) []model.Endpoint {
	isHealthy := func(s model.PortStatus) bool { return s.Health == model.Healthy }
	out := slices.DeleteFunc(slices.Clone(eps), func(ep model.Endpoint) bool { return !slices.ContainsFunc(ep.Ports, isHealthy) })
	if len(out) == 0 {
		return eps
	}
	return out
}

// advertise are those of eps that list a port.
func advertise(eps []model.Endpoint, number uint16) []model.Endpoint {
	return slices.DeleteFunc(slices.Clone(eps), func(ep model.Endpoint) bool { return status(ep, number).Number == 0 })
}

func status(ep model.Endpoint, number uint16) model.PortStatus {
	for _, s := range ep.Ports {
		if s.Number == number {
			return s
		}
	}
	return model.PortStatus{}
}

// defaultPort is, of the defaults that HEALTHY endpoints declare, the one that most of
// them advertise; ties: most declared, then the lower number. 0: there is none.
func defaultPort(eps []model.Endpoint) uint16 {
	var best uint16
	var most [2]int
	eps = healthy(eps)
	for _, candidate := range eps {
		declared := 0
		for _, ep := range eps {
			if ep.Default == candidate.Default {
				declared++
			}
		}
		votes := [2]int{len(advertise(eps, candidate.Default)), declared}
		if c := slices.Compare(votes[:], most[:]); c > 0 || c == 0 && candidate.Default < best {
			best, most = candidate.Default, votes
		}
	}
	return best
}

// classOf decides what a port speaks, the same way; ties go to HTTP.
func classOf(eps []model.Endpoint, number uint16) port.Class {
	votes := map[port.Class]int{}
	for _, ep := range healthy(advertise(eps, number)) {
		votes[status(ep, number).Protocol.Class()]++
	}
	switch {
	case votes[port.ClassTCP] > votes[port.ClassHTTP]:
		return port.ClassTCP
	case votes[port.ClassHTTP] > 0:
		return port.ClassHTTP
	}
	return port.ClassNone
}

// serving is the set of one port: who lists it in the decided wire class, healthy or
// draining.
func serving(eps []model.Endpoint, number uint16, class port.Class) set {
	out := set{}
	if classOf(eps, number) != class {
		return out
	}
	for _, ep := range advertise(eps, number) {
		if s := status(ep, number); s.Protocol.Class() == class && s.Health != model.Unhealthy {
			out[ep.Addresses[0]] = member{weight: ep.Weight, draining: s.Health == model.Draining}
		}
	}
	return out
}

// known are services that exist: those with endpoints and those that had some lately.
type known map[model.ServiceKey]bool

// named is what an authority says: a known service and a port, 0 for the default.
func (k known) named(name string) (key model.ServiceKey, number uint16, ok bool) {
	host, text, _ := strings.Cut(name, ":")
	n, _ := strconv.ParseUint(text, 10, 16)
	labels := strings.Split(strings.TrimSuffix(host, "."+domain), ".")
	if len(labels) == 2 {
		key = model.ServiceKey{Namespace: labels[1], Name: labels[0]}
		return key, uint16(n), k[key]
	}
	for _, ns := range flatNamespaces() {
		if key = (model.ServiceKey{Namespace: ns, Name: labels[0]}); k[key] {
			return key, uint16(n), true
		}
	}
	return model.ServiceKey{}, uint16(n), false
}

// reached is who an HTTP request to an authority may reach at rest, and the port.
func (c contract) reached(k known, name string) (set, uint16) {
	key, number, ok := k.named(name)
	if !ok {
		return set{}, number
	}
	eps := c.of(key)
	if number == 0 {
		number = defaultPort(eps)
	}
	return serving(eps, number, port.ClassHTTP), number
}
