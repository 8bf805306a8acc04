package resource_test

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"testing"

	xdsmatcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// A pod from which a wrong or an unsafe listener would come is refused by every
// builder, with what is wrong (MESH-27).
func TestPodRefused(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*resource.Pod)
		want string
	}{
		{"no ID", func(p *resource.Pod) { p.ID = "" }, `pod "": the ID is empty or not usable in a name`},
		{"ID with a bar", func(p *resource.Pod) { p.ID = "a|b" }, `pod "a|b": the ID is empty or not usable in a name`},
		{"ID not UTF-8", func(p *resource.Pod) { p.ID = "\xff" }, `pod "\xff": the ID is empty or not usable in a name`},
		{"relative netns", func(p *resource.Pod) { p.Netns = "netns/a" }, `pod p: netns path "netns/a" is not absolute`},
		{"no VIP range", func(p *resource.Pod) { p.VIPRanges = nil }, `pod p: no VIP range is given`},
		{"no trust domain", func(p *resource.Pod) { p.Identity.TrustDomain = "" }, `pod p: identity "spiffe:///ns/default/sa/payments" has an empty part`},
		{"no account", func(p *resource.Pod) { p.Identity.Account = "" }, `pod p: identity "spiffe://td.test/ns/default/sa/" has an empty part`},
		{"account with a slash", func(p *resource.Pod) { p.Identity.Account = "a/b" }, `pod p: identity "spiffe://td.test/ns/default/sa/a/b" has a part that a SPIFFE ID cannot carry`},
		{"account with a format", func(p *resource.Pod) { p.Identity.Account = "%PROTOCOL%" }, `pod p: identity "spiffe://td.test/ns/default/sa/%PROTOCOL%" has a part that a SPIFFE ID cannot carry`},
		{"no domain", func(p *resource.Pod) { p.Domain = "" }, `pod p: mesh domain is empty; use a name such as aether.internal`},
		{"bad service", func(p *resource.Pod) { p.Service.Name = "a.b" }, `pod p: service "default/a.b" has a part that is no DNS label`},
		{"no own name", func(p *resource.Pod) { p.OwnNames = nil }, `pod p: no own name is given; every request would be refused`},
		{"own name with a port", func(p *resource.Pod) { p.OwnNames = []string{"payments.aether.internal:8080"} }, `pod p: own name "payments.aether.internal:8080" is no host name of domain aether.internal in lower case`},
		{"own name in capitals", func(p *resource.Pod) { p.OwnNames = []string{"Payments.aether.internal"} }, `pod p: own name "Payments.aether.internal" is no host name of domain aether.internal in lower case`},
		{"own name of a stranger", func(p *resource.Pod) { p.OwnNames = []string{"*"} }, `pod p: own name "*" is no host name of domain aether.internal in lower case`},
		{"unknown protocol", func(p *resource.Pod) { p.Ports[0].Protocol = port.Unknown }, `pod p: port 8080 has protocol "unknown"; leave it out, it is not routable`},
		{"port 0", func(p *resource.Pod) { p.Ports[0].Number = 0 }, `pod p: port 0 has protocol "http"; leave it out, it is not routable`},
		{"port twice", func(p *resource.Pod) { p.Ports = append(p.Ports, port.Port{Number: 8080, Protocol: port.TCP}) }, `pod p: port 8080 is listed twice`},
		{"default not served", func(p *resource.Pod) { p.Default = 9090 }, `pod p: default port 9090 is not among its ports`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := podSpec(t, "p", "payments", "payments", "8080")
			tt.edit(&p)
			_, inbound := resource.Inbound(p)
			_, http := resource.OutboundHTTP(p)
			_, tcp := resource.OutboundTCP(p)
			_, app := resource.AppCluster(p, port.Port{Number: 8080, Protocol: port.HTTP})
			for builder, err := range map[string]error{"Inbound": inbound, "OutboundHTTP": http, "OutboundTCP": tcp, "AppCluster": app} {
				if err == nil || err.Error() != tt.want {
					t.Errorf("%s: got %v\nwant %s", builder, err, tt.want)
				}
			}
		})
	}
	client := podSpec(t, "client", "client", "client", "")
	if _, err := resource.Inbound(client); err == nil || err.Error() != "pod client serves no port: it has no inbound listener" {
		t.Errorf("a pure client: got %v", err)
	}
	if _, err := resource.AppCluster(podSpec(t, "p", "payments", "payments", "8080"), port.Port{Number: 9090, Protocol: port.HTTP}); err == nil || err.Error() != "pod p: port 9090 (http) is not among its ports" {
		t.Errorf("a port that the pod does not serve: got %v", err)
	}
}

