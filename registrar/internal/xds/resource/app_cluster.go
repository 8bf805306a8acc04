package resource

import (
	"fmt"
	"slices"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/portolan-mesh/portolan/api/port"
)

// loopback is where the mesh looks for the application: also what listens on
// 0.0.0.0 or on a dual-stack [::] answers there (contract 4.3).
const loopback = "127.0.0.1"

// AppCluster builds the cluster that leads to one port of the application: its
// loopback inside the pod's network namespace. The namespace is the bind address's;
// Envoy refuses one on an endpoint.
func AppCluster(p Pod, pt port.Port) (*clusterv3.Cluster, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if !slices.Contains(p.Ports, pt) {
		return nil, fmt.Errorf("pod %s: port %d (%s) is not among its ports", p.ID, pt.Number, pt.Protocol)
	}
	name := AppClusterName(p.ID, pt.Number)
	options := clientOptions{protocol: pt.Protocol, idle: appIdle}
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		AltStatName:          statName(name),
		ConnectTimeout:       duration(connectTimeout),
		UpstreamBindConfig:   &corev3.BindConfig{SourceAddress: inNetns(p.Netns, loopback, 0)},
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: name,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
					Address: address(socketAddress(loopback, uint32(pt.Number))),
				}},
			}}}},
		},
		CircuitBreakers:               circuitBreakers(),
		TypedExtensionProtocolOptions: options.pack(),
	}, nil
}
