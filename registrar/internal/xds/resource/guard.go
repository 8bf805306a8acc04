package resource

import (
	"strings"

	mutationrulesv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
)

// appRoutes is the route table of one port's inbound chain, with the guard of
// dataplane decision 3. The SNI has decided the port; the guard refuses what was
// meant for somebody else, with a response that the caller's Envoy retries
// elsewhere:
//
//   - own names pass without a port and with this port;
//   - every other authority under the mesh domain, own names with another port
//     among them, is a 421 (XDS-61);
//   - anything else (an IP address, a name of the application's own) passes.
//
// On the one chain of a single-port pod every SNI ends up here, so there the guard
// also looks at the SNI: absent or this port's, else 421.
func appRoutes(p Pod, number uint16) *routev3.RouteConfiguration {
	domains := make([]string, 0, 2*len(p.OwnNames))
	for _, name := range p.sortedNames() {
		domains = append(domains, name, name+":"+portText(number))
	}
	pass := appRoute(AppClusterName(p.ID, number))
	guarded := []*routev3.Route{pass}
	if p.single() {
		pass.Match.Headers = []*routev3.HeaderMatcher{serverNameMatch(number)}
		guarded = append(guarded, misdirected())
	}
	foreign := append([]*routev3.Route{
		misdirected(authorityMatch(&matcherv3.StringMatcher{
			MatchPattern: &matcherv3.StringMatcher_Suffix{Suffix: "." + p.Domain}, IgnoreCase: true,
		})),
		misdirected(authorityMatch(&matcherv3.StringMatcher{
			MatchPattern: &matcherv3.StringMatcher_Contains{Contains: "." + p.Domain + ":"}, IgnoreCase: true,
		})),
	}, guarded...)
	return &routev3.RouteConfiguration{
		Name: chainName(number),
		VirtualHosts: []*routev3.VirtualHost{
			{Name: "own", Domains: domains, Routes: guarded},
			{Name: "other", Domains: []string{"*"}, Routes: foreign},
		},
	}
}

// appRoute leads to the application. The mesh's own headers end here: those that
// the mesh or a liar put into the request, and a "not delivered" that the
// application makes up. The header is removed here and not for the whole table,
// because the table's removals come after a route's own additions.
func appRoute(cluster string) *routev3.Route {
	return &routev3.Route{
		Match: anyPath(),
		Action: &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster},
			Timeout:          duration(0),
		}},
		RequestHeadersToRemove:  []string{NotDeliveredHeader, serverNameHeader},
		ResponseHeadersToRemove: []string{NotDeliveredHeader},
	}
}

// misdirected answers 421 with the "not delivered" mark.
func misdirected(headers ...*routev3.HeaderMatcher) *routev3.Route {
	r := direct(421, "portolan: this request is for another port or another service\n")
	r.Match.Headers = headers
	r.ResponseHeadersToAdd = []*corev3.HeaderValueOption{notDelivered()}
	return r
}

// notServed is the route table of the chain for unserved SNI values.
func notServed() *routev3.RouteConfiguration {
	r := direct(503, "portolan: this pod does not serve the port\n")
	r.ResponseHeadersToAdd = []*corev3.HeaderValueOption{notDelivered()}
	return &routev3.RouteConfiguration{
		Name:         chainUnknown,
		VirtualHosts: []*routev3.VirtualHost{{Name: "any", Domains: []string{"*"}, Routes: []*routev3.Route{r}}},
	}
}

func notDelivered() *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: NotDeliveredHeader, Value: "1"},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// direct answers by itself.
func direct(status uint32, body string) *routev3.Route {
	return &routev3.Route{
		Match: anyPath(),
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{
			Status: status,
			Body:   &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: body}},
		}},
	}
}

// anyPath matches every path that Envoy forwards; it refuses the "*" of OPTIONS by
// itself.
func anyPath() *routev3.RouteMatch {
	return &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}}
}

func authorityMatch(m *matcherv3.StringMatcher) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{
		Name:                 ":authority",
		HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: m},
	}
}

// serverNameMatch admits the port's own SNI values, and a connection without SNI.
func serverNameMatch(number uint16) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{
		Name:                      serverNameHeader,
		HeaderMatchSpecifier:      &routev3.HeaderMatcher_StringMatch{StringMatch: regex(serverNameRegex(number))},
		TreatMissingHeaderAsEmpty: true,
	}
}

// serverNameRegex matches the whole header value (XDS-49).
func serverNameRegex(number uint16) string {
	return "(" + strings.Join(serverNames(number), "|") + ")?"
}

func regex(expression string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_SafeRegex{
		SafeRegex: &matcherv3.RegexMatcher{Regex: expression},
	}}
}

// exposeServerName puts the connection's SNI into a header before routes are
// looked up. The client's own header goes first: without SNI nothing is added, and
// what it sent would stay.
func exposeServerName() *corev3.TypedExtensionConfig {
	return extension("envoy.http.early_header_mutation.header_mutation", &headermutationv3.HeaderMutation{
		Mutations: []*mutationrulesv3.HeaderMutation{
			{Action: &mutationrulesv3.HeaderMutation_Remove{Remove: serverNameHeader}},
			{Action: &mutationrulesv3.HeaderMutation_Append{Append: &corev3.HeaderValueOption{
				Header:       &corev3.HeaderValue{Key: serverNameHeader, Value: "%REQUESTED_SERVER_NAME%"},
				AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}}},
		},
	})
}