// A cluster that would not pin its server, or could be mistaken for a local one, is
// refused (MESH-26, MESH-27, XDS-71).
func TestClusterRefused(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*resource.ServiceCluster)
		want string
	}{
		{"no name", func(c *resource.ServiceCluster) { c.Name = "" }, `cluster "": name or SNI "8080" is empty or no UTF-8`},
		{"no SNI", func(c *resource.ServiceCluster) { c.SNI = "" }, `cluster "payments.aether.internal": name or SNI "" is empty or no UTF-8`},
		{"local name", func(c *resource.ServiceCluster) { c.Name = "app|x|1" }, `cluster "app|x|1": a "|" is for local names`},
		{"unknown protocol", func(c *resource.ServiceCluster) { c.Protocol = port.Unknown }, `cluster payments.aether.internal: protocol "unknown" is not routable`},
		{"no identity", func(c *resource.ServiceCluster) { c.Identities = nil }, `cluster payments.aether.internal: no identity to pin the server to; publish a tombstone`},
		{"no trust domain", func(c *resource.ServiceCluster) { c.TrustDomain = "" }, `cluster payments.aether.internal: trust domain "" is empty or malformed`},
		{"foreign identity", func(c *resource.ServiceCluster) { c.Identities = []string{"spiffe://other/ns/a/sa/b"} }, `cluster payments.aether.internal: identity "spiffe://other/ns/a/sa/b" is not of trust domain td.test`},
		{"bare trust domain", func(c *resource.ServiceCluster) { c.Identities = []string{"spiffe://td.test/"} }, `cluster payments.aether.internal: identity "spiffe://td.test/" is not of trust domain td.test`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := serviceClusters()[0]
			tt.edit(&c)
			if _, err := resource.Cluster(c); err == nil || err.Error() != tt.want {
				t.Errorf("got %v\nwant %s", err, tt.want)
			}
		})
	}
}

// Every regular expression that is sent anywhere is matched as a whole, and is in
// this table with what it must and must not match (XDS-49, MESH-12). An expression
// that is not in the table fails the test.
func TestRegexes(t *testing.T) {
	tables := map[string]struct{ match, refuse []string }{
		"(8080|p-8080)?": {[]string{"", "8080", "p-8080"}, []string{"9090", "p-9090", "08080", "18080", "80801", "8080.payments.default", "p-", "P-8080", "8080 "}},
		"(9090|p-9090)?": {[]string{"", "9090", "p-9090"}, []string{"8080", "90900"}},
		".+":             {[]string{"a", "8080", "payments.aether.internal"}, []string{""}},
		"[^:]*|" + authority.PortRegex(): {
			[]string{"payments.aether.internal", "payments.aether.internal:7777", "PAYMENTS.aether.internal:1", "p:65535"},
			[]string{"p:", "p:0", "p:08080", "p:65536", "p:80a", "p:1:2", "::1", "p: 80"},
		},
		authority.MeshRegex(domain): {
			[]string{"payments.aether.internal", "payments.default.aether.internal:9090", "p.aether.internal:65535"},
			[]string{"evil.com", "aether.internal", "a.b.c.aether.internal", "p.aether.internal:0", "p.aether.internal.evil.com", "P.aether.internal", "xds|registrar", "198.18.0.10:5432"},
		},
	}
	seen := make(map[string]bool)
	for _, s := range shapes(t) {
		for _, r := range s.resources {
			eachMessage(t, r, func(m proto.Message) {
				switch m := m.(type) {
				case *matcherv3.RegexMatcher:
					seen[m.GetRegex()] = true
				case *xdsmatcherv3.RegexMatcher:
					seen[m.GetRegex()] = true
				}
			})
		}
	}
	for expression := range seen {
		table, ok := tables[expression]
		if !ok {
			t.Errorf("%q is sent and not tested", expression)
			continue
		}
		whole := regexp.MustCompile(`\A(?:` + expression + `)\z`)
		for _, s := range table.match {
			if !whole.MatchString(s) {
				t.Errorf("%q must match %q", expression, s)
			}
		}
		for _, s := range table.refuse {
			if whole.MatchString(s) {
				t.Errorf("%q must not match %q", expression, s)
			}
		}
	}
	if len(seen) != len(tables) {
		t.Errorf("%d expressions are sent, %d tested: %v", len(seen), len(tables), seen)
	}
}

