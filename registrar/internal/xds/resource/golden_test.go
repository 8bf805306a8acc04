package resource_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// shape is one golden file: resources that belong together.
type shape struct {
	name      string
	resources []proto.Message
}

// shapes are all kinds of resources that the package builds.
func shapes(tb testing.TB) []shape {
	tb.Helper()
	v4only := podSpec(tb, "c1-eth0", "payments", "payments", "8080")
	v4only.IPv6 = false
	spaced := podSpec(tb, "c1-eth0", "payments", "payments", "8080")
	spaced.Service.Namespace, spaced.Identity.Namespace, spaced.OwnNames = "shop", "shop", []string{"payments.shop." + domain}
	out := []shape{
		{"pod-single", podResources(tb, podSpec(tb, "c1-eth0", "payments", "payments", "8080"))},
		{"pod-single-h2", podResources(tb, podSpec(tb, "c1-eth0", "payments", "payments", "9090=h2"))},
		{"pod-single-ipv4", podResources(tb, v4only)},
		{"pod-single-namespaced", podResources(tb, spaced)},
		{"pod-multi", podResources(tb, podSpec(tb, "c1-eth0", "payments", "payments", "8080 9090=h2"))},
		{"pod-tcp", podResources(tb, podSpec(tb, "c1-eth0", "db", "db", "5432=tcp"))},
		{"pod-mixed", podResources(tb, podSpec(tb, "c1-eth0", "payments", "payments", "8080 9090=h2 5432=tcp"))},
		{"pod-client", podResources(tb, podSpec(tb, "c1-eth0", "client", "client", ""))},
		{"certificate", []proto.Message{resource.CertificateCluster(v4only.Identity, []byte("chain"))}},
		{"secrets", nil},
		{"clusters", nil},
		{"endpoints", nil},
		{"routes", []proto.Message{resource.Routes(table(false))}},
		{"routes-at-cap", []proto.Message{resource.Routes(table(true))}},
	}
	for i := range out {
		switch out[i].name {
		case "secrets":
			id := podSpec(tb, "c1-eth0", "payments", "payments", "8080").Identity
			pair := resource.SVID(id, []byte("chain"), []byte("key"))
			out[i].resources = []proto.Message{pair[0], pair[1], resource.Bundle(trustDomain, []byte("roots"))}
		case "clusters":
			for _, c := range serviceClusters() {
				built, err := resource.Cluster(c)
				if err != nil {
					tb.Fatal(err)
				}
				out[i].resources = append(out[i].resources, built)
			}
			out[i].resources = append(out[i].resources, resource.Tombstone("ghost."+domain))
		case "endpoints":
			for _, a := range loadAssignments() {
				out[i].resources = append(out[i].resources, resource.Endpoints(a.LoadAssignment))
			}
		}
	}
	return out
}

func serviceClusters() []resource.ServiceCluster {
	payments := model.Identity{TrustDomain: trustDomain, Namespace: "default", Account: "payments"}
	canary := payments
	canary.Account = "payments-canary"
	key := model.ServiceKey{Namespace: "default", Name: "payments"}
	return []resource.ServiceCluster{
		{Name: "payments." + domain, SNI: portText(8080), Protocol: port.HTTP, Identities: []string{payments.SPIFFE()}, TrustDomain: trustDomain},
		{Name: "payments." + domain + ":9090", SNI: portText(9090), Protocol: port.H2, Identities: []string{canary.SPIFFE(), payments.SPIFFE()}, TrustDomain: trustDomain},
		{
			Name: "198.18.0.10:5432", SNI: key.TCPServerName(5432), Protocol: port.TCP,
			Identities: []string{payments.SPIFFE()}, TrustDomain: trustDomain, StatName: "payments." + domain + ":5432",
		},
	}
}

func table(atCap bool) resource.RouteTable {
	var hosts []*routev3.VirtualHost
	for _, v := range []resource.VirtualHost{
		{Name: "payments", Domains: []string{"payments." + domain, "payments." + domain + ":8080"}, Cluster: "payments." + domain},
		{Name: "payments:9090", Domains: []string{"payments." + domain + ":9090", "payments.default." + domain + ":9090"}, Cluster: "payments." + domain + ":9090"},
		{Name: "payments:*", Domains: []string{"payments." + domain + ":*", "payments.default." + domain + ":*"}},
		{Name: "db:*", Domains: []string{"db." + domain, "db." + domain + ":*"}},
	} {
		hosts = append(hosts, resource.NewVirtualHost(v))
	}
	return resource.RouteTable{VirtualHosts: hosts, Domain: domain, AtCap: atCap}
}

// Every shape is what its golden file says. Goldens are reviewed like code.
func TestGolden(t *testing.T) {
	for _, s := range shapes(t) {
		t.Run(s.name, func(t *testing.T) {
			var got bytes.Buffer
			for _, r := range s.resources {
				got.Write(canonicalJSON(t, r))
			}
			golden(t, s.name+".json", got.Bytes())
		})
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("differs from %s; run with -update and review the change\n%s", path, firstDifference(string(got), string(want)))
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range max(len(g), len(w)) {
		if i >= len(g) || i >= len(w) || g[i] != w[i] {
			return "line " + portText(uint16(i+1)) + "\n got  " + lineAt(g, i) + "\n want " + lineAt(w, i)
		}
	}
	return ""
}

func lineAt(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(nothing)"
}

// canonicalJSON is protojson with its random blanks taken out.
func canonicalJSON(tb testing.TB, m proto.Message) []byte {
	tb.Helper()
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", " "); err != nil {
		tb.Fatal(err)
	}
	out.WriteByte('\n')
	return out.Bytes()
}

