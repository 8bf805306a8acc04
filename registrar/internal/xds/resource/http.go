package resource

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	preservecasev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/header_formatters/preserve_case/v3"
	upstreamhttpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/portolan-mesh/portolan/api/port"
)

const (
	// maxHeadersKB and maxHeaders are the same on every hop, so that a message that
	// enters the mesh also leaves it. Envoy's 60 KiB and 100 headers are tighter than
	// what common servers accept.
	maxHeadersKB = 256
	maxHeaders   = 1000
	// serverIdle and clientIdle end idle mesh connections. The client side gives up
	// first, so that it never sends a request on a connection that is being closed.
	serverIdle = time.Hour
	clientIdle = 10 * time.Minute
	// appIdle ends idle connections to the application. It is shorter than the
	// keep-alive of common servers (2-5 s) for the same reason; a new loopback
	// connection costs some 50 us.
	appIdle = time.Second
	// connectionAge renews a mesh connection, so that none lives on after the
	// certificate that opened it (24 h, rotated at half-life). Requests in flight finish.
	connectionAge = time.Hour
	// routerName is the last filter of every HTTP chain.
	routerName = "envoy.filters.http.router"
	// upstreamOptions is the key of a cluster's HTTP options.
	upstreamOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
)

// connectionManager returns what every HTTP chain of the mesh has in common: a
// proxy that changes nothing it need not change.
func connectionManager(statPrefix string) *hcmv3.HttpConnectionManager {
	return &hcmv3.HttpConnectionManager{
		StatPrefix: statPrefix,
		CodecType:  hcmv3.HttpConnectionManager_AUTO,
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{
			IdleTimeout:     duration(serverIdle),
			MaxHeadersCount: u32(maxHeaders),
		},
		HttpProtocolOptions:  http1Options(),
		Http2ProtocolOptions: http2Options(),
		MaxRequestHeadersKb:  u32(maxHeadersKB),
		// A quiet gRPC or WebSocket stream is nobody's fault. A dead peer is found by
		// TCP keepalive, a peer that reads nothing any more by the flush timeout.
		StreamIdleTimeout:  duration(0),
		StreamFlushTimeout: duration(5 * time.Minute),
		// Nobody is internal to Envoy's mind: it then drops x-envoy-retry-on,
		// x-envoy-upstream-rq-timeout-ms and their like, with which an application
		// could steer the router.
		InternalAddressConfig: &hcmv3.HttpConnectionManager_InternalAddressConfig{},
		// x-forwarded-for and x-request-id are the applications' own.
		UseRemoteAddress:           boolean(false),
		SkipXffAppend:              true,
		GenerateRequestId:          boolean(false),
		PreserveExternalRequestId:  true,
		ServerHeaderTransformation: hcmv3.HttpConnectionManager_PASS_THROUGH,
		// The application answers Expect: 100-continue, and reads the path as it was sent.
		Proxy_100Continue:            true,
		NormalizePath:                boolean(false),
		MergeSlashes:                 false,
		PathWithEscapedSlashesAction: hcmv3.HttpConnectionManager_KEEP_UNCHANGED,
		// svc.domain.:9090 is svc.domain:9090 (XDS-64). The port stays: it is the selector.
		StripTrailingHostDot: true,
		UpgradeConfigs:       []*hcmv3.HttpConnectionManager_UpgradeConfig{{UpgradeType: "websocket"}},
		HttpFilters:          []*hcmv3.HttpFilter{routerFilter()},
	}
}

// routerFilter forwards without Envoy's own headers (x-envoy-upstream-service-time
// and the like) in either direction.
func routerFilter() *hcmv3.HttpFilter {
	return httpFilter(routerName, pack(&routerv3.Router{SuppressEnvoyHeaders: true}))
}

func httpFilter(name string, config *anypb.Any) *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: config}}
}

func networkFilter(name string, config *anypb.Any) *listenerv3.Filter {
	return &listenerv3.Filter{Name: name, ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: config}}
}

// http1Options keep what HTTP/1 peers may rely on: the case of header names, the
// reason phrase, trailers, HTTP/1.0. Some clients offer "Upgrade: TLS/1.2" on every
// request; a proxy that does not know it has to ignore it.
func http1Options() *corev3.Http1ProtocolOptions {
	return &corev3.Http1ProtocolOptions{
		AcceptHttp_10:  true,
		EnableTrailers: true,
		HeaderKeyFormat: &corev3.Http1ProtocolOptions_HeaderKeyFormat{
			HeaderFormat: &corev3.Http1ProtocolOptions_HeaderKeyFormat_StatefulFormatter{
				StatefulFormatter: extension("envoy.http.stateful_header_formatters.preserve_case",
					&preservecasev3.PreserveCaseFormatterConfig{ForwardReasonPhrase: true}),
			},
		},
		IgnoreHttp_11Upgrade: []*matcherv3.StringMatcher{{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: "TLS/"}}},
	}
}

// http2Options let WebSocket cross an HTTP/2 hop (RFC 8441), and make a malformed
// message the failure of its own stream, not of the pooled connection. A header
// field may be as large as all fields together: Envoy's own 64 KiB would end the
// connection, with all its streams.
func http2Options() *corev3.Http2ProtocolOptions {
	return &corev3.Http2ProtocolOptions{
		AllowConnect:                            true,
		OverrideStreamErrorOnInvalidHttpMessage: boolean(true),
		MaxHeaderFieldSizeKb:                    u32(maxHeadersKB),
	}
}

// clientOptions are the HTTP options of a cluster.
type clientOptions struct {
	protocol port.Protocol
	idle     time.Duration
	age      time.Duration // 0: no bound
	retry    *routev3.RetryPolicy
}

// pack returns the cluster's extension options. An http port is called in the
// protocol that its client speaks: HTTP/1.1 stays HTTP/1.1 and h2c stays HTTP/2, on
// the mesh hop and to the application (dataplane decision 7). An h2 port is called
// in HTTP/2 whatever the client speaks. A tcp port has no such options.
//
// HTTP/2 on the mesh hop alone was measured: for one request after the other it
// costs Envoy a tenth more processor time than HTTP/1.1, for eight at once a quarter
// less. Neither decides; that an HTTP/1.1 application meets what its client sent,
// upgrades among it, does.
func (o clientOptions) pack() map[string]*anypb.Any {
	if o.protocol.Class() != port.ClassHTTP {
		return nil
	}
	common := &corev3.HttpProtocolOptions{
		IdleTimeout:          duration(o.idle),
		MaxHeadersCount:      u32(maxHeaders),
		MaxResponseHeadersKb: u32(maxHeadersKB),
	}
	if o.age > 0 {
		common.MaxConnectionDuration = duration(o.age)
	}
	options := &upstreamhttpv3.HttpProtocolOptions{CommonHttpProtocolOptions: common, RetryPolicy: o.retry}
	if o.protocol == port.H2 {
		options.UpstreamProtocolOptions = &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{Http2ProtocolOptions: http2Options()},
			},
		}
	} else {
		options.UpstreamProtocolOptions = &upstreamhttpv3.HttpProtocolOptions_UseDownstreamProtocolConfig{
			UseDownstreamProtocolConfig: &upstreamhttpv3.HttpProtocolOptions_UseDownstreamHttpConfig{
				HttpProtocolOptions:  http1Options(),
				Http2ProtocolOptions: http2Options(),
			},
		}
	}
	return map[string]*anypb.Any{upstreamOptions: pack(options)}
}
