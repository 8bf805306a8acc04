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
	// Domains are authorities in lower case, or "F:*" for the other ports of F. Envoy
	// compares them without regard to case, exact ones first.
	Domains []string
	// Cluster is where they lead. It need not exist yet: it is asked for on demand.
	// Empty refuses them: 503 for a host alone or with a valid port, else 404.
	Cluster string
}

// NewVirtualHost builds one virtual host. Callers keep the message while the
// service's ports stay the same and give it to every table; nobody changes it. One
// that refuses has no routes: Routes gives it its answers.
func NewVirtualHost(v VirtualHost) *routev3.VirtualHost {
	out := &routev3.VirtualHost{
		Name:    v.Name,
		Domains: slices.Compact(slices.Sorted(slices.Values(v.Domains))),
	}
	if v.Cluster != "" {
		out.Routes = []*routev3.Route{{
			Match:  anyPath(),
			Action: forward(&routev3.RouteAction{ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: v.Cluster}}),
		}}
	}
	return out
}

// RouteTable is everything that a node's outbound HTTP listeners route by.
type RouteTable struct {
	// VirtualHosts are the catalogue's, made by NewVirtualHost, in any order.
	VirtualHosts []*routev3.VirtualHost
	// Domain is the mesh domain.
	Domain string
	// AtCap says that no further unknown names may be asked for; they are answered
	// 503 by the table itself (I9).
	AtCap bool
}

// The virtual hosts of the table itself. No service has such a name.
const (
	refusedHost  = "|refused"
	catchAllHost = "|any"
)

// Routes builds the route table: the catalogue's names, what is refused of them,
// and a catch-all for the names it does not have: a mesh-shaped authority is its own
// cluster's name, asked for on demand, everything else is a 404, with nothing on the
// wire (dataplane decision 6).
//
// One virtual host refuses for all services. One for each would double the table's
// memory and the time of an update: with 3,000 services of two ports each, 190 ms of
// Envoy's main thread instead of 85.
func Routes(t RouteTable) *routev3.RouteConfiguration {
	hosts := make([]*routev3.VirtualHost, 0, len(t.VirtualHosts)+2)
	refused := &routev3.VirtualHost{Name: refusedHost, Routes: refuse(refusedRegex())}
	for _, h := range t.VirtualHosts {
		if len(h.GetRoutes()) > 0 {
			hosts = append(hosts, h)
		} else {
			refused.Domains = append(refused.GetDomains(), h.GetDomains()...)
		}
	}
	slices.SortFunc(hosts, func(a, b *routev3.VirtualHost) int { return cmp.Compare(a.GetName(), b.GetName()) })
	if len(refused.GetDomains()) > 0 {
		slices.Sort(refused.GetDomains())
		hosts = append(hosts, refused)
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
