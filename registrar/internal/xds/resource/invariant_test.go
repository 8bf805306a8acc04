package resource_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	commonfilterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/set_filter_state/v3"
	ondemandv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/on_demand/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tcpproxyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/tcp_proxy/v3"
	ondemandsecretv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/cert_selectors/on_demand_secret/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// The same input in any order gives the same bytes, 256 times over (I5, MESH-15).
func TestOrderDoesNotMatter(t *testing.T) {
	pod := podSpec(t, "c1-eth0", "payments", "payments", "8080 9090=h2 5432=tcp 6379=tcp 7070")
	shuffled := pod
	shuffled.Ports, shuffled.OwnNames, shuffled.VIPRanges = reverse(pod.Ports), reverse(pod.OwnNames), reverse(pod.VIPRanges)
	inbound := func(p resource.Pod) string {
		l, err := resource.Inbound(p)
		if err != nil {
			t.Fatal(err)
		}
		tcp, err := resource.OutboundTCP(p)
		if err != nil {
			t.Fatal(err)
		}
		return marshal(t, l, tcp)
	}
	want := inbound(pod)
	for range 128 {
		if inbound(pod) != want || inbound(shuffled) != want {
			t.Fatal("a pod's listeners depend on the order of its ports, names or ranges")
		}
	}
	for _, c := range serviceClusters() {
		first, err := resource.Cluster(c)
		if err != nil {
			t.Fatal(err)
		}
		c.Identities = append(reverse(c.Identities), c.Identities[0])
		second, err := resource.Cluster(c)
		if err != nil {
			t.Fatal(err)
		}
		if marshal(t, first) != marshal(t, second) {
			t.Errorf("cluster %s depends on the order of its identities", c.Name)
		}
	}
	for _, a := range loadAssignments() {
		first := marshal(t, resource.Endpoints(a.LoadAssignment))
		a.Endpoints = reverse(a.Endpoints)
		if marshal(t, resource.Endpoints(a.LoadAssignment)) != first {
			t.Errorf("load assignment %q depends on the order of its endpoints", a.name)
		}
	}
	routes := table(false)
	first := marshal(t, resource.Routes(routes))
	routes.VirtualHosts = reverse(routes.VirtualHosts)
	if marshal(t, resource.Routes(routes)) != first {
		t.Error("the route table depends on the order of its virtual hosts")
	}
}

// A builder changes nothing that it was given, and what it returns is the caller's:
// nobody else holds a part of it (XDS-46, MESH-23).
func TestBuildersShareNothing(t *testing.T) {
	build := func() []proto.Message {
		var out []proto.Message
		for _, s := range shapes(t) {
			out = append(out, s.resources...)
		}
		return out
	}
	want := marshal(t, build()...)
	for _, m := range build() {
		eachMessage(t, m, func(m proto.Message) { proto.Reset(m) })
	}
	if marshal(t, build()...) != want {
		t.Error("resources built later were changed through resources built earlier")
	}
	hosts := table(false).VirtualHosts
	slices.Reverse(hosts)
	before := slices.Clone(hosts)
	resource.Routes(resource.RouteTable{VirtualHosts: hosts, Domain: domain})
	if !slices.Equal(hosts, before) {
		t.Error("Routes reordered its caller's virtual hosts")
	}
}

