package resource

import (
	"crypto/sha256"
	"encoding/hex"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// CertificateCluster builds a cluster that leads nowhere: with it Envoy has the
// certificate of the outbound connections of an identity's pods (OutboundSecret) before
// the first one is made. The services' clusters would ask for it only then, which takes a
// round trip and fails while the registrar is away. Envoy does not wait for the
// certificate before it acknowledges the cluster. It is another one with every
// certificate, since Envoy, once told that there is none, does not ask again.
func CertificateCluster(id model.Identity, chainPEM []byte) *clusterv3.Cluster {
	name, sum := CertificateClusterName(id), sha256.Sum256(chainPEM)
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		LoadAssignment:       &endpointv3.ClusterLoadAssignment{ClusterName: name},
		AltStatName:          "certificate",
		TransportSocket:      holdingTLS(id),
		Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
			"portolan": {Fields: map[string]*structpb.Value{"certificate": structpb.NewStringValue(hex.EncodeToString(sum[:8]))}},
		}},
	}
}
