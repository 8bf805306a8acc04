package endpointv1

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/limit"
)

// full returns a record that is at every limit at once.
func full() *ServiceEndpoint {
	x := &ServiceEndpoint{
		Ip:                 "2001:db8:1111:2222:3333:4444:5555:6666",
		ClusterName:        strings.Repeat("c", MaxName),
		Port:               65535,
		Weight:             MaxWeight,
		Locality:           &Locality{Region: strings.Repeat("r", MaxLocality), Zone: strings.Repeat("z", MaxLocality)},
		Metadata:           map[string]string{},
		ContainerMetadata:  &ContainerMetadata{ContainerId: strings.Repeat("i", MaxName)},
		KubernetesMetadata: &KubernetesMetadata{Namespace: strings.Repeat("n", 63), PodName: strings.Repeat("p", MaxName), NodeName: strings.Repeat("d", MaxName), NodeIp: "10.0.0.1"},
		Health:             Health_HEALTH_DRAINING,
		PortProtocols:      map[uint32]string{},
		PortHealth:         map[uint32]Health{},
		ServiceAccount:     strings.Repeat("A", MaxName),
		TrustDomain:        strings.Repeat("t", MaxTrustDomain),
		PodUid:             strings.Repeat("u", MaxPodUID),
		Service:            strings.Repeat("s", 63),
		Generation:         1<<64 - 1,
		SinceUnixNanos:     1<<63 - 1,
	}
	for i := range MaxMetadata {
		x.Metadata[fmt.Sprintf("%0*d", MaxMetadataKey, i)] = strings.Repeat("v", MaxMetadataValue)
	}
	for i := range uint32(MaxPorts) {
		n := 65535 - i
		x.Ports = append(x.Ports, n)
		x.PortProtocols[n] = strings.Repeat("q", MaxProtocol)
		x.PortHealth[n] = Health(99)
	}
	for i := range MaxAddresses {
		x.Addresses = append(x.Addresses, fmt.Sprintf("10.0.0.%d", i))
	}
	return x
}