// Ports added to a pod leave its name, its address, every listener-level field and
// the bytes of the chains that were there alone, so that Envoy updates the listener
// in place and drains nothing else (XDS-58). Between one port and several, the
// chain itself gains or loses the SNI check; nothing else of the listener changes.
func TestPortAddTouchesOnlyChains(t *testing.T) {
	build := func(ports string) *listenerv3.Listener {
		l, err := resource.Inbound(podSpec(t, "c1-eth0", "payments", "payments", ports))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	chains := func(l *listenerv3.Listener) map[string]string {
		out := make(map[string]string)
		for _, c := range l.GetFilterChains() {
			out[c.GetName()] = marshal(t, c)
		}
		return out
	}
	rest := func(l *listenerv3.Listener) string {
		l = proto.Clone(l).(*listenerv3.Listener)
		l.FilterChains, l.FilterChainMatcher = nil, nil
		return marshal(t, l)
	}
	sets := []string{"8080", "8080 9090=h2", "8080 9090=h2 5432=tcp", "8080 7070 9090=h2 5432=tcp"}
	for i, set := range sets[1:] {
		before, after := build(sets[i]), build(set)
		if rest(before) != rest(after) {
			t.Errorf("%q -> %q: listener-level fields changed", sets[i], set)
		}
		if i == 0 {
			continue
		}
		now := chains(after)
		for name, bytes := range chains(before) {
			if now[name] != bytes {
				t.Errorf("%q -> %q: chain %s changed", sets[i], set, name)
			}
		}
	}
}

// A single-port pod has one filter chain and no name of anything else in it: what it
// is does not depend on what others are (I3). A cluster has no name of a pod (I4).
func TestNoTraceOfOthers(t *testing.T) {
	single := podResources(t, podSpec(t, "c1-eth0", "payments", "payments", "8080"))
	inbound := single[1].(*listenerv3.Listener)
	if n := len(inbound.GetFilterChains()); n != 1 {
		t.Errorf("a single-port pod has %d filter chains", n)
	}
	if chain := inbound.GetFilterChains()[0]; chain.GetFilterChainMatch() != nil {
		t.Errorf("the chain has conditions: %v", chain.GetFilterChainMatch())
	}
	for _, c := range serviceClusters() {
		built, err := resource.Cluster(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, trace := range []string{"c1-eth0", "/run/", "10.77.", "in|", "app|"} {
			if strings.Contains(marshal(t, built), trace) {
				t.Errorf("cluster %s carries %q", c.Name, trace)
			}
		}
	}
}

// Every name that a pod's resources refer to is built with them, or is answered on
// demand: clusters, secrets, the route table (I6, MESH-48).
func TestReferences(t *testing.T) {
	for _, ports := range []string{"", "8080", "9090=h2", "5432=tcp", "8080 9090=h2 5432=tcp"} {
		spec := podSpec(t, "c1-eth0", "payments", "payments", ports)
		pair := resource.SVID(spec.Identity, nil, nil)
		known := map[string]bool{
			resource.RoutesName: true, "no|cluster": true, resource.XDSCluster: true,
			pair[0].GetName(): true, pair[1].GetName(): true, resource.Bundle(trustDomain, nil).GetName(): true,
		}
		resources := podResources(t, spec)
		for _, r := range resources {
			if c, ok := r.(*clusterv3.Cluster); ok {
				known[c.GetName()] = true
			}
		}
		seen := 0
		refer := func(name string) {
			seen++
			if !known[name] {
				t.Errorf("ports %q: %q is referred to and not built", ports, name)
			}
		}
		for _, r := range resources {
			eachMessage(t, r, func(m proto.Message) {
				switch m := m.(type) {
				case *routev3.RouteAction:
					refer(m.GetCluster())
				case *tcpproxyv3.TcpProxy:
					refer(m.GetCluster())
				case *hcmv3.Rds:
					refer(m.GetRouteConfigName())
				case *tlsv3.SdsSecretConfig:
					refer(m.GetName())
				case *ondemandsecretv3.Config:
					for _, name := range m.GetPrefetchSecretNames() {
						refer(name)
					}
				case *corev3.GrpcService_EnvoyGrpc:
					refer(m.GetClusterName())
				case *commonfilterstatev3.FilterStateValue:
					if text := m.GetFormatString().GetTextFormatSource().GetInlineString(); !strings.HasPrefix(text, "%") {
						refer(text)
					}
				}
			})
		}
		if seen == 0 {
			t.Error("nothing is referred to: the test looks in the wrong place")
		}
	}
}

// The SNI is explicit and no option lets Envoy derive one; the server is pinned and
// both sides speak TLS 1.3. There is no mode without TLS, in which ports could not be
// told apart (I7, MESH-7, MESH-26).
func TestTLSContexts(t *testing.T) {
	clients, servers := 0, 0
	for _, s := range shapes(t) {
		for _, r := range s.resources {
			eachMessage(t, r, func(m proto.Message) {
				switch m := m.(type) {
				case *tlsv3.UpstreamTlsContext:
					clients++
					if m.GetSni() == "" || m.GetAutoHostSni() || m.GetAutoSniSanValidation() {
						t.Errorf("%s: the SNI is not explicit: %v", s.name, m)
					}
					if m.GetMaxSessionKeys().GetValue() != 0 || m.GetMaxSessionKeys() == nil {
						t.Errorf("%s: sessions are kept", s.name)
					}
					for _, san := range m.GetCommonTlsContext().GetCombinedValidationContext().GetDefaultValidationContext().GetMatchTypedSubjectAltNames() {
						if !strings.HasPrefix(san.GetMatcher().GetExact(), "spiffe://"+trustDomain+"/") {
							t.Errorf("%s: SAN %v", s.name, san)
						}
					}
				case *tlsv3.DownstreamTlsContext:
					servers++
					if !m.GetRequireClientCertificate().GetValue() {
						t.Errorf("%s: no client certificate is required", s.name)
					}
				case *tlsv3.CommonTlsContext:
					if m.GetTlsParams().GetTlsMinimumProtocolVersion() != tlsv3.TlsParameters_TLSv1_3 {
						t.Errorf("%s: TLS below 1.3", s.name)
					}
					if len(m.GetCombinedValidationContext().GetDefaultValidationContext().GetMatchTypedSubjectAltNames()) == 0 {
						t.Errorf("%s: the peer is not pinned", s.name)
					}
				case *routev3.RouteAction:
					if m.GetAutoHostRewrite() != nil {
						t.Errorf("%s: the authority is rewritten", s.name)
					}
				case *corev3.UpstreamHttpProtocolOptions:
					t.Errorf("%s: auto_sni or its like: %v", s.name, m)
				}
			})
		}
	}
	if clients != 4 || servers == 0 {
		t.Errorf("%d client and %d server contexts: the test looks in the wrong place", clients, servers)
	}
}

// Every reference to one SDS or EDS name has the same bytes, in every listener and
// cluster; Envoy 1.40 never delivers a secret otherwise (dataplane decision 4). So
// do all sources of on-demand clusters: each other value would open another stream.
// What a request may wait for waits as long as a registrar may be away: for a cluster on
// demand and for its load assignment.
func TestSourcesAreIdentical(t *testing.T) {
	const away = 15
	var ads, onDemand, assignments string
	ofAssignments := map[*corev3.ConfigSource]bool{}
	for _, s := range shapes(t) {
		for _, r := range s.resources {
			eachMessage(t, r, func(m proto.Message) {
				switch m := m.(type) {
				case *clusterv3.Cluster_EdsClusterConfig:
					ofAssignments[m.GetEdsConfig()] = true
				case *ondemandv3.OnDemandCds:
					if m.GetTimeout().GetSeconds() != away {
						t.Errorf("%s: a request waits %v for its cluster", s.name, m.GetTimeout().AsDuration())
					}
				case *tcpproxyv3.TcpProxy_OnDemand:
					if m.GetTimeout().GetSeconds() != away {
						t.Errorf("%s: a connection waits %v for its cluster", s.name, m.GetTimeout().AsDuration())
					}
				case *corev3.ConfigSource:
					first, seconds := &ads, int64(1)
					switch {
					case m.GetApiConfigSource() != nil:
						first, seconds = &onDemand, 0
					case ofAssignments[m]:
						first, seconds = &assignments, away
					}
					if *first == "" {
						*first = marshal(t, m)
					}
					if marshal(t, m) != *first {
						t.Errorf("%s: another source: %v", s.name, m)
					}
					if m.GetInitialFetchTimeout().GetSeconds() != seconds {
						t.Errorf("%s: waits %v for the first answer", s.name, m.GetInitialFetchTimeout().AsDuration())
					}
				}
			})
		}
	}
	if ads == "" || onDemand == "" || assignments == "" {
		t.Error("a source is missing: the test looks in the wrong place")
	}
	selectors, holders := 0, 0
	for _, s := range shapes(t) {
		for _, r := range s.resources {
			eachMessage(t, r, func(m proto.Message) {
				c, ok := m.(*ondemandsecretv3.Config)
				if !ok {
					return
				}
				selectors++
				if len(c.GetPrefetchSecretNames()) > 0 {
					holders++
				}
				if marshal(t, c.GetConfigSource()) != ads {
					t.Errorf("%s: the selector's source differs", s.name)
				}
			})
		}
	}
	if selectors != 4 || holders != 1 {
		t.Errorf("%d selectors, %d of them hold a certificate", selectors, holders)
	}
}

// The secret that a pod's connections ask for is the one that its identity's cluster makes
// Envoy hold, and nobody is sent there.
func TestCertificateIsHeld(t *testing.T) {
	spec := podSpec(t, "c1-eth0", "payments", "payments", "8080 9090=h2 5432=tcp")
	used := map[string]int{}
	for _, r := range podResources(t, spec) {
		eachMessage(t, r, func(m proto.Message) {
			if m, ok := m.(*commonfilterstatev3.FilterStateValue); ok && strings.HasSuffix(m.GetObjectKey(), "on_demand_secret") {
				used[m.GetFormatString().GetTextFormatSource().GetInlineString()]++
			}
		})
	}
	var held []string
	c := resource.CertificateCluster(spec.Identity, []byte("chain"))
	eachMessage(t, c, func(m proto.Message) {
		if c, ok := m.(*ondemandsecretv3.Config); ok {
			held = append(held, c.GetPrefetchSecretNames()...)
		}
	})
	name := resource.OutboundSecret(spec.Identity)
	if !maps.Equal(used, map[string]int{name: 2}) || !slices.Equal(held, []string{name}) {
		t.Errorf("used are %v, held %v", used, held)
	}
	if len(c.GetLoadAssignment().GetEndpoints()) > 0 {
		t.Errorf("the cluster has endpoints: %v", c.GetLoadAssignment())
	}
}

// No local name is an authority of any mesh, however it is spelled, and no service
// cluster can take a local name (XDS-71).
func TestNamesAreNoAuthorities(t *testing.T) {
	id := podSpec(t, "c1-eth0", "payments", "payments", "8080").Identity
	for _, name := range []string{
		resource.InboundListener("c1-eth0"), resource.OutboundHTTPListener("c1-eth0"), resource.OutboundTCPListener("c1-eth0"),
		resource.AppClusterName("c1-eth0", 8080), resource.CertificateClusterName(id), resource.RoutesName, resource.XDSCluster, resource.InboundSecret(id),
	} {
		if !strings.Contains(name, "|") {
			t.Errorf("%q has no %q", name, "|")
		}
		if a, err := authority.Parse(name, "internal"); err == nil {
			t.Errorf("%q is an authority: %v", name, a)
		}
	}
	seen := make(map[string]bool)
	for _, port := range []uint16{80, 8080, 18080} {
		for _, id := range []string{"c1-eth0", "c1-eth01"} {
			name := resource.AppClusterName(id, port)
			if seen[name] {
				t.Errorf("%q is not unique", name)
			}
			seen[name] = true
		}
	}
	for got, want := range map[string]string{
		resource.BundleSecret("td.test"): "spiffe://td.test",
		resource.OutboundSecret(id):      "spiffe://td.test/ns/default/sa/payments",
		resource.InboundSecret(id):       "in|spiffe://td.test/ns/default/sa/payments",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
