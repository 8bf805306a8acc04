package resource

import (
	"cmp"
	"net/netip"
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// LoadAssignment is who serves one port of a service, as one node sees it.
type LoadAssignment struct {
	// Name is the cluster's name.
	Name string
	// Endpoints in any order; none is fine and means that nobody serves the port.
	Endpoints []Endpoint
	// Self is the locality of the node that reads it.
	Self model.Locality
}

// Endpoint is one pod that serves the port.
type Endpoint struct {
	// Addr is where its mesh listener is reached: pod address and InboundPort.
	Addr netip.AddrPort
	// Weight is 1-65535; 0 counts as 1.
	Weight uint32
	// Locality is the pod's.
	Locality model.Locality
	// Draining endpoints finish what they have and get nothing new.
	Draining bool
}

// Endpoints builds the load assignment: a group per locality, nearer localities
// first (same zone, same region, elsewhere), priorities without a gap. Where no
// endpoint has a locality there is one group without.
//
// Each address is in it once. Two pods have one address when it was given to a new
// pod before the old one's record went; then the one that does not drain counts.
func Endpoints(a LoadAssignment) *endpointv3.ClusterLoadAssignment {
	out := &endpointv3.ClusterLoadAssignment{ClusterName: a.Name}
	sorted := uniqueEndpoints(a.Endpoints)
	slices.SortStableFunc(sorted, func(x, y Endpoint) int {
		return cmp.Or(
			cmp.Compare(distance(a.Self, x.Locality), distance(a.Self, y.Locality)),
			cmp.Compare(x.Locality.Region, y.Locality.Region),
			cmp.Compare(x.Locality.Zone, y.Locality.Zone),
		)
	})
	var (
		group    *endpointv3.LocalityLbEndpoints
		previous Endpoint
		priority uint32
	)
	for i, e := range sorted {
		if i == 0 || e.Locality != previous.Locality {
			if i > 0 && distance(a.Self, e.Locality) != distance(a.Self, previous.Locality) {
				priority++
			}
			group = &endpointv3.LocalityLbEndpoints{Locality: locality(e.Locality), Priority: priority}
			out.Endpoints = append(out.Endpoints, group)
		}
		group.LbEndpoints = append(group.LbEndpoints, lbEndpoint(e))
		previous = e
	}
	return out
}

// uniqueEndpoints returns a copy, ascending by address, each address once.
func uniqueEndpoints(in []Endpoint) []Endpoint {
	out := slices.Clone(in)
	for i := range out {
		out[i].Addr = netip.AddrPortFrom(out[i].Addr.Addr().Unmap(), out[i].Addr.Port())
		out[i].Weight = max(out[i].Weight, 1)
	}
	slices.SortFunc(out, func(x, y Endpoint) int {
		return cmp.Or(
			x.Addr.Compare(y.Addr),
			compareBool(x.Draining, y.Draining),
			cmp.Compare(y.Weight, x.Weight),
			cmp.Compare(x.Locality.Region, y.Locality.Region),
			cmp.Compare(x.Locality.Zone, y.Locality.Zone),
		)
	})
	return slices.CompactFunc(out, func(x, y Endpoint) bool { return x.Addr == y.Addr })
}

// distance is 0 for the same zone, 1 for the same region, 2 for elsewhere. What is
// unknown is never near, except that a node without a locality has no near or far.
func distance(self, other model.Locality) int {
	switch {
	case self == model.Locality{}:
		return 0
	case self.Zone != "" && self == other:
		return 0
	case self.Region != "" && self.Region == other.Region:
		return 1
	}
	return 2
}

func lbEndpoint(e Endpoint) *endpointv3.LbEndpoint {
	health := corev3.HealthStatus_HEALTHY
	if e.Draining {
		health = corev3.HealthStatus_DRAINING
	}
	return &endpointv3.LbEndpoint{
		HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
			Address: address(socketAddress(e.Addr.Addr().String(), uint32(e.Addr.Port()))),
		}},
		HealthStatus:        health,
		LoadBalancingWeight: u32(e.Weight),
	}
}

func locality(l model.Locality) *corev3.Locality {
	if l == (model.Locality{}) {
		return nil
	}
	return &corev3.Locality{Region: l.Region, Zone: l.Zone}
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