// What is exactly at the limits of endpoint.proto passes, and so does a record of
// an older writer that has none of the newer fields (MESH-8).
func TestValidateAccepts(t *testing.T) {
	for name, x := range map[string]*ServiceEndpoint{
		"at every limit": full(),
		"older writer":   {Ip: "10.0.0.1", ClusterName: "payments.aether.internal", Port: 8080},
		"pure client":    {Ip: "10.0.0.1"},
	} {
		if err := x.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// One past each limit, and each bad form, is refused with field, what was met and
// the limit (contract 3).
func TestValidateRefuses(t *testing.T) {
	for _, tt := range []struct {
		change func(*ServiceEndpoint)
		want   string
	}{
		{func(x *ServiceEndpoint) { x.Ip = "" }, `ip: "" is not an IP address without zone`},
		{func(x *ServiceEndpoint) { x.Ip = "10.0.0.01" }, `ip: "10.0.0.01" is not an IP address without zone`},
		{func(x *ServiceEndpoint) { x.Ip = "fe80::1%eth0" }, `ip: "fe80::1%eth0" is not an IP address without zone`},
		{func(x *ServiceEndpoint) { x.Ip = strings.Repeat("1", 46) }, `ip: 46 bytes, at most 45 are allowed`},
		{func(x *ServiceEndpoint) { x.ClusterName += "c" }, `cluster_name: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.Port = 65536 }, `port: 65536 is not in 1-65535`},
		{func(x *ServiceEndpoint) { x.Port = 0 }, `port: is missing although ports has 64`},
		{func(x *ServiceEndpoint) { x.Weight = 65536 }, `weight: 65536 is not in 1-65535`},
		{func(x *ServiceEndpoint) { x.Locality.Region += "r" }, `locality.region: 64 bytes, at most 63 are allowed`},
		{func(x *ServiceEndpoint) { x.Locality.Zone += "z" }, `locality.zone: 64 bytes, at most 63 are allowed`},
		{func(x *ServiceEndpoint) { x.Metadata["x"] = "" }, `metadata: 33 entries, at most 32 are allowed`},
		{func(x *ServiceEndpoint) { x.Metadata = map[string]string{strings.Repeat("k", 64): ""} }, `metadata: key "kkkkkkkkkkkkkkkk"... of 64 bytes, at most 63 are allowed`},
		{func(x *ServiceEndpoint) { x.Metadata = map[string]string{"k": strings.Repeat("v", 254)} }, `metadata["k"]: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.ContainerMetadata.ContainerId += "i" }, `container_metadata.container_id: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.KubernetesMetadata.Namespace = "Shop" }, `kubernetes_metadata.namespace: "Shop" is no DNS label`},
		{func(x *ServiceEndpoint) { x.KubernetesMetadata.PodName += "p" }, `kubernetes_metadata.pod_name: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.KubernetesMetadata.NodeName += "p" }, `kubernetes_metadata.node_name: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.KubernetesMetadata.NodeIp = "node" }, `kubernetes_metadata.node_ip: "node" is not an IP address without zone`},
		{func(x *ServiceEndpoint) { x.Ports = append(x.Ports, 1) }, `ports: 65 entries, at most 64 are allowed`},
		{func(x *ServiceEndpoint) { x.Ports[1] = 0 }, `ports[1]: 0 is not in 1-65535`},
		{func(x *ServiceEndpoint) { x.Ports[63] = 65536 }, `ports[63]: 65536 is not in 1-65535`},
		{func(x *ServiceEndpoint) { x.PortProtocols[1] = "" }, `port_protocols: 65 entries, at most 64 are allowed`},
		{func(x *ServiceEndpoint) { x.PortProtocols[65535] += "q" }, `port_protocols[65535]: 17 bytes, at most 16 are allowed`},
		{func(x *ServiceEndpoint) { x.PortHealth[1] = 0 }, `port_health: 65 entries, at most 64 are allowed`},
		{func(x *ServiceEndpoint) { x.Addresses = append(x.Addresses, "10.0.0.9") }, `addresses: 9 entries, at most 8 are allowed`},
		{func(x *ServiceEndpoint) { x.Addresses[7] = "x" }, `addresses[7]: "x" is not an IP address without zone`},
		{func(x *ServiceEndpoint) { x.ServiceAccount += "a" }, `service_account: 254 bytes, at most 253 are allowed`},
		{func(x *ServiceEndpoint) { x.ServiceAccount = "a/../b" }, `service_account: "a/../b" is no segment of a SPIFFE ID`},
		{func(x *ServiceEndpoint) { x.ServiceAccount = ".." }, `service_account: ".." is no segment of a SPIFFE ID`},
		{func(x *ServiceEndpoint) { x.TrustDomain += "t" }, `trust_domain: 256 bytes, at most 255 are allowed`},
		{func(x *ServiceEndpoint) { x.TrustDomain = "Aether.internal" }, `trust_domain: "Aether.internal" is no SPIFFE trust domain`},
		{func(x *ServiceEndpoint) { x.TrustDomain = "a/ns/b" }, `trust_domain: "a/ns/b" is no SPIFFE trust domain`},
		{func(x *ServiceEndpoint) { x.PodUid += "u" }, `pod_uid: 129 bytes, at most 128 are allowed`},
		{func(x *ServiceEndpoint) { x.Service = "a.b" }, `service: "a.b" is no DNS label`},
		{func(x *ServiceEndpoint) { x.SinceUnixNanos = -1 }, `since_unix_nanos: -1 is before 1970`},
	} {
		x := full()
		tt.change(x)
		err := x.Validate()
		var field *limit.FieldError
		if !errors.As(err, &field) || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
	}
	if err := (*ServiceEndpoint)(nil).Validate(); err == nil {
		t.Error("nil is accepted")
	}
}

// FuzzValidate holds: no bytes from another registrar make Validate panic, and its
// verdict is the same after the record was written again.
func FuzzValidate(f *testing.F) {
	for _, x := range []*ServiceEndpoint{full(), {}, {Ip: "10.0.0.1", Port: 8080}, {Ip: "::1", Ports: []uint32{0}}} {
		data, err := proto.Marshal(x)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		x := &ServiceEndpoint{}
		if proto.Unmarshal(data, x) != nil {
			return
		}
		again := &ServiceEndpoint{}
		written, err := proto.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(written, again); err != nil {
			t.Fatal(err)
		}
		if one, two := x.Validate(), again.Validate(); fmt.Sprint(one) != fmt.Sprint(two) {
			t.Fatalf("%v, then %v", one, two)
		}
	})
}
