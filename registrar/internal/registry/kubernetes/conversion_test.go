package kubernetes

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/registrytest"
)

// A record is read back from its object as it was, and the object shows what kubectl
// prints.
func TestRoundTrip(t *testing.T) {
	client := registrytest.Endpoint("c-eth0", 3)
	client.Default, client.Ports, client.Metadata, client.Locality = 0, nil, nil, model.Locality{}
	for _, ep := range []model.Endpoint{registrytest.Endpoint("a-eth0", 1_700_000_000_000_000_001), client} {
		object, err := objectOf(ep, "payments.shop.aether.internal")
		must(t, err)
		got, leftOut, err := recordOf(object)
		must(t, err)
		if d := cmp.Diff(ep, got, cmpopts.EquateComparable(ep.Addresses[0])); d != "" || leftOut != nil {
			t.Errorf("left out %v, -want +got:\n%s", leftOut, d)
		}
	}
	object, err := objectOf(registrytest.Endpoint("a-eth0", 1), "payments.shop.aether.internal")
	must(t, err)
	if s := object.Spec; s.Ports != "5432=tcp,8080,9090=h2" || s.Health != v1alpha1.Healthy || s.PortHealth["5432"] != v1alpha1.Draining || s.ClusterName != "payments.shop.aether.internal" {
		t.Errorf("the object is %+v", s)
	}
}

// An object belongs to its pod, when the API server knows the pod by this UID.
func TestOwner(t *testing.T) {
	for uid, owners := range map[string]int{"": 0, "a3f5c6d7e8f90123456789abcdef0123": 0, "4c0b6ad5-0000-4000-8000-000000000001": 1} {
		ep := registrytest.Endpoint("a-eth0", 1)
		ep.PodUID = uid
		object, err := objectOf(ep, "")
		must(t, err)
		if len(object.OwnerReferences) != owners || owners == 1 && (object.OwnerReferences[0].Name != ep.PodName || string(object.OwnerReferences[0].UID) != uid) {
			t.Errorf("with the UID %q it belongs to %v", uid, object.OwnerReferences)
		}
	}
}

// What cannot be used is left out and named, or the object as a whole is (MESH-8,
// contract 3). An older writer's object means what it meant.
func TestReading(t *testing.T) {
	for _, tt := range []struct {
		name    string
		change  func(*v1alpha1.ServiceEndpoint)
		leftOut string
		err     string
		want    func(*model.Endpoint)
	}{
		{name: "unknown protocol", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,9090=h3" }, leftOut: `port 9090: protocol "h3"`, want: func(ep *model.Endpoint) {
			ep.Ports = []model.PortStatus{{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy}, {Port: port.Port{Number: 9090, Protocol: port.Unknown}}}
		}},
		{name: "no ports", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports, o.Spec.PortHealth = "", nil }, want: func(ep *model.Endpoint) { ep.Ports = ep.Ports[1:2] }},
		{name: "no health", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Health = "" }, want: func(ep *model.Endpoint) { ep.Ports[1].Health = model.Unhealthy }},
		{name: "unknown health", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Health = "Ill" }, leftOut: `health: "Ill"`, want: func(ep *model.Endpoint) { ep.Ports[1].Health = model.Unhealthy }},
		{name: "health of no port", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.PortHealth["x"] = v1alpha1.Healthy }, leftOut: `portHealth: "x"`},
		{name: "no weight", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Weight = 0 }, want: func(ep *model.Endpoint) { ep.Weight = 1 }},
		{name: "no addresses", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Addresses = nil }, want: func(ep *model.Endpoint) { ep.Addresses = ep.Addresses[:1] }},
		{name: "namespace is the object's", change: func(o *v1alpha1.ServiceEndpoint) { o.Namespace = "other" }, want: func(ep *model.Endpoint) { ep.Service.Namespace, ep.Identity.Namespace = "other", "other" }},
		{name: "port 0", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,0" }, err: `ports: "0"`},
		{name: "port too large", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,65536" }, err: `"65536"`},
		{name: "port twice", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,8080=tcp" }, err: "8080 is listed twice"},
		{name: "negative weight", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Weight = -1 }, err: "weight -1 is negative"},
		{name: "no address of a pod", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.IP = "0.0.0.0" }, err: "0.0.0.0"},
		{name: "loopback address", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.IP = "127.0.0.1" }, err: "127.0.0.1 is no address of a pod"},
		{name: "further address of link scope", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Addresses[1] = "fe80::1" }, leftOut: "address fe80::1 is no address of a pod", want: func(ep *model.Endpoint) { ep.Addresses = ep.Addresses[:1] }},
		{name: "port of the mesh", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,15008=h2" }, err: "port 15008 belongs to the mesh"},
		{name: "no account", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.ServiceAccount = "" }, err: "service_account"},
		{name: "no UID", change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.UID = "" }, err: "UID of 0 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := registrytest.Endpoint("a-eth0", 1)
			object, err := objectOf(want, "")
			must(t, err)
			tt.change(object)
			got, leftOut, err := recordOf(object)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v, want %q", err, tt.err)
				}
				return
			}
			must(t, err)
			if tt.want != nil {
				tt.want(&want)
			}
			if d := cmp.Diff(want, got, cmpopts.EquateComparable(want.Addresses[0])); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			if text := strings.Join(leftOut, "; "); !strings.Contains(text, tt.leftOut) || tt.leftOut == "" && text != "" {
				t.Errorf("left out: %q, want %q", text, tt.leftOut)
			}
		})
	}
}

