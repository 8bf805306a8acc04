package publisher

import (
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// SetSVID gives Envoy an identity's certificate under both of its names.
func (p *Publisher) SetSVID(id model.Identity, chainPEM, keyPEM []byte) {
	pair := resource.SVID(id, chainPEM, keyPEM)
	p.setSecrets(pair[0], pair[1])
}

// SetBundle gives Envoy the roots of the trust domain.
func (p *Publisher) SetBundle(trustDomain string, rootsPEM []byte) {
	p.setSecrets(resource.Bundle(trustDomain, rootsPEM))
}

func (p *Publisher) setSecrets(secrets ...*tlsv3.Secret) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	for _, s := range secrets {
		p.set(b, cache.Secret, s.GetName(), s)
	}
	p.applyBatch(b)
}

// RemoveSVID takes an identity's certificate away. No local pod has the identity
// any more, but listeners that drain may: Envoy keeps what they serve with.
func (p *Publisher) RemoveSVID(id model.Identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	b.remove(
		cache.Key{Kind: cache.Secret, Name: resource.InboundSecret(id)},
		cache.Key{Kind: cache.Secret, Name: resource.OutboundSecret(id)})
	p.applyBatch(b)
}
