package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// wire returns a record as a writer of this version sends it.
func wire() *endpointv1.ServiceEndpoint {
	return &endpointv1.ServiceEndpoint{
		Ip: "10.1.0.1", ClusterName: "payments.shop.aether.internal", Port: 8080, Weight: 7,
		Locality:           &endpointv1.Locality{Region: "eu", Zone: "eu-1"},
		Metadata:           map[string]string{"version": "v2"},
		ContainerMetadata:  &endpointv1.ContainerMetadata{ContainerId: "c1"},
		KubernetesMetadata: &endpointv1.KubernetesMetadata{Namespace: "shop", PodName: "payments-1", NodeName: "n1", NodeIp: "192.0.2.7"},
		Health:             endpointv1.Health_HEALTH_HEALTHY,
		Ports:              []uint32{5432, 8080, 9090},
		PortProtocols:      map[uint32]string{5432: "tcp", 9090: "h2"},
		PortHealth:         map[uint32]endpointv1.Health{9090: endpointv1.Health_HEALTH_UNHEALTHY, 5432: endpointv1.Health_HEALTH_DRAINING},
		Addresses:          []string{"10.1.0.1", "fd00::1"},
		ServiceAccount:     "checkout", TrustDomain: "aether.internal", PodUid: "u1", Service: "payments", Generation: 42,
		SinceUnixNanos: 1_700_000_000_000_000_001,
	}
}

