package resource

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// SVID returns the certificate of id under its two names, the server side's first
// (InboundSecret, OutboundSecret). chainPEM holds the leaf and its intermediates,
// keyPEM the leaf's private key.
func SVID(id model.Identity, chainPEM, keyPEM []byte) [2]*tlsv3.Secret {
	certificate := func(name string) *tlsv3.Secret {
		return &tlsv3.Secret{Name: name, Type: &tlsv3.Secret_TlsCertificate{TlsCertificate: &tlsv3.TlsCertificate{
			CertificateChain: inlineBytes(chainPEM),
			PrivateKey:       inlineBytes(keyPEM),
		}}}
	}
	return [2]*tlsv3.Secret{certificate(InboundSecret(id)), certificate(OutboundSecret(id))}
}

// Bundle returns the roots of a trust domain, PEM, under BundleSecret. Which
// identities of the domain are admitted is said where the bundle is used.
func Bundle(trustDomain string, rootsPEM []byte) *tlsv3.Secret {
	return &tlsv3.Secret{Name: BundleSecret(trustDomain), Type: &tlsv3.Secret_ValidationContext{
		ValidationContext: &tlsv3.CertificateValidationContext{TrustedCa: inlineBytes(rootsPEM)},
	}}
}

func inlineBytes(b []byte) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineBytes{InlineBytes: b}}
}