// marshal returns the bytes that Envoy would get.
func marshal(tb testing.TB, messages ...proto.Message) string {
	tb.Helper()
	var out []byte
	for _, m := range messages {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, data...)
	}
	return string(out)
}

// Every resource holds Envoy's own constraints, and so does everything packed into
// it. One that does not would make Envoy reject the whole response (XDS-R10).
func TestValidate(t *testing.T) {
	for _, s := range shapes(t) {
		t.Run(s.name, func(t *testing.T) {
			for _, r := range s.resources {
				eachMessage(t, r, func(m proto.Message) {
					v, ok := m.(interface{ ValidateAll() error })
					if !ok {
						return // a well-known type
					}
					if err := v.ValidateAll(); err != nil {
						t.Errorf("%T: %v", m, err)
					}
				})
			}
		})
	}
}

// eachMessage visits m and every message in it, also those packed into an Any.
func eachMessage(tb testing.TB, m proto.Message, visit func(proto.Message)) {
	tb.Helper()
	if packed, ok := m.(*anypb.Any); ok {
		inner, err := packed.UnmarshalNew()
		if err != nil {
			tb.Fatalf("unpack %s: %v", packed.GetTypeUrl(), err)
		}
		m = inner
	}
	visit(m)
	m.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap() && field.MapValue().Message() != nil:
			value.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				eachMessage(tb, v.Message().Interface(), visit)
				return true
			})
		case field.IsList() && field.Message() != nil:
			for i := range value.List().Len() {
				eachMessage(tb, value.List().Get(i).Message().Interface(), visit)
			}
		case !field.IsMap() && !field.IsList() && field.Message() != nil:
			eachMessage(tb, value.Message().Interface(), visit)
		}
		return true
	})
}

// A real Envoy accepts every shape, as part of the real bootstrap (XDS-R10,
// MESH-43). For each shape, because two of them would have one address.
func TestEnvoyAccepts(t *testing.T) {
	ca := wiretest.NewCA(t)
	chain, key := ca.Issue("spiffe://" + trustDomain + "/ns/default/sa/payments")
	for _, s := range shapes(t) {
		if s.name == "certificate" {
			continue // Envoy 1.40 crashes on it in a bootstrap; TestWireCertificateHeld gives it as the mesh does
		}
		t.Run(s.name, func(t *testing.T) {
			if out, err := wiretest.ValidateConfig(t, static(t, s, chain, key)); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// static is the bootstrap with the shape's resources in it.
func static(tb testing.TB, s shape, chain, key []byte) []byte {
	tb.Helper()
	config := new(bootstrapv3.Bootstrap)
	raw, err := resource.Bootstrap(bootstrapParams())
	if err != nil {
		tb.Fatal(err)
	}
	if err := protojson.Unmarshal(raw, config); err != nil {
		tb.Fatal(err)
	}
	to := config.GetStaticResources()
	for _, r := range s.resources {
		switch r := proto.Clone(r).(type) {
		case *listenerv3.Listener:
			to.Listeners = append(to.Listeners, r)
		case *clusterv3.Cluster:
			to.Clusters = append(to.Clusters, r)
		case *tlsv3.Secret:
			// The golden's bytes are no certificates.
			if r.GetTlsCertificate() != nil {
				pair := resource.SVID(model.Identity{TrustDomain: trustDomain, Namespace: "default", Account: "payments"}, chain, key)
				r.Type = pair[0].GetType()
			}
			if r.GetValidationContext() != nil {
				r.Type = resource.Bundle(trustDomain, chain).GetType()
			}
			to.Secrets = append(to.Secrets, r)
		case *routev3.RouteConfiguration:
			to.Listeners = append(to.Listeners, routeListener(tb, r))
		}
	}
	out, err := protojson.Marshal(config)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

// routeListener is a pod's outbound listener with the route table written into it.
func routeListener(tb testing.TB, routes *routev3.RouteConfiguration) *listenerv3.Listener {
	tb.Helper()
	l, err := resource.OutboundHTTP(podSpec(tb, "c1-eth0", "client", "client", ""))
	if err != nil {
		tb.Fatal(err)
	}
	filter := l.GetFilterChains()[0].GetFilters()[1]
	hcm := new(hcmv3.HttpConnectionManager)
	if err := filter.GetTypedConfig().UnmarshalTo(hcm); err != nil {
		tb.Fatal(err)
	}
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes}
	packed, err := anypb.New(hcm)
	if err != nil {
		tb.Fatal(err)
	}
	filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: packed}
	return l
}

// A long mesh domain makes the catch-all's expression longer; Envoy still takes it
// under the bootstrap's limit (T9).
func TestEnvoyAcceptsLongDomain(t *testing.T) {
	long := strings.Repeat("a", 62) + "." + strings.Repeat("b", 62) // 125 bytes, the longest
	routes := table(false)
	routes.Domain = long
	if out, err := wiretest.ValidateConfig(t, static(t, shape{resources: []proto.Message{resource.Routes(routes)}}, nil, nil)); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// reverse returns a reversed copy.
func reverse[T any](in []T) []T {
	out := slices.Clone(in)
	slices.Reverse(out)
	return out
}
