package resource_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

const (
	domain = "aether.internal"
	// trustDomain differs from the mesh domain, so that no test passes because one
	// was taken for the other.
	trustDomain = "td.test"
)

var vipRanges = []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")}

// mesh is one node with a real Envoy that gets what this package builds.
type mesh struct {
	testing.TB
	lab    *wiretest.Lab
	ca     *wiretest.CA
	xds    *wiretest.XDS
	envoy  *wiretest.Envoy
	vhosts map[string][]*routev3.VirtualHost // by service
	atCap  bool
}

// meshPod is an attached pod.
type meshPod struct {
	*wiretest.Pod
	spec resource.Pod
}

func newMesh(tb testing.TB, args ...string) *mesh {
	tb.Helper()
	m := &mesh{TB: tb, lab: wiretest.NewLab(tb), ca: wiretest.NewCA(tb), xds: wiretest.NewXDS(tb), vhosts: make(map[string][]*routev3.VirtualHost)}
	params := resource.BootstrapParams{
		NodeID: "node-1", Cluster: domain, XDSSocket: m.xds.Socket, AdminSocket: tb.TempDir() + "/admin.sock",
	}
	config, err := resource.Bootstrap(params)
	if err != nil {
		tb.Fatal(err)
	}
	m.xds.Set(resource.Bundle(trustDomain, m.ca.PEM))
	m.xds.Unknown(resource.Tombstone)
	m.setRoutes()
	m.envoy = m.lab.StartEnvoy(wiretest.EnvoyConfig{Bootstrap: config, AdminSocket: params.AdminSocket, Args: args})
	return m
}

// ports reads "8080 9090=h2 5432=tcp".
func ports(tb testing.TB, text string) []port.Port {
	tb.Helper()
	var out []port.Port
	for field := range strings.FieldsSeq(text) {
		number, protocol, _ := strings.Cut(field, "=")
		n, err := port.ParseNumber(number)
		if err != nil {
			tb.Fatal(err)
		}
		p, ok := port.ParseProtocol(protocol)
		if !ok {
			tb.Fatalf("protocol %q", protocol)
		}
		out = append(out, port.Port{Number: n, Protocol: p})
	}
	return out
}

// addPod attaches a pod of a service in namespace default; its account is the
// service's name.
func (m *mesh) addPod(name, service, portText string) *meshPod {
	m.Helper()
	return m.addPodAs(name, service, service, portText)
}

func (m *mesh) addPodAs(name, service, account, portText string) *meshPod {
	m.Helper()
	p := &meshPod{Pod: m.lab.AddPod()}
	p.spec = podSpec(m, name, service, account, portText)
	p.spec.Netns = p.Path
	m.setPod(p)
	m.xds.Sync()
	return p
}

// podSpec is a pod as the publisher would describe it; the first port is the default.
func podSpec(tb testing.TB, id, service, account, portText string) resource.Pod {
	tb.Helper()
	spec := resource.Pod{
		ID: id, Netns: "/run/portolan/netns/" + id,
		Identity:  model.Identity{TrustDomain: trustDomain, Namespace: "default", Account: account},
		Service:   model.ServiceKey{Namespace: "default", Name: service},
		OwnNames:  []string{service + ".default." + domain, service + "." + domain},
		Domain:    domain,
		Ports:     ports(tb, portText),
		IPv6:      true,
		VIPRanges: vipRanges,
	}
	if len(spec.Ports) > 0 {
		spec.Default = spec.Ports[0].Number
	}
	return spec
}

// setPod publishes the pod as it is now.
func (m *mesh) setPod(p *meshPod) {
	m.Helper()
	chain, key := m.ca.Issue(p.spec.Identity.SPIFFE())
	secrets := resource.SVID(p.spec.Identity, chain, key)
	m.xds.Set(secrets[0], secrets[1], resource.CertificateCluster(p.spec.Identity, chain))
	for _, r := range podResources(m, p.spec) {
		m.xds.Set(r)
	}
}

// podResources builds everything of a pod but its certificate, clusters first.
func podResources(tb testing.TB, p resource.Pod) []proto.Message {
	tb.Helper()
	var out []proto.Message
	add := func(m proto.Message, err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, m)
	}
	for _, pt := range p.Ports {
		add(resource.AppCluster(p, pt))
	}
	if len(p.Ports) > 0 {
		add(resource.Inbound(p))
	}
	add(resource.OutboundHTTP(p))
	add(resource.OutboundTCP(p))
	return out
}

// service is one service of namespace default as the projection would show it.
type service struct {
	name       string
	ports      string // the first one is the default
	identities []string
	vip        netip.Addr
}

