package resource

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	previoushostsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/portolan-mesh/portolan/api/port"
)

const (
	// connectTimeout bounds one attempt, TCP and TLS.
	connectTimeout = time.Second
	// unlimited switches a circuit breaker off: how much a service can bear is its
	// own affair, and a limit shared by all callers of a node would be a fault of the
	// mesh. Retries stay limited, so that they cannot multiply an overload.
	unlimited  = 1<<32 - 1
	maxRetries = 1024
	// attempts is how often a request that was not delivered is sent again, and
	// hostPicks how often the balancer picks anew to find a host not tried yet, which
	// it meets late when its weight is small.
	attempts  = 3
	hostPicks = 10
)

// ServiceCluster is one port of a service as every node sees it. Nothing in it
// depends on the node or on its pods (I4).
type ServiceCluster struct {
	// Name is the cluster's name and its load assignment's: the authority, or VIP:port
	// for a tcp port.
	Name string
	// SNI selects the port at the server: ServerName, or model.ServiceKey.TCPServerName.
	SNI string
	// Protocol is how the port speaks.
	Protocol port.Protocol
	// Identities are the SPIFFE IDs of which the server must have one. Never empty:
	// a cluster that does not pin its server is not built (MESH-26).
	Identities []string
	// TrustDomain is the one whose bundle admits the server.
	TrustDomain string
	// StatName is the name in Envoy's statistics; empty means Name.
	StatName string
}

func (c ServiceCluster) validate() error {
	switch {
	case c.Name == "" || c.SNI == "" || !utf8.ValidString(c.Name+c.SNI+c.StatName):
		return fmt.Errorf("cluster %q: name or SNI %q is empty or no UTF-8", c.Name, c.SNI)
	case strings.Contains(c.Name, "|"):
		return fmt.Errorf("cluster %q: a %q is for local names", c.Name, "|")
	case c.Protocol.Class() == port.ClassNone:
		return fmt.Errorf("cluster %s: protocol %q is not routable", c.Name, c.Protocol)
	case len(c.Identities) == 0:
		return fmt.Errorf("cluster %s: no identity to pin the server to; publish a tombstone", c.Name)
	case c.TrustDomain == "" || strings.Contains(c.TrustDomain, "/") || !utf8.ValidString(c.TrustDomain):
		return fmt.Errorf("cluster %s: trust domain %q is empty or malformed", c.Name, c.TrustDomain)
	}
	for _, id := range c.Identities {
		if rest, ok := strings.CutPrefix(id, "spiffe://"+c.TrustDomain+"/"); !ok || rest == "" || !utf8.ValidString(rest) {
			return fmt.Errorf("cluster %s: identity %q is not of trust domain %s", c.Name, id, c.TrustDomain)
		}
	}
	return nil
}

// Cluster builds the cluster of one port of a service. Its endpoints come from the
// load assignment of the same name, which no other cluster uses (MESH-17).
func Cluster(c ServiceCluster) (*clusterv3.Cluster, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	options := clientOptions{protocol: c.Protocol, idle: clientIdle, age: connectionAge, retry: retryPolicy()}
	out := &clusterv3.Cluster{
		Name:                 c.Name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		EdsClusterConfig: &clusterv3.Cluster_EdsClusterConfig{
			EdsConfig:   assignmentSource(),
			ServiceName: c.Name,
		},
		AltStatName:    statName(c.Name),
		ConnectTimeout: duration(connectTimeout),
		// Never send to an endpoint that drains because there are too few others
		// (XDS-56): none left is a 503.
		CommonLbConfig:                &clusterv3.Cluster_CommonLbConfig{HealthyPanicThreshold: &typev3.Percent{Value: 0}},
		CircuitBreakers:               circuitBreakers(),
		OutlierDetection:              outlierDetection(),
		UpstreamBindConfig:            &corev3.BindConfig{SocketOptions: deadPeer()},
		UpstreamConnectionOptions:     &clusterv3.UpstreamConnectionOptions{TcpKeepalive: keepalive()},
		TransportSocket:               clientTLS(c),
		TypedExtensionProtocolOptions: options.pack(),
	}
	if c.StatName != "" {
		out.AltStatName = statName(c.StatName)
	}
	return out, nil
}

// Tombstone is the cluster of a name that leads nowhere: a request fails at once
// with 503, every time, a TCP connection is closed, and nobody is asked. It becomes
// a service by an update under the same name. A removed name instead would make
// each request wait for the whole on-demand timeout (dataplane T4). All tombstones
// have one name in the statistics: what applications make up must not become
// metrics, and it halves what one costs Envoy (some 28 KB).
func Tombstone(name string) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		LoadAssignment:       &endpointv3.ClusterLoadAssignment{ClusterName: name},
		AltStatName:          "tombstone",
	}
}

// retryPolicy sends a request again only if it was certainly not delivered: no
// connection, refused by HTTP/2 before it was looked at, headers never sent, or a
// response with the mesh's own mark. So no request, idempotent or not, is ever
// processed twice. Each attempt goes to another host (MESH-32). It is the cluster's
// and not the route's, so that every way to the cluster has it and the route table
// stays small.
func retryPolicy() *routev3.RetryPolicy {
	return &routev3.RetryPolicy{
		RetryOn: "connect-failure,refused-stream,reset-before-request,retriable-headers",
		RetriableHeaders: []*routev3.HeaderMatcher{{
			Name: NotDeliveredHeader,
			HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: &matcherv3.StringMatcher{
				MatchPattern: &matcherv3.StringMatcher_Exact{Exact: "1"},
			}},
		}},
		NumRetries: u32(attempts),
		RetryHostPredicate: []*routev3.RetryPolicy_RetryHostPredicate{{
			Name: "envoy.retry_host_predicates.previous_hosts",
			ConfigType: &routev3.RetryPolicy_RetryHostPredicate_TypedConfig{
				TypedConfig: pack(&previoushostsv3.PreviousHostsPredicate{}),
			},
		}},
		HostSelectionRetryMaxAttempts: hostPicks,
		RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: duration(5 * time.Millisecond),
			MaxInterval:  duration(50 * time.Millisecond),
		},
	}
}

func circuitBreakers() *clusterv3.CircuitBreakers {
	return &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		Priority:           corev3.RoutingPriority_DEFAULT,
		MaxConnections:     u32(unlimited),
		MaxPendingRequests: u32(unlimited),
		MaxRequests:        u32(unlimited),
		MaxRetries:         u32(maxRetries),
	}}}
}

// outlierDetection leaves out a host that cannot be connected to (a node that
// died, an address that now belongs to another identity) until the registry says
// so, for seconds at a time. Only failures to connect count: what an application
// answers is no business of the mesh. At most half of the hosts are left out.
func outlierDetection() *clusterv3.OutlierDetection {
	return &clusterv3.OutlierDetection{
		SplitExternalLocalOriginErrors:         true,
		ConsecutiveLocalOriginFailure:          u32(5),
		EnforcingConsecutiveLocalOriginFailure: u32(100),
		Interval:                               duration(time.Second),
		BaseEjectionTime:                       duration(5 * time.Second),
		MaxEjectionTime:                        duration(30 * time.Second),
		MaxEjectionPercent:                     u32(50),
		EnforcingConsecutive_5Xx:               u32(0),
		EnforcingConsecutiveGatewayFailure:     u32(0),
		EnforcingSuccessRate:                   u32(0),
		EnforcingLocalOriginSuccessRate:        u32(0),
	}
}
