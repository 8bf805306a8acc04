package resource

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

const (
	// fetchTimeout bounds how long a listener waits for its first secret or its routes,
	// and a cluster for the trust domain's bundle (XDS-D8, dataplane T5).
	fetchTimeout = time.Second
	// absence bounds how long what only the registrar can answer waits for it: a request
	// for a cluster that Envoy does not have, and such a cluster for its first load
	// assignment. Every name is answered at once, with a tombstone or an empty assignment
	// at worst, so it runs out only when the registrar is away; it is longer than the
	// registrar's pod takes to be replaced on a busy node. That Envoy takes no other
	// cluster of the aggregated stream meanwhile (XDS-D1) costs nothing: nobody gives one.
	absence = 15 * time.Second
	// reconnectBase and reconnectMax bound the pause before Envoy opens a lost xDS
	// stream again. Its own maximum of 30 s would leave a node deaf to drains long
	// after the registrar is back (MESH-33).
	reconnectBase = 50 * time.Millisecond
	reconnectMax  = time.Second
)

// adsSource points at the aggregated stream. Secrets use this one value everywhere:
// Envoy 1.40 never delivers a secret that two references ask for with different bytes
// (dataplane decision 4).
func adsSource() *corev3.ConfigSource {
	return aggregated(fetchTimeout)
}

// assignmentSource points at the aggregated stream for load assignments. A cluster that
// Envoy got before the registrar ended, or before the aggregated stream is back, waits:
// without endpoints it would refuse the request that asked for it.
func assignmentSource() *corev3.ConfigSource {
	return aggregated(absence)
}

// aggregated is the aggregated stream, with the time that a first answer may take.
func aggregated(first time.Duration) *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		ResourceApiVersion:    corev3.ApiVersion_V3,
		InitialFetchTimeout:   duration(first),
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
