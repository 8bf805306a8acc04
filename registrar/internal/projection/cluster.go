package projection

import (
	"net/netip"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Cluster is one cluster with its endpoint set. It says nothing about local pods, so
// its bytes are the same on every node (dataplane decision 4).
type Cluster struct {
	// ID is what it leads to.
	ID ClusterID
	// Name is the cluster's name.
	Name string
	// EDSName is the load assignment's name. It equals Name: one EDS name per cluster,
	// as a second cluster on a subscribed EDS name never gets its endpoints (XDS-D6).
	EDSName string
	// SNI is the server name to present, explicitly (I7).
	SNI string
	// Protocol is what the port speaks, by majority.
	Protocol port.Protocol
	// Identities are the SPIFFE IDs that an endpoint may prove, sorted. They are the
	// service's, the same for each of its clusters.
	Identities []string
	// Endpoints are the pods that list the port in this wire class and are healthy or
	// draining there, by address. nil in a View from Shape.
	Endpoints []ClusterEndpoint
}

// ClusterEndpoint is one pod in a cluster.
type ClusterEndpoint struct {
	// Addr is the pod's primary address; the port is the mesh's inbound one.
	Addr netip.Addr
	// Weight is 1-65535.
	Weight uint32
	// Locality of the pod's node.
	Locality model.Locality
	// Health is Healthy or Draining, of this port.
	Health model.Health
	// UID names the record.
	UID string
	// Metadata are the subset keys and values; not to be changed.
	Metadata map[string]string
}

// Cluster returns the one cluster of this name, which is that of a known service or an
// alias that was Resolved. It costs no more than the service's endpoints.
func (e *Engine) Cluster(name string) (Cluster, bool) {
	e.settle()
	f := e.find(name)
	switch f.reach {
	case canonical:
	case alias:
		if _, asked := e.asked.byName[name]; !asked {
			return Cluster{}, false
		}
	case foreign, nowhere, retiredName:
		return Cluster{}, false
	}
	return e.build(f.service, f.def), true
}

// build returns the cluster of a definition with its endpoints.
func (e *Engine) build(s *service, d definition) Cluster {
	c := s.describe(d)
	c.Endpoints = s.endpoints(d.port, d.protocol.Class())
	return c
}

// describe returns the cluster of a definition without its endpoints.
func (s *service) describe(d definition) Cluster {
	return Cluster{
		ID:         ClusterID{Service: s.key, Port: d.port},
		Name:       d.name,
		EDSName:    d.name,
		SNI:        d.sni(s.key),
		Protocol:   d.protocol,
		Identities: append([]string(nil), s.accounts...),
	}
}

// endpoints returns exactly the pods that serve the port in this wire class.
func (s *service) endpoints(number uint16, class port.Class) []ClusterEndpoint {
	n := 0
	for _, p := range s.profiles {
		if _, ok := p.callable(number, class); ok {
			n += p.pods
		}
	}
	if n == 0 {
		return nil
	}
	s.sort()
	out := make([]ClusterEndpoint, 0, n)
	for _, r := range s.records {
		if health, ok := r.profile.callable(number, class); ok {
			out = append(out, ClusterEndpoint{
				Addr: r.addr, Weight: r.weight, Locality: r.locality.Value(), Health: health, UID: r.uid, Metadata: r.metadata,
			})
		}
	}
	return out
}
