package resource

import (
	xdscorev3 "github.com/cncf/xds/go/xds/core/v3"
	xdsmatcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	networkinputsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/matching/common_inputs/network/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/portolan-mesh/portolan/api/port"
)

// chainMatcher selects the filter chain by name (dataplane section 3). Only this
// form can tell an unserved SNI from an absent one; server_names would send both
// to the default port.
//
//	served SNI             -> the port's chain
//	other SNI, with ALPN   -> unknown: an HTTP 503
//	other SNI, no ALPN     -> reset: closed
//	no SNI                 -> the default port's chain
func chainMatcher(p Pod) *xdsmatcherv3.Matcher {
	served := make(map[string]*xdsmatcherv3.Matcher_OnMatch)
	for _, pt := range p.Ports {
		names := serverNames(pt.Number)
		if pt.Protocol.Class() == port.ClassTCP {
			names = append(names, TCPServerName(pt.Number, p.Service))
		}
		for _, name := range names {
			served[name] = useChain(chainName(pt.Number))
		}
	}
	unserved := &xdsmatcherv3.Matcher_MatcherList{Matchers: []*xdsmatcherv3.Matcher_MatcherList_FieldMatcher{
		{Predicate: both(present(serverNameInput()), present(alpnInput())), OnMatch: useChain(chainUnknown)},
		{Predicate: present(serverNameInput()), OnMatch: useChain(chainReset)},
	}}
	return &xdsmatcherv3.Matcher{
		MatcherType: &xdsmatcherv3.Matcher_MatcherTree_{MatcherTree: &xdsmatcherv3.Matcher_MatcherTree{
			Input:    serverNameInput(),
			TreeType: &xdsmatcherv3.Matcher_MatcherTree_ExactMatchMap{ExactMatchMap: &xdsmatcherv3.Matcher_MatcherTree_MatchMap{Map: served}},
		}},
		OnNoMatch: &xdsmatcherv3.Matcher_OnMatch{OnMatch: &xdsmatcherv3.Matcher_OnMatch_Matcher{Matcher: &xdsmatcherv3.Matcher{
			MatcherType: &xdsmatcherv3.Matcher_MatcherList_{MatcherList: unserved},
			OnNoMatch:   useChain(chainName(p.Default)),
		}}},
	}
}

// useChain selects the chain of that name.
func useChain(name string) *xdsmatcherv3.Matcher_OnMatch {
	return &xdsmatcherv3.Matcher_OnMatch{OnMatch: &xdsmatcherv3.Matcher_OnMatch_Action{
		Action: matchExtension(name, wrapperspb.String(name)),
	}}
}

func serverNameInput() *xdscorev3.TypedExtensionConfig {
	return matchExtension("sni", &networkinputsv3.ServerNameInput{})
}

func alpnInput() *xdscorev3.TypedExtensionConfig {
	return matchExtension("alpn", &networkinputsv3.ApplicationProtocolInput{})
}

// present matches any value that is there and not empty.
func present(input *xdscorev3.TypedExtensionConfig) *xdsmatcherv3.Matcher_MatcherList_Predicate {
	return &xdsmatcherv3.Matcher_MatcherList_Predicate{
		MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_{
			SinglePredicate: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate{
				Input: input,
				Matcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{ValueMatch: &xdsmatcherv3.StringMatcher{
					// The engine must be named here, though it is the only one: Envoy rejects the
					// whole LDS response without it.
					MatchPattern: &xdsmatcherv3.StringMatcher_SafeRegex{SafeRegex: &xdsmatcherv3.RegexMatcher{
						Regex:      presentRegex,
						EngineType: &xdsmatcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &xdsmatcherv3.RegexMatcher_GoogleRE2{}},
					}},
				}},
			},
		},
	}
}

// presentRegex matches every value but the empty one.
const presentRegex = ".+"

func both(a, b *xdsmatcherv3.Matcher_MatcherList_Predicate) *xdsmatcherv3.Matcher_MatcherList_Predicate {
	return &xdsmatcherv3.Matcher_MatcherList_Predicate{
		MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_AndMatcher{
			AndMatcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_PredicateList{
				Predicate: []*xdsmatcherv3.Matcher_MatcherList_Predicate{a, b},
			},
		},
	}
}

func matchExtension(name string, m proto.Message) *xdscorev3.TypedExtensionConfig {
	return &xdscorev3.TypedExtensionConfig{Name: name, TypedConfig: pack(m)}
}
