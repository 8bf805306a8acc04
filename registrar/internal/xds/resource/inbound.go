package resource

import (
	"fmt"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	tlsinspectorv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/tls_inspector/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tcpproxyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/tcp_proxy/v3"

	"github.com/portolan-mesh/portolan/api/port"
)

const (
	// handshakeTimeout bounds a connection's way to its filter chain and through its
	// TLS handshake. A TLS client speaks first, whatever its application's protocol
	// does, so only a stranger can be silent that long, and nothing is lost by
	// closing it (XDS-26).
	handshakeTimeout = 10 * time.Second

	tlsInspector = "envoy.filters.listener.tls_inspector"
	hcmName      = "envoy.filters.network.http_connection_manager"
	tcpProxyName = "envoy.filters.network.tcp_proxy"
)

// httpALPN are the protocols of every chain that carries HTTP. What a peer offers
// does not choose the chain; only a peer that offers nothing cannot be answered in
// HTTP where no chain fits.
func httpALPN() []string { return []string{"h2", "http/1.1"} }

// Inbound builds the pod's inbound listener: mTLS on 15008 of every address of the
// pod, one filter chain per served port, selected by SNI. A pure client has none;
// asking for it is an error.
//
// A single-port HTTP pod has one chain, which serves every SNI of an HTTP peer, and
// whose guard refuses the wrong ones. Every other pod selects chains by name: served
// SNI, no SNI (default port), unserved SNI with ALPN (503), unserved SNI without
// (closed). Between the two forms, and with every port added or removed,
// only filter_chains and filter_chain_matcher differ, so that Envoy updates the
// listener in place and streams on other ports go on (XDS-58).
func Inbound(p Pod) (*listenerv3.Listener, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if len(p.Ports) == 0 {
		return nil, fmt.Errorf("pod %s serves no port: it has no inbound listener", p.ID)
	}
	l := &listenerv3.Listener{
		Name:             InboundListener(p.ID),
		Address:          inboundAddress(p),
		StatPrefix:       "in",
		TrafficDirection: corev3.TrafficDirection_INBOUND,
		// Explicit: Envoy does not add the inspector by itself here, and without it no
		// chain ever sees an SNI.
		ListenerFilters: []*listenerv3.ListenerFilter{{
			Name:       tlsInspector,
			ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: pack(&tlsinspectorv3.TlsInspector{})},
		}},
		ListenerFiltersTimeout: duration(handshakeTimeout),
		TcpKeepalive:           keepalive(),
		SocketOptions:          deadPeer(),
	}
	for _, pt := range p.sortedPorts() {
		l.FilterChains = append(l.FilterChains, portChain(p, pt))
	}
	if p.single() {
		l.FilterChainMatcher = singleMatcher(p)
		return l, nil
	}
	l.FilterChains = append(l.FilterChains, unknownChain(p), resetChain(p))
	l.FilterChainMatcher = chainMatcher(p)
	return l, nil
}

// inboundAddress is one socket for both families, or an IPv4 one.
func inboundAddress(p Pod) *corev3.Address {
	if !p.IPv6 {
		return address(inNetns(p.Netns, "0.0.0.0", InboundPort))
	}
	a := inNetns(p.Netns, "::", InboundPort)
	a.Ipv4Compat = true
	return address(a)
}

// portChain leads to one port of the application.
func portChain(p Pod, pt port.Port) *listenerv3.FilterChain {
	if pt.Protocol.Class() == port.ClassTCP {
		proxy := tcpProxy("in_tcp", AppClusterName(p.ID, pt.Number))
		return mtlsChain(p, chain{name: chainName(pt.Number), filters: []*listenerv3.Filter{networkFilter(tcpProxyName, pack(proxy))}})
	}
	hcm := connectionManager("in_http")
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: appRoutes(p, pt.Number)}
	// x-forwarded-client-cert says who called, from this connection's certificate and
	// from nothing else.
	hcm.ForwardClientCertDetails = hcmv3.HttpConnectionManager_SANITIZE_SET
	hcm.SetCurrentClientCertDetails = &hcmv3.HttpConnectionManager_SetCurrentClientCertDetails{Uri: true}
	hcm.LocalReplyConfig = notDeliveredReplies()
	if p.single() {
		hcm.EarlyHeaderMutationExtensions = []*corev3.TypedExtensionConfig{exposeServerName()}
	}
	return mtlsChain(p, chain{
		name:    chainName(pt.Number),
		filters: []*listenerv3.Filter{networkFilter(hcmName, pack(hcm))},
		alpn:    httpALPN(),
	})
}

// unknownChain answers HTTP peers that ask for a port the pod does not serve. One
// request per connection: a pooled connection would stay on this chain after the
// port was added, and go on answering 503.
func unknownChain(p Pod) *listenerv3.FilterChain {
	hcm := connectionManager("in_unknown")
	hcm.CommonHttpProtocolOptions.MaxRequestsPerConnection = u32(1)
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: notServed()}
	return mtlsChain(p, chain{
		name:    chainUnknown,
		filters: []*listenerv3.Filter{networkFilter(hcmName, pack(hcm))},
		alpn:    httpALPN(),
	})
}

// resetChain closes connections to a port that the pod does not serve whose peer
// offers no ALPN: a raw TCP client must not find an HTTP response in its stream.
func resetChain(p Pod) *listenerv3.FilterChain {
	return mtlsChain(p, chain{name: chainReset})
}

// chain is what differs between two chains of one pod.
type chain struct {
	name    string
	filters []*listenerv3.Filter
	alpn    []string
}

func mtlsChain(p Pod, c chain) *listenerv3.FilterChain {
	return &listenerv3.FilterChain{
		Name:                          c.name,
		Filters:                       c.filters,
		TransportSocket:               serverTLS(p.Identity, c.alpn...),
		TransportSocketConnectTimeout: duration(handshakeTimeout),
	}
}

// notDeliveredReplies marks the responses that Envoy makes because it could not
// hand the request to the application: connection failed, no cluster, no host, no
// room. Nothing of the request was delivered then.
func notDeliveredReplies() *hcmv3.LocalReplyConfig {
	return &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{{
		Filter:       repliesFor("NC", "UF", "UH", "UO"),
		HeadersToAdd: []*corev3.HeaderValueOption{notDelivered()},
	}}}
}

// repliesFor selects the responses that Envoy makes for one of these reasons.
func repliesFor(flags ...string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ResponseFlagFilter{
		ResponseFlagFilter: &accesslogv3.ResponseFlagFilter{Flags: flags},
	}}
}

// tcpProxy forwards bytes to one cluster for as long as either side likes. Dead
// peers are found by TCP keepalive.
func tcpProxy(statPrefix, cluster string) *tcpproxyv3.TcpProxy {
	return &tcpproxyv3.TcpProxy{
		StatPrefix:       statPrefix,
		ClusterSpecifier: &tcpproxyv3.TcpProxy_Cluster{Cluster: cluster},
		IdleTimeout:      duration(0),
	}
}