// setService publishes a service: virtual hosts, and clusters on demand.
func (m *mesh) setService(s service) {
	m.Helper()
	flat, spaced := s.name+"."+domain, s.name+".default."+domain
	if s.identities == nil {
		s.identities = []string{"spiffe://" + trustDomain + "/ns/default/sa/" + s.name}
	}
	var hosts []*routev3.VirtualHost
	refused := []string{flat + ":*", spaced + ":*"}
	for i, pt := range ports(m, s.ports) {
		suffix := ":" + portText(pt.Number)
		cluster, domains := flat+suffix, []string{flat + suffix, spaced + suffix}
		if i == 0 {
			cluster, domains = flat, append(domains, flat, spaced)
		}
		if pt.Protocol != port.TCP {
			hosts = append(hosts, resource.NewVirtualHost(resource.VirtualHost{Name: cluster, Domains: domains, Cluster: cluster}))
			m.setCluster(s, pt, cluster, portText(pt.Number))
			continue
		}
		key := model.ServiceKey{Namespace: "default", Name: s.name}
		m.setCluster(s, pt, netip.AddrPortFrom(s.vip, pt.Number).String(), key.TCPServerName(pt.Number))
		if i == 0 {
			refused = append(refused, flat, spaced)
		}
	}
	m.vhosts[s.name] = append(hosts, resource.NewVirtualHost(resource.VirtualHost{Name: flat + ":*", Domains: refused}))
	m.setRoutes()
}

func (m *mesh) setCluster(s service, pt port.Port, name, sni string) {
	m.Helper()
	c, err := resource.Cluster(resource.ServiceCluster{
		Name: name, SNI: sni, Protocol: pt.Protocol, Identities: s.identities, TrustDomain: trustDomain,
	})
	if err != nil {
		m.Fatal(err)
	}
	m.xds.SetOnDemand(c)
}

func (m *mesh) setRoutes() {
	t := resource.RouteTable{Domain: domain, AtCap: m.atCap}
	for _, v := range m.vhosts {
		t.VirtualHosts = append(t.VirtualHosts, v...)
	}
	m.xds.Set(resource.Routes(t))
}

// setEndpoints publishes who serves a cluster.
func (m *mesh) setEndpoints(cluster string, pods ...*meshPod) {
	var endpoints []resource.Endpoint
	for _, p := range pods {
		endpoints = append(endpoints, resource.Endpoint{Addr: netip.AddrPortFrom(p.Addr, resource.InboundPort), Weight: 1})
	}
	m.xds.Set(resource.Endpoints(resource.LoadAssignment{Name: cluster, Endpoints: endpoints}))
}

// unwaited fails the test if Envoy has waited for something that did not come: it counts
// who waited for the first answer about a resource, and the requests that it gave up
// because nobody said what their cluster is.
func (m *mesh) unwaited() {
	m.Helper()
	stats := m.envoy.Stats(`init_fetch_timeout$|^http\.out_http\.no_cluster$`)
	if len(stats) == 0 {
		m.Error("Envoy has none of the statistics")
	}
	for name, n := range stats {
		if n != 0 {
			m.Errorf("%s is %d: Envoy waited in vain", name, n)
		}
	}
}

func portText(n uint16) string {
	return netip.AddrPortFrom(netip.IPv4Unspecified(), n).String()[len("0.0.0.0:"):]
}

// answer is a response, with what the echo server saw if it made it.
type answer struct {
	status          int
	header, trailer http.Header
	body            string
	seen            wiretest.Reply
}

// call sends a request with an authority from inside the pod through its outbound
// HTTP listener.
func (m *mesh) call(c *http.Client, authority string, edit ...func(*http.Request)) answer {
	m.Helper()
	a, err := try(c, authority, edit...)
	if err != nil {
		m.Fatalf("call %s: %v", authority, err)
	}
	return a
}

func try(c *http.Client, authority string, edit ...func(*http.Request)) (answer, error) {
	r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://placeholder/", nil)
	if err != nil {
		return answer{}, err
	}
	r.Host = authority
	for _, f := range edit {
		f(r)
	}
	response, err := c.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	return read(response)
}

// read reads a response, whose body the caller closes.
func read(response *http.Response) (answer, error) {
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: response.StatusCode, header: response.Header, trailer: response.Trailer, body: string(body)}
	if slices.Contains(response.Header["Content-Type"], "application/json") {
		err = json.Unmarshal(body, &a.seen)
	}
	return a, err
}

// in returns the same mesh for a subtest.
func (m *mesh) in(tb testing.TB) *mesh {
	tb.Helper()
	sub := *m
	sub.TB = tb
	return &sub
}

// http1 and h2c are clients of the pod's outbound HTTP listener.
func (p *meshPod) http1(tb testing.TB) *http.Client {
	tb.Helper()
	return p.Client(tb, "127.0.0.1:15001", false)
}

func (p *meshPod) h2c(tb testing.TB) *http.Client {
	tb.Helper()
	return p.Client(tb, "127.0.0.1:15001", true)
}
