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
			names = append(names, p.Service.TCPServerName(pt.Number))
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

// singleMatcher lets a single-port HTTP pod's only chain serve everybody but raw
// TCP peers of another port: an SNI that is not the port's, from a peer that offers
// no ALPN. Such a peer's stale endpoint leads here when the address was given to
// this pod; it matches nothing and is closed before the handshake, while the chain
// would let a server-first protocol wait for ever and answer others with an HTTP
// 400 (I1). Everybody else's wrong SNI is the guard's affair.
func singleMatcher(p Pod) *xdsmatcherv3.Matcher {
	number := p.Ports[0].Number
	return &xdsmatcherv3.Matcher{MatcherType: &xdsmatcherv3.Matcher_MatcherList_{MatcherList: &xdsmatcherv3.Matcher_MatcherList{
		Matchers: []*xdsmatcherv3.Matcher_MatcherList_FieldMatcher{{
			Predicate: anyOf(
				not(present(serverNameInput())),
				matches(serverNameInput(), serverNameRegex(number)),
				present(alpnInput()),
			),
			OnMatch: useChain(chainName(number)),
		}},
	}}}
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
	return matches(input, presentRegex)
}

// presentRegex matches every value but the empty one.
const presentRegex = ".+"

// matches holds when the input is there and matches as a whole. An input that is
// absent matches nothing, not even an empty expression.
func matches(input *xdscorev3.TypedExtensionConfig, expression string) *xdsmatcherv3.Matcher_MatcherList_Predicate {
	return &xdsmatcherv3.Matcher_MatcherList_Predicate{
		MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_{
			SinglePredicate: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate{
				Input: input,
				Matcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{ValueMatch: &xdsmatcherv3.StringMatcher{
					// The engine must be named here, though it is the only one: Envoy rejects the
					// whole LDS response without it.
					MatchPattern: &xdsmatcherv3.StringMatcher_SafeRegex{SafeRegex: &xdsmatcherv3.RegexMatcher{
						Regex:      expression,
						EngineType: &xdsmatcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &xdsmatcherv3.RegexMatcher_GoogleRE2{}},
					}},
				}},
			},
		},
	}
}

func not(p *xdsmatcherv3.Matcher_MatcherList_Predicate) *xdsmatcherv3.Matcher_MatcherList_Predicate {
	return &xdsmatcherv3.Matcher_MatcherList_Predicate{
		MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: p},
	}
}

func anyOf(predicates ...*xdsmatcherv3.Matcher_MatcherList_Predicate) *xdsmatcherv3.Matcher_MatcherList_Predicate {
	return &xdsmatcherv3.Matcher_MatcherList_Predicate{
		MatchType: &xdsmatcherv3.Matcher_MatcherList_Predicate_OrMatcher{
			OrMatcher: &xdsmatcherv3.Matcher_MatcherList_Predicate_PredicateList{Predicate: predicates},
		},
	}
}

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