// read returns what wire means.
func read() model.Endpoint {
	return model.Endpoint{
		UID: "c1-eth0", Generation: 42, Since: time.Unix(1_700_000_000, 1).UTC(),
		Service:   model.ServiceKey{Namespace: "shop", Name: "payments"},
		Identity:  model.Identity{TrustDomain: "aether.internal", Namespace: "shop", Account: "checkout"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")},
		Default:   8080,
		Ports: []model.PortStatus{
			{Port: port.Port{Number: 5432, Protocol: port.TCP}, Health: model.Draining},
			{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy},
			{Port: port.Port{Number: 9090, Protocol: port.H2}, Health: model.Unhealthy},
		},
		Weight: 7, Locality: model.Locality{Region: "eu", Zone: "eu-1"}, Metadata: map[string]string{"version": "v2"},
		PodName: "payments-1", PodUID: "u1", Node: "n1", ContainerID: "c1",
	}
}

// What each field of a record means to this version, and what of it is left out
// and said (contract 3, MESH-8).
func TestFromProto(t *testing.T) {
	for _, tt := range []struct {
		name    string
		wire    func(*endpointv1.ServiceEndpoint)
		read    func(*model.Endpoint)
		leftOut []string
	}{
		{"as it is", func(*endpointv1.ServiceEndpoint) {}, func(*model.Endpoint) {}, nil},
		{
			"no ports: the default port, http",
			func(x *endpointv1.ServiceEndpoint) { x.Ports, x.PortProtocols, x.PortHealth = nil, nil, nil },
			func(e *model.Endpoint) {
				e.Ports = []model.PortStatus{{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy}}
			}, nil,
		},
		{
			"a pure client",
			func(x *endpointv1.ServiceEndpoint) {
				x.Port, x.Ports, x.PortProtocols, x.PortHealth = 0, nil, nil, nil
			},
			func(e *model.Endpoint) { e.Default, e.Ports = 0, nil }, nil,
		},
		{
			"the default port is always in the set",
			func(x *endpointv1.ServiceEndpoint) { x.Port, x.PortProtocols[7000] = 7000, "h2" },
			func(e *model.Endpoint) {
				e.Default = 7000
				e.Ports = append(e.Ports[:1:1], model.PortStatus{Port: port.Port{Number: 7000, Protocol: port.H2}, Health: model.Healthy}, e.Ports[1], e.Ports[2])
			}, nil,
		},
		{
			"ports out of order and doubled",
			func(x *endpointv1.ServiceEndpoint) { x.Ports = []uint32{9090, 8080, 5432, 8080} },
			func(*model.Endpoint) {}, nil,
		},
		{
			"health not said is unhealthy",
			func(x *endpointv1.ServiceEndpoint) {
				x.Health, x.PortHealth[5432] = endpointv1.Health_HEALTH_UNSPECIFIED, endpointv1.Health_HEALTH_UNSPECIFIED
			},
			func(e *model.Endpoint) { e.Ports[0].Health, e.Ports[1].Health = model.Unhealthy, model.Unhealthy }, nil,
		},
		{
			"a health of a newer version is unhealthy, and said",
			func(x *endpointv1.ServiceEndpoint) { x.Health, x.PortHealth[5432] = 8, 9 },
			func(e *model.Endpoint) { e.Ports[0].Health, e.Ports[1].Health = model.Unhealthy, model.Unhealthy },
			[]string{
				"health: 8 is not known to this version, it counts as unhealthy",
				"port_health[5432]: 9 is not known to this version, it counts as unhealthy",
			},
		},
		{
			"a protocol of a newer version makes its port unroutable, never http",
			func(x *endpointv1.ServiceEndpoint) { x.PortProtocols[8080] = "h3" },
			func(e *model.Endpoint) { e.Ports[1].Protocol = port.Unknown },
			[]string{`port 8080: protocol "h3" is not known to this version, the port is not routed`},
		},
		{
			"aliases of protocols",
			func(x *endpointv1.ServiceEndpoint) { x.PortProtocols[9090], x.PortProtocols[8080] = "grpc", "http" },
			func(*model.Endpoint) {}, nil,
		},
		{
			"entries of ports that are not there",
			func(x *endpointv1.ServiceEndpoint) {
				x.PortProtocols[2], x.PortHealth[1] = "tcp", endpointv1.Health_HEALTH_HEALTHY
			},
			func(*model.Endpoint) {},
			[]string{"port_protocols[2]: the record has no such port", "port_health[1]: the record has no such port"},
		},
		{
			"no weight",
			func(x *endpointv1.ServiceEndpoint) { x.Weight = 0 },
			func(e *model.Endpoint) { e.Weight = 1 }, nil,
		},
		{
			"no addresses",
			func(x *endpointv1.ServiceEndpoint) { x.Addresses = nil },
			func(e *model.Endpoint) { e.Addresses = e.Addresses[:1] }, nil,
		},
		{
			"addresses without the primary one, doubled, in other spellings",
			func(x *endpointv1.ServiceEndpoint) {
				x.Addresses = []string{"fd00::1", "FD00:0::1", "::ffff:10.1.0.1"}
			},
			func(*model.Endpoint) {}, nil,
		},
		{
			"an address that no pod has",
			func(x *endpointv1.ServiceEndpoint) { x.Addresses = append(x.Addresses, "224.0.0.1", "::") },
			func(*model.Endpoint) {},
			[]string{"address 224.0.0.1 is no address of a pod", "address :: is no address of a pod"},
		},
		{
			"an older writer without service and namespace",
			func(x *endpointv1.ServiceEndpoint) {
				x.Service, x.KubernetesMetadata, x.ClusterName = "", nil, "stock.aether.internal"
			},
			func(e *model.Endpoint) {
				e.Service = model.ServiceKey{Namespace: "default", Name: "stock"}
				e.Identity.Namespace, e.PodName, e.Node = "default", "", ""
			}, nil,
		},
		{
			"an older writer without since and generation",
			func(x *endpointv1.ServiceEndpoint) { x.SinceUnixNanos, x.Generation = 0, 0 },
			func(e *model.Endpoint) { e.Since, e.Generation = time.Time{}, 0 }, nil,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			se, want := wire(), read()
			tt.wire(se)
			tt.read(&want)
			got, leftOut, err := FromProto("c1-eth0", se)
			if err != nil {
				t.Fatal(err)
			}
			if d := diff(want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			if d := diff(tt.leftOut, leftOut); d != "" {
				t.Errorf("left out (-want +got):\n%s", d)
			}
		})
	}
}

// A record that cannot be used says why, with its UID: nobody is ever sent to a pod
// whose identity could not be pinned (MESH-26, MESH-27).
func TestFromProtoRefuses(t *testing.T) {
	for _, tt := range []struct {
		wire func(*endpointv1.ServiceEndpoint)
		want string
	}{
		{func(x *endpointv1.ServiceEndpoint) { x.TrustDomain = "" }, `record "c1-eth0": trust_domain or service_account is missing`},
		{func(x *endpointv1.ServiceEndpoint) { x.ServiceAccount = "" }, `record "c1-eth0": trust_domain or service_account is missing`},
		{func(x *endpointv1.ServiceEndpoint) { x.ServiceAccount = "a/b" }, `record "c1-eth0": service_account: "a/b" is no segment of a SPIFFE ID`},
		{func(x *endpointv1.ServiceEndpoint) { x.Service, x.ClusterName = "", "" }, `record "c1-eth0": service "shop/" is not two DNS labels`},
		{func(x *endpointv1.ServiceEndpoint) { x.Service, x.ClusterName = "", "A_B.aether.internal" }, `record "c1-eth0": service "shop/A_B" is not two DNS labels`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "0.0.0.0" }, `record "c1-eth0": address 0.0.0.0 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "ff02::1" }, `record "c1-eth0": address ff02::1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "255.255.255.255" }, `record "c1-eth0": address 255.255.255.255 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "127.0.0.1" }, `record "c1-eth0": address 127.0.0.1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "127.8.0.1" }, `record "c1-eth0": address 127.8.0.1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "::1" }, `record "c1-eth0": address ::1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "::ffff:127.0.0.1" }, `record "c1-eth0": address 127.0.0.1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "169.254.169.254" }, `record "c1-eth0": address 169.254.169.254 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "fe80::1" }, `record "c1-eth0": address fe80::1 is no address of a pod`},
		{func(x *endpointv1.ServiceEndpoint) { x.Port = 15008 }, `record "c1-eth0": port 15008 belongs to the mesh`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ports = append(x.Ports, 15001) }, `record "c1-eth0": port 15001 belongs to the mesh`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ports = append(x.Ports, 15002) }, `record "c1-eth0": port 15002 belongs to the mesh`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ports = append(x.Ports, 15053) }, `record "c1-eth0": port 15053 belongs to the mesh`},
		{func(x *endpointv1.ServiceEndpoint) { x.Ip = "pod" }, `record "c1-eth0": ip: "pod" is not an IP address without zone`},
		{func(x *endpointv1.ServiceEndpoint) { x.Port = 0 }, `record "c1-eth0": port: is missing although ports has 3`},
		{func(x *endpointv1.ServiceEndpoint) { x.Weight = 70_000 }, `record "c1-eth0": weight: 70000 is not in 1-65535`},
	} {
		se := wire()
		tt.wire(se)
		if got, _, err := FromProto("c1-eth0", se); err == nil || err.Error() != tt.want {
			t.Errorf("got  %+v, %v\nwant %s", got, err, tt.want)
		}
	}
	for _, uid := range []string{"", strings.Repeat("u", MaxUID+1)} {
		if _, _, err := FromProto(uid, wire()); err == nil {
			t.Errorf("a UID of %d bytes is accepted", len(uid))
		}
	}
}

