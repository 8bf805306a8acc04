package resource

import (
	"cmp"
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"

	"github.com/portolan-mesh/portolan/api/authority"
)

// VirtualHost is what some authorities of a service lead to.
type VirtualHost struct {
	// Name is unique in the table.
	Name string
	// Domains are authorities in lower case. Envoy compares them without regard to
	// case.
	Domains []string
	// Cluster is where they lead. It need not exist yet: it is asked for on demand.
	Cluster string
}

// NewVirtualHost builds one virtual host. Callers keep the message while the
// service's ports stay the same and give it to every table; nobody changes it.
func NewVirtualHost(v VirtualHost) *routev3.VirtualHost {
	return &routev3.VirtualHost{
		Name:    v.Name,
		Domains: slices.Compact(slices.Sorted(slices.Values(v.Domains))),
		Routes: []*routev3.Route{{
			Match:  anyPath(),
			Action: forward(&routev3.RouteAction{ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: v.Cluster}}),
		}},
	}
}

// RouteTable is everything that a node's outbound HTTP listeners route by.
type RouteTable struct {
	// VirtualHosts are the catalogue's, in any order.
	VirtualHosts []*routev3.VirtualHost
	// Refused are domains of the catalogue that lead nowhere: "F:*" for the ports that
	// a service does not serve over HTTP, F alone where its default port is a tcp port.
	// In any order. An exact domain of VirtualHosts wins over a "F:*".
	Refused []string
	// Domain is the mesh domain.
	Domain string
	// AtCap says that no further unknown names may be asked for; they are answered
	// 503 by the table itself (I9).
	AtCap bool
}

// The virtual hosts of the table itself. No service has such a name.
const (
	refusedHost  = "refused"
	catchAllHost = "*"
)

// Routes builds the route table: the catalogue's names, what is refused of them
// (503 to a valid port, 404 to anything else), and a catch-all for the names it does
// not have: a mesh-shaped authority is its own cluster's name, asked for on demand,
// everything else is a 404 (dataplane decision 6).
//
// One virtual host refuses for all services. One for each would double the table's
// memory and the time of an update: with 3,000 services and two ports each, 80 ms of
// Envoy's main thread instead of 190.
func Routes(t RouteTable) *routev3.RouteConfiguration {
	hosts := make([]*routev3.VirtualHost, 0, len(t.VirtualHosts)+2)
	hosts = append(hosts, t.VirtualHosts...)
	slices.SortFunc(hosts, func(a, b *routev3.VirtualHost) int { return cmp.Compare(a.GetName(), b.GetName()) })
	if len(t.Refused) > 0 {
		hosts = append(hosts, &routev3.VirtualHost{
			Name:    refusedHost,
			Domains: slices.Compact(slices.Sorted(slices.Values(t.Refused))),
			Routes:  refuse(refusedRegex()),
		})
	}
	return &routev3.RouteConfiguration{
		Name:             RoutesName,
		VirtualHosts:     append(hosts, catchAll(t)),
		ValidateClusters: boolean(false),
		// Applications neither send the mesh's headers nor see them.
		RequestHeadersToRemove:  []string{NotDeliveredHeader, serverNameHeader},
		ResponseHeadersToRemove: []string{NotDeliveredHeader},
	}
}

func catchAll(t RouteTable) *routev3.VirtualHost {
	routes := refuse(authority.MeshRegex(t.Domain))
	if !t.AtCap {
		routes[0].Action = forward(&routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_ClusterHeader{ClusterHeader: ":authority"},
		})
	}
	return &routev3.VirtualHost{Name: catchAllHost, Domains: []string{"*"}, Routes: routes}
}

// refuse answers 503 where the authority matches and 404 elsewhere.
func refuse(expression string) []*routev3.Route {
	unavailable := direct(503, "portolan: nobody serves this name and port\n")
	unavailable.Match.Headers = []*routev3.HeaderMatcher{authorityMatch(regex(expression))}
	return []*routev3.Route{unavailable, direct(404, "portolan: no such name in the mesh\n")}
}

// refusedRegex matches a host alone and a host with a valid port. The virtual
// host's domains have compared the host already.
func refusedRegex() string { return "[^:]*|" + authority.PortRegex() }

// forward waits for a response as long as the client does.
func forward(a *routev3.RouteAction) *routev3.Route_Route {
	a.Timeout = duration(0)
	a.ClusterNotFoundResponseCode = routev3.RouteAction_SERVICE_UNAVAILABLE
	a.Priority = corev3.RoutingPriority_DEFAULT
	return &routev3.Route_Route{Route: a}
}
