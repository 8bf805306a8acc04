package resource

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"
	"unicode/utf8"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	downstreamconnectionsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	upstreamhttpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// maxSocketPath is what the kernel's sockaddr_un holds.
	maxSocketPath = 107
	// DefaultMaxConnections is how many downstream connections an Envoy accepts,
	// all pods together.
	DefaultMaxConnections = 262_144
	// re2Limit is the largest RE2 program that Envoy loads. The catch-all's
	// expression has some 620 instructions and grows with the mesh domain; Envoy's own
	// limit is 100.
	re2Limit = 1000
)

// BootstrapParams are the facts about a node that its Envoy starts with.
type BootstrapParams struct {
	// NodeID names the node; the registrar logs it.
	NodeID string
	// Cluster names the mesh.
	Cluster string
	// Locality is the node's.
	Locality model.Locality
	// XDSSocket is the registrar's socket as Envoy sees it, at most 107 bytes.
	XDSSocket string
	// AdminSocket is where Envoy's admin interface listens, likewise.
	AdminSocket string
	// MaxConnections bounds the downstream connections; 0 means
	// DefaultMaxConnections.
	MaxConnections int64
}

func (p BootstrapParams) validate() error {
	if p.NodeID == "" || p.Cluster == "" {
		return fmt.Errorf("bootstrap: node %q or cluster %q is empty; Envoy needs both to ask for configuration", p.NodeID, p.Cluster)
	}
	if !utf8.ValidString(p.NodeID + p.Cluster + p.Locality.Region + p.Locality.Zone) {
		return fmt.Errorf("bootstrap: node %q, cluster %q or locality %q is not UTF-8", p.NodeID, p.Cluster, p.Locality)
	}
	if p.MaxConnections < 0 {
		return fmt.Errorf("bootstrap: a maximum of %d connections is negative", p.MaxConnections)
	}
	for _, path := range []string{p.XDSSocket, p.AdminSocket} {
		if !filepath.IsAbs(path) || len(path) > maxSocketPath {
			return fmt.Errorf("bootstrap: socket path %q must be absolute and at most %d bytes", path, maxSocketPath)
		}
	}
	return nil
}

// Bootstrap returns Envoy's start configuration, JSON and thereby YAML, the same
// bytes for the same parameters. Envoy is to be started with --drain-time-s near
// the pods' grace period and --drain-strategy immediate: removed chains and
// listeners hold their connections, and a pod's network namespace, that long.
func Bootstrap(p BootstrapParams) ([]byte, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if p.MaxConnections == 0 {
		p.MaxConnections = DefaultMaxConnections
	}
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(bootstrap(p))
	if err != nil {
		return nil, fmt.Errorf("bootstrap for node %q: %w", p.NodeID, err)
	}
	// protojson varies its blanks on purpose; indenting takes them out.
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return nil, fmt.Errorf("bootstrap for node %q: %w", p.NodeID, err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

func bootstrap(p BootstrapParams) *bootstrapv3.Bootstrap {
	ads := adsSource()
	ads.InitialFetchTimeout = nil
	return &bootstrapv3.Bootstrap{
		Node: &corev3.Node{Id: p.NodeID, Cluster: p.Cluster, Locality: locality(p.Locality)},
		// A socket and no port: admin can stop Envoy and shows every configuration.
		Admin: &bootstrapv3.Admin{Address: pipe(p.AdminSocket, 0o600)},
		DynamicResources: &bootstrapv3.Bootstrap_DynamicResources{
			AdsConfig: apiSource(corev3.ApiConfigSource_DELTA_GRPC),
			CdsConfig: ads,
			LdsConfig: ads,
		},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{Clusters: []*clusterv3.Cluster{xdsCluster(p.XDSSocket)}},
		LayeredRuntime: &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{{
			Name: "static",
			LayerSpecifier: &bootstrapv3.RuntimeLayer_StaticLayer{StaticLayer: &structpb.Struct{Fields: map[string]*structpb.Value{
				"re2.max_program_size.error_level": structpb.NewNumberValue(re2Limit),
				"re2.max_program_size.warn_level":  structpb.NewNumberValue(re2Limit),
			}}},
		}}},
		OverloadManager: &overloadv3.OverloadManager{ResourceMonitors: []*overloadv3.ResourceMonitor{{
			Name: "envoy.resource_monitors.global_downstream_max_connections",
			ConfigType: &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: pack(&downstreamconnectionsv3.DownstreamConnectionsConfig{
				MaxActiveDownstreamConnections: p.MaxConnections,
			})},
		}}},
		// A cluster's statistics are made when it is first used. Most names of a large
		// catalogue, and every tombstone, never are.
		StatsConfig:         statsConfig(),
		DeferredStatOptions: &bootstrapv3.Bootstrap_DeferredStatOptions{EnableDeferredCreationStats: true},
	}
}

// xdsCluster is the registrar's socket. The keepalive finds a registrar that hangs;
// the server must allow it (dataplane T10).
func xdsCluster(socket string) *clusterv3.Cluster {
	h2 := &corev3.Http2ProtocolOptions{
		ConnectionKeepalive: &corev3.KeepaliveSettings{Interval: duration(30 * time.Second), Timeout: duration(5 * time.Second)},
	}
	return &clusterv3.Cluster{
		Name:                 XDSCluster,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       duration(connectTimeout),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: XDSCluster,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: pipe(socket, 0)}},
			}}}},
		},
		TypedExtensionProtocolOptions: map[string]*anypb.Any{upstreamOptions: pack(&upstreamhttpv3.HttpProtocolOptions{
			UpstreamProtocolOptions: &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig_{
				ExplicitHttpConfig: &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig{
					ProtocolConfig: &upstreamhttpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{Http2ProtocolOptions: h2},
				},
			},
		})},
	}
}

func pipe(path string, mode uint32) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: path, Mode: mode}}}
}