// ToProto writes exactly what contract 3 says, and FromProto reads it back.
func TestToProto(t *testing.T) {
	got, err := ToProto(read(), "payments.shop.aether.internal")
	if err != nil {
		t.Fatal(err)
	}
	want := wire()
	want.KubernetesMetadata.NodeIp = "" // not known to the model
	if !proto.Equal(want, got) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	client := read()
	client.Default, client.Ports, client.Since, client.Locality, client.Metadata = 0, nil, time.Time{}, model.Locality{}, nil
	unknown := read()
	unknown.Ports[2].Protocol = port.Unknown
	for name, ep := range map[string]model.Endpoint{"as it is": read(), "pure client": client, "unknown protocol stays unknown": unknown} {
		se, err := ToProto(ep, "x")
		if err != nil {
			t.Fatal(err)
		}
		back, _, err := FromProto(ep.UID, se)
		if d := diff(ep, back); err != nil || d != "" {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, d)
		}
	}
}

// What is no record is refused before anybody sees it.
func TestToProtoRefuses(t *testing.T) {
	for _, tt := range []struct {
		change func(*model.Endpoint)
		want   string
	}{
		{func(e *model.Endpoint) { e.UID = "" }, `record "": a UID of 0 bytes: it must have 1 to 512`},
		{func(e *model.Endpoint) { e.Service.Name = "Payments" }, `record "c1-eth0": service "shop/Payments" is not two DNS labels`},
		{func(e *model.Endpoint) { e.Identity.TrustDomain = "" }, `record "c1-eth0": trust_domain or service_account is missing`},
		{func(e *model.Endpoint) { e.Identity.Namespace = "ops" }, `record "c1-eth0": identity spiffe://aether.internal/ns/ops/sa/checkout is not of the service's namespace shop`},
		{func(e *model.Endpoint) { e.Weight = 0 }, `record "c1-eth0": weight 0 is not in 1-65535`},
		{func(e *model.Endpoint) { e.Weight = 65_536 }, `record "c1-eth0": weight: 65536 is not in 1-65535`},
		{func(e *model.Endpoint) { e.Addresses = nil }, `record "c1-eth0": it has no address`},
		{func(e *model.Endpoint) { e.Addresses = []netip.Addr{{}} }, `record "c1-eth0": address invalid IP is no address of a pod`},
		{func(e *model.Endpoint) { e.Addresses = []netip.Addr{netip.MustParseAddr("fe80::1%eth0")} }, `record "c1-eth0": address fe80::1%eth0 is no address of a pod`},
		{func(e *model.Endpoint) { e.Addresses = []netip.Addr{netip.MustParseAddr("fe80::1")} }, `record "c1-eth0": address fe80::1 is no address of a pod`},
		{func(e *model.Endpoint) { e.Addresses[1] = netip.MustParseAddr("::1") }, `record "c1-eth0": address ::1 is no address of a pod`},
		{func(e *model.Endpoint) { e.Ports[2].Number = 15008 }, `record "c1-eth0": port 15008 belongs to the mesh`},
		{func(e *model.Endpoint) { e.Addresses = append(e.Addresses, e.Addresses[0]) }, `record "c1-eth0": address 10.1.0.1 is listed twice`},
		{func(e *model.Endpoint) { e.Default = 1 }, `record "c1-eth0": default port 1 is not among its 3 ports`},
		{func(e *model.Endpoint) { e.Ports = nil }, `record "c1-eth0": default port 8080 is not among its 0 ports`},
		{func(e *model.Endpoint) { e.Ports[1].Number = 5432 }, `record "c1-eth0": ports are not ascending from 1 at 5432`},
		{func(e *model.Endpoint) { e.Ports[0].Number = 0 }, `record "c1-eth0": ports are not ascending from 1 at 0`},
		{func(e *model.Endpoint) { e.Metadata["k"] = strings.Repeat("v", 254) }, `record "c1-eth0": metadata["k"]: 254 bytes, at most 253 are allowed`},
	} {
		ep := read()
		tt.change(&ep)
		if se, err := ToProto(ep, "x"); err == nil || err.Error() != tt.want {
			t.Errorf("got  %v, %v\nwant %s", se, err, tt.want)
		}
	}
}