// A name is one of Kubernetes, says which pod and sandbox it is of, and is another
// for every other record.
func TestObjectName(t *testing.T) {
	long := strings.Repeat("a.", 126) + "a"
	names := map[string]string{}
	for _, tt := range []struct{ pod, container, ifname, want string }{
		{"payments-1", "0123456789abcdef", "eth0", "payments-1-0123456789ab"},
		{"payments-1", "0123456789abcdef", "net1", "payments-1-"},
		{"payments-1", "1123456789abcdef", "eth0", "payments-1-1123456789ab"},
		{"payments-1", "short", "eth0", "payments-1-"},
		{"payments-1", "UPPER-0123456789", "eth0", "payments-1-"},
		{long, "0123456789abcdef", "eth0", "a.a.a"},
		{"Not_A_Name", "0123456789abcdef", "eth0", "pod-0123456789ab"},
		{"", "2123456789abcdef", "eth0", "pod-2123456789ab"},
	} {
		ep := model.Endpoint{UID: tt.container + "-" + tt.ifname, PodName: tt.pod, ContainerID: tt.container}
		name := objectName(ep)
		if bad := validation.IsDNS1123Subdomain(name); len(bad) > 0 || !strings.HasPrefix(name, tt.want) {
			t.Errorf("%s of %s is %s: %v", ep.UID, tt.pod, name, bad)
		}
		if other, ok := names[name]; ok {
			t.Errorf("%s and %s are both %s", ep.UID, other, name)
		}
		names[name] = ep.UID
	}
}

// The schema has the limits that the protobuf states.
func TestSchemaLimits(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/crd/endpoint.aether.io_serviceendpoints.yaml")
	must(t, err)
	type field struct {
		MaxLength            int
		MaxItems             int
		MaxProperties        int
		Maximum              int
		Items                *field
		AdditionalProperties *field
		Properties           map[string]field
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct{ OpenAPIV3Schema field }
			}
		}
	}
	must(t, yaml.Unmarshal(text, &crd))
	spec := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties
	for name, pair := range map[string][2]int{
		"uid":             {spec["uid"].MaxLength, registry.MaxUID},
		"clusterName":     {spec["clusterName"].MaxLength, endpointv1.MaxName},
		"serviceAccount":  {spec["serviceAccount"].MaxLength, endpointv1.MaxName},
		"trustDomain":     {spec["trustDomain"].MaxLength, endpointv1.MaxTrustDomain},
		"ip":              {spec["ip"].MaxLength, endpointv1.MaxAddress},
		"addresses":       {spec["addresses"].MaxItems, endpointv1.MaxAddresses},
		"addresses[]":     {spec["addresses"].Items.MaxLength, endpointv1.MaxAddress},
		"ports":           {spec["ports"].MaxLength, endpointv1.MaxPorts*len("65535=,") + endpointv1.MaxPorts*endpointv1.MaxProtocol},
		"portHealth":      {spec["portHealth"].MaxProperties, endpointv1.MaxPorts},
		"weight":          {spec["weight"].Maximum, endpointv1.MaxWeight},
		"locality.region": {spec["locality"].Properties["region"].MaxLength, endpointv1.MaxLocality},
		"locality.zone":   {spec["locality"].Properties["zone"].MaxLength, endpointv1.MaxLocality},
		"metadata":        {spec["metadata"].MaxProperties, endpointv1.MaxMetadata},
		"metadata[]":      {spec["metadata"].AdditionalProperties.MaxLength, endpointv1.MaxMetadataValue},
		"nodeName":        {spec["nodeName"].MaxLength, endpointv1.MaxName},
		"podName":         {spec["podName"].MaxLength, endpointv1.MaxName},
		"podUID":          {spec["podUID"].MaxLength, endpointv1.MaxPodUID},
		"containerID":     {spec["containerID"].MaxLength, endpointv1.MaxName},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: the schema says %d, the protobuf %d", name, pair[0], pair[1])
		}
	}
}