// The table keeps the virtual hosts as they were built, sorted, then all that is
// refused in one, and the catch-all at the end; domains are unique, as Envoy demands.
func TestRoutes(t *testing.T) {
	routes := resource.Routes(table(false))
	var names []string
	domains := make(map[string]bool)
	for _, v := range routes.GetVirtualHosts() {
		names = append(names, v.GetName())
		for _, d := range v.GetDomains() {
			if domains[d] {
				t.Errorf("domain %q is there twice", d)
			}
			domains[d] = true
		}
	}
	if want := []string{"payments", "payments:9090", "|refused", "|any"}; !slices.Equal(names, want) {
		t.Errorf("got %q, want %q", names, want)
	}
	if routes.GetName() != resource.RoutesName || routes.GetValidateClusters().GetValue() {
		t.Errorf("name %q, validate_clusters %v", routes.GetName(), routes.GetValidateClusters())
	}
	// A route that names a cluster never refuses by itself, and one that refuses names
	// none: a stale virtual host cannot shadow what is asked for on demand (MESH-11).
	for _, v := range routes.GetVirtualHosts() {
		for _, r := range v.GetRoutes() {
			if r.GetRoute() != nil && r.GetRoute().GetTimeout().AsDuration() != 0 {
				t.Errorf("%s: a route has a timeout", v.GetName())
			}
		}
	}
}

// catalogue is a table of n services with two ports each.
func catalogue(n int) resource.RouteTable {
	t := resource.RouteTable{Domain: domain}
	for i := range n {
		flat := fmt.Sprintf("service-%d.%s", i, domain)
		spaced := fmt.Sprintf("service-%d.default.%s", i, domain)
		for _, v := range []resource.VirtualHost{
			{Name: flat, Domains: []string{flat, flat + ":8080", spaced, spaced + ":8080"}, Cluster: flat},
			{Name: flat + ":9090", Domains: []string{flat + ":9090", spaced + ":9090"}, Cluster: flat + ":9090"},
			{Name: flat + ":*", Domains: []string{flat + ":*", spaced + ":*"}},
		} {
			t.VirtualHosts = append(t.VirtualHosts, resource.NewVirtualHost(v))
		}
	}
	return t
}

// 3,000 services with two ports each: what one change of the catalogue
// costs the registrar, with the hosts already built, and what goes on the wire.
func BenchmarkRoutes(b *testing.B) {
	t := catalogue(3000)
	b.Run("build", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			resource.Routes(t)
		}
	})
	b.Run("marshal", func(b *testing.B) {
		routes := resource.Routes(t)
		b.ReportAllocs()
		for b.Loop() {
			b.SetBytes(int64(len(marshal(b, routes))))
		}
	})
}

// One pod with eight ports; one service cluster; a load assignment of 100.
func BenchmarkBuilders(b *testing.B) {
	pod := podSpec(b, "c1-eth0", "payments", "payments", "8080 8081 8082 8083 9090=h2 9091=h2 5432=tcp 6379=tcp")
	b.Run("inbound", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := resource.Inbound(pod); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cluster", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := resource.Cluster(serviceClusters()[0]); err != nil {
				b.Fatal(err)
			}
		}
	})
	a := resource.LoadAssignment{Name: "payments." + domain, Self: model.Locality{Region: "r1", Zone: "a"}}
	for i := range 100 {
		a.Endpoints = append(a.Endpoints, resource.Endpoint{
			Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), resource.InboundPort), Weight: 1,
			Locality: model.Locality{Region: "r1", Zone: string(rune('a' + i%3))},
		})
	}
	b.Run("endpoints-100", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			resource.Endpoints(a)
		}
	})
}
