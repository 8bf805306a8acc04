package cache

import (
	"cmp"

	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
)

// Kind is a sort of resource together with the stream that carries it.
type Kind uint8

// The kinds, in the order in which one stream sends them.
const (
	// WildcardCluster is a cluster that every Envoy holds: CDS on the ADS stream.
	// The cache's set is the whole truth: a name not in it does not exist.
	WildcardCluster Kind = iota
	// Endpoints is a ClusterLoadAssignment on the ADS stream. It has its cluster's
	// name. One that does not exist is answered with an empty assignment, because
	// Envoy ignores the removal (XDS-D5).
	Endpoints
	// Secret is a TLS secret on the ADS stream.
	Secret
	// Listener is a listener that every Envoy holds: LDS on the ADS stream. The
	// cache's set is the whole truth.
	Listener
	// Route is a RouteConfiguration on the ADS stream.
	Route
	// OnDemandCluster is a cluster that is given to those who ask for it by name,
	// on the separate delta CDS stream (XDS-D2). A name is never both this and a
	// WildcardCluster (dataplane decision 5).
	OnDemandCluster

	numKinds
)

// String returns the kind's name as used in logs, status and metric labels.
func (k Kind) String() string {
	switch k {
	case WildcardCluster:
		return "cluster"
	case Endpoints:
		return "endpoints"
	case Secret:
		return "secret"
	case Listener:
		return "listener"
	case Route:
		return "route"
	case OnDemandCluster:
		return "on-demand-cluster"
	case numKinds:
	}
	return "unknown"
}

// Kinds returns all kinds in sending order.
func Kinds() []Kind {
	return []Kind{WildcardCluster, Endpoints, Secret, Listener, Route, OnDemandCluster}
}

// TypeURL returns the xDS type URL of the kind's resources.
func (k Kind) TypeURL() string {
	switch k {
	case WildcardCluster, OnDemandCluster:
		return resource.ClusterType
	case Endpoints:
		return resource.EndpointType
	case Secret:
		return resource.SecretType
	case Listener:
		return resource.ListenerType
	case Route:
		return resource.RouteType
	case numKinds:
	}
	return ""
}

// whole reports whether the cache's set of the kind is complete by itself, so
// that a name which is not held is known not to exist and a wildcard has members.
func (k Kind) whole() bool { return k == WildcardCluster || k == Listener }

// service returns the kind of stream that carries k.
func (k Kind) service() Service {
	if k == OnDemandCluster {
		return OnDemand
	}
	return ADS
}

// Service is a kind of stream.
type Service uint8

const (
	// ADS is DeltaAggregatedResources.
	ADS Service = iota
	// OnDemand is DeltaClusters: names asked for one by one.
	OnDemand

	numServices
)

// String returns the service's name as used in logs, status and metric labels.
func (s Service) String() string {
	if s == OnDemand {
		return "on-demand"
	}
	return "ads"
}

// Services returns all services.
func Services() []Service { return []Service{ADS, OnDemand} }

// kind returns what a type URL means on a stream of the service.
func (s Service) kind(typeURL string) (Kind, bool) {
	for k := range numKinds {
		if k.service() == s && k.TypeURL() == typeURL {
			return k, true
		}
	}
	return 0, false
}

// Key names one resource.
type Key struct {
	Kind Kind
	Name string
}

// String returns kind/name.
func (k Key) String() string { return k.Kind.String() + "/" + k.Name }

// Compare orders keys by kind, then name.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Kind, o.Kind), cmp.Compare(k.Name, o.Name))
}