// An address of link scope that a pod has besides others is its own affair: no other
// node could dial it, and the record goes out without it.
func TestToProtoLinkScope(t *testing.T) {
	ep := read()
	ep.Addresses = slices.Insert(ep.Addresses, 0, netip.MustParseAddr("fe80::1"))
	got, err := ToProto(ep, "")
	if err != nil {
		t.Fatal(err)
	}
	if want := wire(); got.GetIp() != want.GetIp() || !slices.Equal(got.GetAddresses(), want.GetAddresses()) || len(ep.Addresses) != 3 {
		t.Errorf("%s, %v of %v", got.GetIp(), got.GetAddresses(), ep.Addresses)
	}
}

// Neither direction shares memory (MESH-23).
func TestConversionCopies(t *testing.T) {
	se := wire()
	ep, _, err := FromProto("c1-eth0", se)
	if err != nil {
		t.Fatal(err)
	}
	se.Metadata["version"] = "spoilt"
	if d := diff(read(), ep); d != "" {
		t.Errorf("FromProto (-want +got):\n%s", d)
	}
	out, err := ToProto(ep, se.GetClusterName())
	if err != nil {
		t.Fatal(err)
	}
	out.Metadata["version"], out.Addresses[0] = "spoilt", "spoilt"
	if d := diff(read(), ep); d != "" {
		t.Errorf("ToProto (-want +got):\n%s", d)
	}
}

// FuzzFromProto holds: no bytes make it panic, what it accepts can be written, and
// what was written reads back to the same record.
func FuzzFromProto(f *testing.F) {
	for _, x := range []*endpointv1.ServiceEndpoint{wire(), {Ip: "10.0.0.1"}, {Ip: "::1", Port: 80, Service: "a", TrustDomain: "t", ServiceAccount: "a"}} {
		data, err := proto.Marshal(x)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		se := &endpointv1.ServiceEndpoint{}
		if proto.Unmarshal(data, se) != nil {
			return
		}
		ep, _, err := FromProto("u", se)
		if err != nil {
			return
		}
		again, err := ToProto(ep, "x")
		if err != nil && len(ep.Ports) <= endpointv1.MaxPorts && len(ep.Addresses) <= endpointv1.MaxAddresses {
			t.Fatalf("%+v cannot be written: %v", ep, err)
		}
		if err != nil {
			return
		}
		back, leftOut, err := FromProto("u", again)
		if d := diff(fmt.Sprintf("%+v", ep), fmt.Sprintf("%+v", back)); err != nil || d != "" {
			t.Fatalf("%v, %v (-want +got):\n%s", leftOut, err, d)
		}
	})
}

func BenchmarkToProto(b *testing.B) {
	ep := read()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ToProto(ep, "payments.shop.aether.internal"); err != nil {
			b.Fatal(err)
		}
	}
}
