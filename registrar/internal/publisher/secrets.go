package publisher

import (
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// SetSVID gives Envoy an identity's certificate under both of its names, and a reason to
// hold it.
func (p *Publisher) SetSVID(id model.Identity, chainPEM, keyPEM []byte) {
	pair := resource.SVID(id, chainPEM, keyPEM)
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	p.setSecrets(b, pair[0], pair[1])
	holder := resource.CertificateCluster(id, chainPEM)
	p.set(b, cache.WildcardCluster, holder.GetName(), holder)
	p.applyBatch(b)
}

// SetBundle gives Envoy the roots of the trust domain.
func (p *Publisher) SetBundle(trustDomain string, rootsPEM []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	p.setSecrets(b, resource.Bundle(trustDomain, rootsPEM))
	p.applyBatch(b)
}

func (p *Publisher) setSecrets(b *batch, secrets ...*tlsv3.Secret) {
	for _, s := range secrets {
		p.set(b, cache.Secret, s.GetName(), s)
	}
}

// RemoveSVID takes an identity's certificate away. No local pod has the identity
// any more, but listeners that drain may: Envoy keeps what they serve with.
func (p *Publisher) RemoveSVID(id model.Identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	b.remove(
		cache.Key{Kind: cache.WildcardCluster, Name: resource.CertificateClusterName(id)},
		cache.Key{Kind: cache.Secret, Name: resource.InboundSecret(id)},
		cache.Key{Kind: cache.Secret, Name: resource.OutboundSecret(id)})
	p.applyBatch(b)
}
