package resource

import (
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_mappers/filter_state_override/v3"
	ondemandsecretv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_selectors/on_demand_secret/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	tlsSocket = "envoy.transport_sockets.tls"
	// identityKey is the filter state from which the on-demand selector takes the
	// name of the client certificate.
	identityKey = "envoy.tls.certificate_mappers.on_demand_secret"
)

// serverTLS terminates the mesh's mTLS with the pod's certificate, for whoever has one of
// the pod's trust domain. It resumes nothing: a resumed session would outlive the bundle
// that admitted it. alpn is empty on chains that carry no HTTP.
func serverTLS(id model.Identity, alpn ...string) *corev3.TransportSocket {
	common := commonTLS(id.TrustDomain, &matcherv3.StringMatcher{
		MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: "spiffe://" + id.TrustDomain + "/"},
	})
	common.AlpnProtocols = alpn
	common.TlsCertificateSdsSecretConfigs = []*tlsv3.SdsSecretConfig{{Name: InboundSecret(id), SdsConfig: adsSource()}}
	return &corev3.TransportSocket{Name: tlsSocket, ConfigType: &corev3.TransportSocket_TypedConfig{
		TypedConfig: pack(&tlsv3.DownstreamTlsContext{
			CommonTlsContext:                 common,
			RequireClientCertificate:         boolean(true),
			DisableStatefulSessionResumption: true,
			SessionTicketKeysType:            &tlsv3.DownstreamTlsContext_DisableStatelessSessionResumption{DisableStatelessSessionResumption: true},
		}),
	}}
}

// clientTLS opens mTLS to a service with the certificate of whoever calls, which
// Envoy holds by then (CertificateCluster): the selector reads the secret's name from the
// connection, so the cluster carries no trace of local pods, and a pool serves one
// identity only (dataplane decision 4, MESH-16, MESH-45). The server must have one
// of the service's identities; sni selects the port and proves nothing (I7). ALPN
// is left to Envoy, which offers the protocol that the pool speaks.
func clientTLS(c ServiceCluster) *corev3.TransportSocket {
	return callerTLS(c.TrustDomain, c.SNI, slices.Compact(slices.Sorted(slices.Values(c.Identities))))
}

// holdingTLS has Envoy fetch the certificate of an identity as soon as it has the cluster,
// and keep it as long. A selector does it, because Envoy gives what one selector holds to
// the others, but not what a plain reference holds. Were there a connection, port 0 is
// nobody's.
func holdingTLS(id model.Identity) *corev3.TransportSocket {
	return callerTLS(id.TrustDomain, "0", []string{id.SPIFFE()}, OutboundSecret(id))
}

// callerTLS is mTLS to a server that has one of the URI SANs. All selectors have one
// source, or they would not share what they hold.
func callerTLS(trustDomain, sni string, uris []string, held ...string) *corev3.TransportSocket {
	matchers := make([]*matcherv3.StringMatcher, 0, len(uris))
	for _, uri := range uris {
		matchers = append(matchers, &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: uri}})
	}
	common := commonTLS(trustDomain, matchers...)
	common.CustomTlsCertificateSelector = extension("envoy.tls.certificate_selectors.on_demand_secret", &ondemandsecretv3.Config{
		ConfigSource: adsSource(),
		CertificateMapper: extension("envoy.tls.upstream_certificate_mappers.filter_state_override",
			&filterstatev3.Config{DefaultValue: noIdentity}),
		PrefetchSecretNames: held,
	})
	return &corev3.TransportSocket{Name: tlsSocket, ConfigType: &corev3.TransportSocket_TypedConfig{
		TypedConfig: pack(&tlsv3.UpstreamTlsContext{
			CommonTlsContext: common,
			Sni:              sni,
			// A session must not be resumed under another identity.
			MaxSessionKeys: u32(0),
		}),
	}}
}

// commonTLS is TLS 1.3 with the trust domain's bundle and the given URI SANs.
func commonTLS(trustDomain string, uris ...*matcherv3.StringMatcher) *tlsv3.CommonTlsContext {
	sans := make([]*tlsv3.SubjectAltNameMatcher, 0, len(uris))
	for _, uri := range uris {
		sans = append(sans, &tlsv3.SubjectAltNameMatcher{SanType: tlsv3.SubjectAltNameMatcher_URI, Matcher: uri})
	}
	return &tlsv3.CommonTlsContext{
		TlsParams: &tlsv3.TlsParameters{
			TlsMinimumProtocolVersion: tlsv3.TlsParameters_TLSv1_3,
			TlsMaximumProtocolVersion: tlsv3.TlsParameters_TLSv1_3,
		},
		ValidationContextType: &tlsv3.CommonTlsContext_CombinedValidationContext{
			CombinedValidationContext: &tlsv3.CommonTlsContext_CombinedCertificateValidationContext{
				DefaultValidationContext:         &tlsv3.CertificateValidationContext{MatchTypedSubjectAltNames: sans},
				ValidationContextSdsSecretConfig: &tlsv3.SdsSecretConfig{Name: BundleSecret(trustDomain), SdsConfig: adsSource()},
			},
		},
	}
}
