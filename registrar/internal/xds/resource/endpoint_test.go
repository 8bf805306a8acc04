package resource_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// loadAssignment is a case of the load assignment builder.
type loadAssignment struct {
	name string
	resource.LoadAssignment
	want string // "priority region/zone: address[*weight][ draining]..." per group
}

func loadAssignments() []loadAssignment {
	at := func(ip string, l model.Locality) resource.Endpoint {
		return resource.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(ip), resource.InboundPort), Weight: 1, Locality: l}
	}
	var (
		none  model.Locality
		self  = model.Locality{Region: "r1", Zone: "a"}
		near  = model.Locality{Region: "r1", Zone: "b"}
		away  = model.Locality{Region: "r2", Zone: "a"}
		heavy = at("10.0.0.9", none)
		drain = at("10.0.0.3", none)
	)
	heavy.Weight, drain.Draining = 7, true
	reused, mapped := at("10.0.0.1", self), at("10.0.0.1", self)
	reused.Draining, reused.Weight = true, 9
	mapped.Addr = netip.MustParseAddrPort("[::ffff:10.0.0.1]:15008")
	name := "payments." + domain
	return []loadAssignment{
		{"nobody", resource.LoadAssignment{Name: name}, ""},
		{"no locality", resource.LoadAssignment{Name: name, Endpoints: []resource.Endpoint{heavy, at("10.0.0.10", none), at("fd00::1", none), drain}}, "0: 10.0.0.3 draining, 10.0.0.9*7, 10.0.0.10, [fd00::1]"},
		{"all near", resource.LoadAssignment{Name: name, Self: self, Endpoints: []resource.Endpoint{at("10.0.0.2", self), at("10.0.0.1", self)}}, "0 r1/a: 10.0.0.1, 10.0.0.2"},
		{
			"three distances",
			resource.LoadAssignment{Name: name, Self: self, Endpoints: []resource.Endpoint{at("10.0.0.1", away), at("10.0.0.2", near), at("10.0.0.3", self), at("10.0.0.4", none)}},
			"0 r1/a: 10.0.0.3; 1 r1/b: 10.0.0.2; 2: 10.0.0.4; 2 r2/a: 10.0.0.1",
		},
		{"no gap", resource.LoadAssignment{Name: name, Self: self, Endpoints: []resource.Endpoint{at("10.0.0.1", away), at("10.0.0.3", self)}}, "0 r1/a: 10.0.0.3; 1 r2/a: 10.0.0.1"},
		{"only far", resource.LoadAssignment{Name: name, Self: self, Endpoints: []resource.Endpoint{at("10.0.0.1", away)}}, "0 r2/a: 10.0.0.1"},
		{"node without locality", resource.LoadAssignment{Name: name, Endpoints: []resource.Endpoint{at("10.0.0.1", away), at("10.0.0.3", self)}}, "0 r1/a: 10.0.0.3; 0 r2/a: 10.0.0.1"},
		{"same region, no zones", resource.LoadAssignment{Name: name, Self: model.Locality{Region: "r1"}, Endpoints: []resource.Endpoint{at("10.0.0.1", model.Locality{Region: "r1"}), at("10.0.0.2", away)}}, "0 r1/: 10.0.0.1; 1 r2/a: 10.0.0.2"},
		{"re-used address", resource.LoadAssignment{Name: name, Self: self, Endpoints: []resource.Endpoint{reused, mapped, at("10.0.0.2", self)}}, "0 r1/a: 10.0.0.1, 10.0.0.2"},
		{"weight 0", resource.LoadAssignment{Name: name, Endpoints: []resource.Endpoint{{Addr: netip.MustParseAddrPort("10.0.0.1:15008")}}}, "0: 10.0.0.1"},
	}
}

// Load assignments: nearer localities first, priorities without a gap, each address
// once, weights and drains as they are, empty allowed (contract 1, 4.6, XDS-35).
func TestEndpoints(t *testing.T) {
	for _, tt := range loadAssignments() {
		t.Run(tt.name, func(t *testing.T) {
			got := resource.Endpoints(tt.LoadAssignment)
			if got.GetClusterName() != tt.Name {
				t.Errorf("the name is %q", got.GetClusterName())
			}
			if text := describe(got); text != tt.want {
				t.Errorf("got  %s\nwant %s", text, tt.want)
			}
		})
	}
}

// describe writes a load assignment in one line.
func describe(a *endpointv3.ClusterLoadAssignment) string {
	var groups []string
	for _, g := range a.GetEndpoints() {
		group := fmt.Sprint(g.GetPriority())
		if l := g.GetLocality(); l != nil {
			group += " " + l.GetRegion() + "/" + l.GetZone()
		}
		var hosts []string
		for _, e := range g.GetLbEndpoints() {
			address := e.GetEndpoint().GetAddress().GetSocketAddress()
			host := address.GetAddress()
			if strings.Contains(host, ":") {
				host = "[" + host + "]"
			}
			if address.GetPortValue() != resource.InboundPort {
				host += fmt.Sprint(":", address.GetPortValue())
			}
			if w := e.GetLoadBalancingWeight().GetValue(); w != 1 {
				host += fmt.Sprint("*", w)
			}
			if e.GetHealthStatus().String() == "DRAINING" {
				host += " draining"
			}
			hosts = append(hosts, host)
		}
		groups = append(groups, group+": "+strings.Join(hosts, ", "))
	}
	return strings.Join(groups, "; ")
}
