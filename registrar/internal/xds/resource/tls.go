package resource

import (
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_mappers/filter_state_override/v3"
	staticnamev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_mappers/static_name/v3"
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

// serverTLS terminates the mesh's mTLS with the pod's certificate. alpn is empty on
// chains that carry no HTTP.
func serverTLS(id model.Identity, alpn ...string) *corev3.TransportSocket {
	common := callersTLS(id)
	common.AlpnProtocols = alpn
	common.TlsCertificateSdsSecretConfigs = []*tlsv3.SdsSecretConfig{{Name: InboundSecret(id), SdsConfig: adsSource()}}
	return downstreamTLS(common)
}

// holdingTLS makes Envoy fetch the certificate of the pod's own connections, and keep
// it, for as long as there is a listener with it. It is fetched by a selector because
// Envoy gives what one selector holds to the others, but not what a plain reference
// holds. It terminates nothing: the certificate to show is one that never exists.
func holdingTLS(id model.Identity) *corev3.TransportSocket {
	common := callersTLS(id)
	common.CustomTlsCertificateSelector = certificateSelector(&ondemandsecretv3.Config{
		CertificateMapper:   extension("envoy.tls.certificate_mappers.static_name", &staticnamev3.StaticName{Name: noIdentity}),
		PrefetchSecretNames: []string{OutboundSecret(id)},
	})
	return downstreamTLS(common)
}

// callersTLS is TLS 1.3 that admits who has a certificate of the pod's trust domain.
func callersTLS(id model.Identity) *tlsv3.CommonTlsContext {
	return commonTLS(id.TrustDomain, &matcherv3.StringMatcher{
		MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: "spiffe://" + id.TrustDomain + "/"},
	})
}

// downstreamTLS asks for a client certificate and resumes nothing: a resumed session
// would outlive the bundle that admitted it.
func downstreamTLS(common *tlsv3.CommonTlsContext) *corev3.TransportSocket {
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
// Envoy holds by then (holdingTLS): the selector reads the secret's name from the
// connection, so the cluster carries no trace of local pods, and a pool serves one
// identity only (dataplane decision 4, MESH-16, MESH-45). The server must have one
// of the service's identities; sni selects the port and proves nothing (I7). ALPN
// is left to Envoy, which offers the protocol that the pool speaks.
func clientTLS(c ServiceCluster) *corev3.TransportSocket {
	identities := slices.Compact(slices.Sorted(slices.Values(c.Identities)))
	matchers := make([]*matcherv3.StringMatcher, 0, len(identities))
	for _, id := range identities {
		matchers = append(matchers, &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: id}})
	}
	common := commonTLS(c.TrustDomain, matchers...)
	common.CustomTlsCertificateSelector = certificateSelector(&ondemandsecretv3.Config{
		CertificateMapper: extension("envoy.tls.upstream_certificate_mappers.filter_state_override",
			&filterstatev3.Config{DefaultValue: noIdentity}),
	})
	return &corev3.TransportSocket{Name: tlsSocket, ConfigType: &corev3.TransportSocket_TypedConfig{
		TypedConfig: pack(&tlsv3.UpstreamTlsContext{
			CommonTlsContext: common,
			Sni:              c.SNI,
			// A session must not be resumed under another identity.
			MaxSessionKeys: u32(0),
		}),
	}}
}

// certificateSelector completes a selector. All have one source, or they would not
// share what they hold.
func certificateSelector(c *ondemandsecretv3.Config) *corev3.TypedExtensionConfig {
	c.ConfigSource = adsSource()
	return extension("envoy.tls.certificate_selectors.on_demand_secret", c)
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
