package simulation

import (
	"fmt"
	"net/netip"
	"strings"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	ondemandsecretv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_selectors/on_demand_secret/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// wireCluster is what matters of a cluster that was received.
type wireCluster struct {
	// eds: it takes its endpoints from the load assignment of its name. A cluster
	// without that leads nowhere, or to an app.
	eds bool
	sni string
	// service is the one whose identity the server must have.
	service model.ServiceKey
	// holds is the certificate that Envoy has for as long as it has the cluster.
	holds string
}

func readCluster(body *anypb.Any) (wireCluster, error) {
	msg := &clusterv3.Cluster{}
	if err := body.UnmarshalTo(msg); err != nil {
		return wireCluster{}, err
	}
	if msg.GetType() != clusterv3.Cluster_EDS {
		out := wireCluster{}
		return out, protorange.Range(msg.ProtoReflect(), func(v protopath.Values) error {
			if c, ok := v.Index(-1).Value.Interface().(protoreflect.Message); ok {
				if c, ok := c.Interface().(*ondemandsecretv3.Config); ok {
					out.holds = strings.Join(c.GetPrefetchSecretNames(), " ")
				}
			}
			return nil
		})
	}
	out := wireCluster{eds: true}
	if name := msg.GetEdsClusterConfig().GetServiceName(); name != msg.GetName() {
		return out, fmt.Errorf("cluster %s has the load assignment of %s", msg.GetName(), name)
	}
	tls := &tlsv3.UpstreamTlsContext{}
	if err := msg.GetTransportSocket().GetTypedConfig().UnmarshalTo(tls); err != nil {
		return out, fmt.Errorf("cluster %s: %w", msg.GetName(), err)
	}
	out.sni = tls.GetSni()
	for _, m := range tls.GetCommonTlsContext().GetCombinedValidationContext().GetDefaultValidationContext().GetMatchTypedSubjectAltNames() {
		path, ok := strings.CutPrefix(m.GetMatcher().GetExact(), "spiffe://"+domain+"/ns/")
		ns, account, both := strings.Cut(path, "/sa/")
		if !ok || !both {
			return out, fmt.Errorf("cluster %s pins identity %q", msg.GetName(), m.GetMatcher())
		}
		out.service = model.ServiceKey{Namespace: ns, Name: account}
	}
	return out, nil
}

func readAssignment(body *anypb.Any) (string, set, error) {
	msg := &endpointv3.ClusterLoadAssignment{}
	if err := body.UnmarshalTo(msg); err != nil {
		return "", nil, err
	}
	out := set{}
	for _, group := range msg.GetEndpoints() {
		for _, ep := range group.GetLbEndpoints() {
			socket := ep.GetEndpoint().GetAddress().GetSocketAddress()
			addr, err := netip.ParseAddr(socket.GetAddress())
			if err != nil {
				return "", nil, err
			}
			if _, twice := out[addr]; twice || socket.GetPortValue() != 15008 {
				return "", nil, fmt.Errorf("%s has %s:%d, twice: %t", msg.GetClusterName(), addr, socket.GetPortValue(), twice)
			}
			out[addr] = member{
				weight: ep.GetLoadBalancingWeight().GetValue(), draining: ep.GetHealthStatus() == corev3.HealthStatus_DRAINING,
			}
		}
	}
	return msg.GetClusterName(), out, nil
}
