package resource

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	commonfilterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/set_filter_state/v3"
	ondemandv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/on_demand/v3"
	httpinspectorv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/http_inspector/v3"
	originaldstv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/original_dst/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	setfilterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/set_filter_state/v3"
	tcpproxyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/tcp_proxy/v3"
)

const (
	// sniffTimeout closes a connection to 15001 that has sent nothing. Some HTTP
	// clients connect long before their first request, so it is not shorter.
	sniffTimeout = 15 * time.Second
	// tcpAttempts bounds how many endpoints a TCP connection tries. Nothing of the
	// client's bytes is sent before one of them accepts the handshake. The proxy cannot
	// leave out the endpoints that it tried, and with many connections at once the
	// balancer may pick a stale one again and again: of two endpoints one being stale,
	// three attempts failed one connection in fifty.
	tcpAttempts = hostPicks

	httpInspector  = "envoy.filters.listener.http_inspector"
	originalDst    = "envoy.filters.listener.original_dst"
	setFilterState = "envoy.filters.network.set_filter_state"
	onDemandName   = "envoy.filters.http.on_demand"
)

// OutboundHTTP builds the listener for the pod's captured HTTP connections. The
// request's authority decides, not the address that was dialled. A connection whose
// first bytes are no HTTP matches no chain and is closed, so that a raw TCP client
// never finds an HTTP response in its stream.
func OutboundHTTP(p Pod) (*listenerv3.Listener, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	hcm := connectionManager("out_http")
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{
		RouteConfigName: RoutesName,
		ConfigSource:    adsSource(),
	}}
	// The on_demand filter pauses a request whose route names a cluster that Envoy
	// does not have, and asks for it.
	onDemand := httpFilter(onDemandName, pack(&ondemandv3.OnDemand{
		Odcds: &ondemandv3.OnDemandCds{Source: onDemandSource(), Timeout: duration(absence)},
	}))
	hcm.HttpFilters = append([]*hcmv3.HttpFilter{onDemand}, hcm.GetHttpFilters()...)
	hcm.LocalReplyConfig = unansweredReplies()

	l := outbound(p, OutboundHTTPListener(p.ID), OutboundHTTPPort)
	l.StatPrefix = "out_http"
	l.ListenerFilters = []*listenerv3.ListenerFilter{{
		Name:       httpInspector,
		ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: pack(&httpinspectorv3.HttpInspector{})},
	}}
	l.ListenerFiltersTimeout = duration(sniffTimeout)
	l.FilterChains = []*listenerv3.FilterChain{{
		Name:             "http",
		FilterChainMatch: &listenerv3.FilterChainMatch{ApplicationProtocols: []string{"http/1.0", "http/1.1", "h2c"}},
		Filters:          []*listenerv3.Filter{identityFilter(p), networkFilter(hcmName, pack(hcm))},
	}}
	return l, nil
}

// unansweredReplies say why a request for a cluster that Envoy does not have was refused:
// the registrar answers every name, so it was away for as long as the request waited.
func unansweredReplies() *hcmv3.LocalReplyConfig {
	reason := "%REQ(:AUTHORITY)%: Envoy does not know where it is, and this node's registrar does not answer: look whether it runs, and into its log\n"
	return &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{{
		Filter: repliesFor("NC"),
		BodyFormatOverride: &corev3.SubstitutionFormatString{Format: &corev3.SubstitutionFormatString_TextFormatSource{
			TextFormatSource: &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: reason}},
		}},
	}}}
}

// OutboundTCP builds the listener for the pod's captured connections to tcp ports.
// The address that was dialled, VIP:port, is the cluster's name, asked for on
// demand; nothing is read from the client before, so protocols in which the server
// speaks first, or the client speaks little, just work (XDS-26).
func OutboundTCP(p Pod) (*listenerv3.Listener, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	proxy := tcpProxy("out_tcp", noCluster)
	proxy.MaxConnectAttempts = u32(tcpAttempts)
	proxy.OnDemand = &tcpproxyv3.TcpProxy_OnDemand{OdcdsConfig: onDemandSource(), Timeout: duration(absence)}

	l := outbound(p, OutboundTCPListener(p.ID), OutboundTCPPort)
	l.StatPrefix = "out_tcp"
	l.ListenerFilters = []*listenerv3.ListenerFilter{{
		Name:       originalDst,
		ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: pack(&originaldstv3.OriginalDst{})},
	}}
	l.FilterChains = []*listenerv3.FilterChain{{
		Name:             "tcp",
		FilterChainMatch: &listenerv3.FilterChainMatch{PrefixRanges: cidrs(p.VIPRanges)},
		Filters:          []*listenerv3.Filter{identityFilter(p), destinationFilter(), networkFilter(tcpProxyName, pack(proxy))},
	}}
	return l, nil
}

// outbound listens on the pod's loopback addresses. Freebind: a pod whose IPv6 is
// switched off would else lose the whole listener for ::1.
func outbound(p Pod, name string, number uint32) *listenerv3.Listener {
	l := &listenerv3.Listener{
		Name:             name,
		Address:          address(inNetns(p.Netns, "127.0.0.1", number)),
		TrafficDirection: corev3.TrafficDirection_OUTBOUND,
		Freebind:         boolean(true),
	}
	if p.IPv6 {
		l.AdditionalAddresses = []*listenerv3.AdditionalAddress{{Address: address(inNetns(p.Netns, "::1", number))}}
	}
	return l
}

// identityFilter names the certificate that the pod's connections are made with.
// The value must be hashable: only then is it part of the key of a connection
// pool; otherwise one pod's requests ride on another's connections (MESH-45).
func identityFilter(p Pod) *listenerv3.Filter {
	return stateFilter(&commonfilterstatev3.FilterStateValue{
		Key:                &commonfilterstatev3.FilterStateValue_ObjectKey{ObjectKey: identityKey},
		FactoryKey:         "envoy.hashable_string",
		Value:              text(OutboundSecret(p.Identity)),
		SharedWithUpstream: commonfilterstatev3.FilterStateValue_ONCE,
	})
}

// destinationFilter names the cluster after the address that was dialled.
func destinationFilter() *listenerv3.Filter {
	return stateFilter(&commonfilterstatev3.FilterStateValue{
		Key:   &commonfilterstatev3.FilterStateValue_ObjectKey{ObjectKey: "envoy.tcp_proxy.cluster"},
		Value: text("%DOWNSTREAM_LOCAL_ADDRESS%"),
	})
}

func stateFilter(v *commonfilterstatev3.FilterStateValue) *listenerv3.Filter {
	return networkFilter(setFilterState, pack(&setfilterstatev3.Config{OnNewConnection: []*commonfilterstatev3.FilterStateValue{v}}))
}

func text(format string) *commonfilterstatev3.FilterStateValue_FormatString {
	return &commonfilterstatev3.FilterStateValue_FormatString{FormatString: &corev3.SubstitutionFormatString{
		Format: &corev3.SubstitutionFormatString_TextFormatSource{TextFormatSource: &corev3.DataSource{
			Specifier: &corev3.DataSource_InlineString{InlineString: format},
		}},
	}}
}

// cidrs returns the ranges ascending, each once.
func cidrs(ranges []netip.Prefix) []*corev3.CidrRange {
	sorted := slices.SortedFunc(slices.Values(ranges), func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	var out []*corev3.CidrRange
	for _, r := range slices.Compact(sorted) {
		out = append(out, &corev3.CidrRange{AddressPrefix: r.Masked().Addr().String(), PrefixLen: u32(uint32(r.Bits()))})
	}
	return out
}
