package resource

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

const (
	// fetchTimeout bounds how long a listener or cluster waits for its first secret
	// or load assignment. While a cluster waits Envoy holds back every other cluster
	// of the stream, 15 s by default (XDS-D8, dataplane T5).
	fetchTimeout = time.Second
	// onDemandTimeout bounds how long a request waits for a cluster that Envoy does
	// not have. Every name is answered at once, with a tombstone at worst, so it
	// runs out only when the registrar is away; it is long enough for a registrar
	// that restarts.
	onDemandTimeout = 5 * time.Second
	// reconnectBase and reconnectMax bound the pause before Envoy opens a lost xDS
	// stream again. Its own maximum of 30 s would leave a node deaf to drains long
	// after the registrar is back (MESH-33).
	reconnectBase = 50 * time.Millisecond
	reconnectMax  = time.Second
)

// adsSource points at the aggregated stream. Secrets and load assignments use this
// one value everywhere: Envoy 1.40 never delivers a secret that two references ask
// for with different bytes (dataplane decision 4).
func adsSource() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		ResourceApiVersion:    corev3.ApiVersion_V3,
		InitialFetchTimeout:   duration(fetchTimeout),
	}
}

// onDemandSource points at the delta CDS stream of its own that carries on-demand
// clusters: there a cluster of the aggregated stream that warms holds nobody back
// (XDS-D2). The value is the same in every listener.
func onDemandSource() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_ApiConfigSource{ApiConfigSource: apiSource(corev3.ApiConfigSource_DELTA_GRPC)},
		ResourceApiVersion:    corev3.ApiVersion_V3,
	}
}

// apiSource is a gRPC stream to the registrar.
func apiSource(kind corev3.ApiConfigSource_ApiType) *corev3.ApiConfigSource {
	return &corev3.ApiConfigSource{
		ApiType:                   kind,
		TransportApiVersion:       corev3.ApiVersion_V3,
		SetNodeOnFirstMessageOnly: true,
		GrpcServices: []*corev3.GrpcService{{
			TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{
				ClusterName: XDSCluster,
				// The cluster's name is no valid authority.
				Authority: "registrar",
				RetryPolicy: &corev3.RetryPolicy{RetryBackOff: &corev3.BackoffStrategy{
					BaseInterval: duration(reconnectBase),
					MaxInterval:  duration(reconnectMax),
				}},
			}},
		}},
	}
}
