package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Health says whether traffic may be sent to an endpoint or to one port of it.
//
// +kubebuilder:validation:Enum=Healthy;Unhealthy;Draining
type Health string

// The healths of contract 3.
const (
	// Healthy: listeners are proven, the pod is Ready and the port listens.
	Healthy Health = "Healthy"
	// Unhealthy: known, but not to be called.
	Unhealthy Health = "Unhealthy"
	// Draining: no new requests; those in flight finish.
	Draining Health = "Draining"
)

// Address is an IP address in its textual form, without zone.
//
// +kubebuilder:validation:MaxLength=45
// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address without zone"
type Address string

// MetadataValue is the value of a subset key.
//
// +kubebuilder:validation:MaxLength=253
type MetadataValue string

// ServiceEndpoint is one pod of the mesh with all the ports that it serves. The
// registrar of the pod's node writes it, and puts it back when somebody else
// changes or deletes it; there is nothing in it to be set by hand.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=sep,categories=portolan
// +kubebuilder:storageversion
// +kubebuilder:printcolumn:name="Service",type=string,JSONPath=".spec.service"
// +kubebuilder:printcolumn:name="Ports",type=string,JSONPath=".spec.ports"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=".spec.nodeName"
// +kubebuilder:printcolumn:name="Health",type=string,JSONPath=".spec.health"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=".metadata.creationTimestamp"
// +kubebuilder:printcolumn:name="Mesh name",type=string,JSONPath=".spec.clusterName",priority=1
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=".spec.ip",priority=1
// +kubebuilder:printcolumn:name="Account",type=string,JSONPath=".spec.serviceAccount",priority=1
// +kubebuilder:printcolumn:name="Ports that differ",type=string,JSONPath=".spec.portHealth",priority=1
type ServiceEndpoint struct {
	metav1.TypeMeta `json:",inline"`
	// Standard object metadata. The owner is the pod, where its UID is known.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// What the pod offers.
	Spec ServiceEndpointSpec `json:"spec"`
}

// ServiceEndpointSpec is the record of one pod. It has one writer and is owned as a
// whole: of fields that are owned one by one every object and every event would have a
// list.
//
// +structType=atomic
// +kubebuilder:validation:XValidation:rule="!has(self.ports) || has(self.port)",message="port is missing although there are ports"
// +kubebuilder:validation:XValidation:rule="!has(self.ports) || !has(self.port) || self.ports.split(',').exists(p, p.split('=')[0] == string(self.port))",message="port is not among ports"
type ServiceEndpointSpec struct {
	// UID of the record: the sandbox's container ID and its interface.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the uid of a record does not change"
	UID string `json:"uid"`
	// Generation grows with every change by the record's one writer; readers keep
	// the highest.
	// +kubebuilder:validation:Minimum=1
	Generation int64 `json:"generation"`
	// SinceUnixNanos is when the pod was added, in nanoseconds since 1970. Of two
	// records with one address the later one owns it.
	// +kubebuilder:validation:Minimum=0
	// +optional
	SinceUnixNanos int64 `json:"sinceUnixNanos,omitempty"`

	// Service is the name of the service, a DNS label.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Service string `json:"service"`
	// ClusterName is the service's mesh name, for people.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	ClusterName string `json:"clusterName,omitempty"`
	// ServiceAccount is the account of the pod's SPIFFE ID.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-a-zA-Z0-9._]+$`
	ServiceAccount string `json:"serviceAccount"`
	// TrustDomain is the SPIFFE trust domain.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=255
	// +kubebuilder:validation:Pattern=`^[-a-z0-9._]+$`
	TrustDomain string `json:"trustDomain"`

	// IP is the pod's primary address.
	IP Address `json:"ip"`
	// Addresses are the pod's addresses of both families, ip first.
	// +kubebuilder:validation:MaxItems=8
	// +listType=atomic
	// +optional
	Addresses []Address `json:"addresses,omitempty"`

	// Port is the default port. Without it the pod is a pure client.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Port int32 `json:"port,omitempty"`
	// Ports are all ports served, ascending, each with its protocol unless that is
	// http: "8080,9090=h2,5432=tcp". Without it the pod serves port alone. A reader
	// routes no port whose protocol it does not know.
	// +kubebuilder:validation:MaxLength=1472
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{0,4}(=[-a-z0-9]{1,16})?(,[1-9][0-9]{0,4}(=[-a-z0-9]{1,16})?)*$`
	// +kubebuilder:validation:XValidation:rule="self.split(',').size() <= 64",message="at most 64 ports"
	// +optional
	Ports string `json:"ports,omitempty"`
	// Health of the default port; portHealth has the ports that differ.
	// +optional
	Health Health `json:"health,omitempty"`
	// PortHealth has the health of each port whose health differs from health, by
	// the port's number.
	// +kubebuilder:validation:MaxProperties=64
	// +mapType=atomic
	// +optional
	PortHealth map[string]Health `json:"portHealth,omitempty"`
	// Weight is the load-balancing weight; without it 1.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Weight int32 `json:"weight,omitempty"`
	// Locality is where the pod's node is.
	// +optional
	Locality *Locality `json:"locality,omitempty"`
	// Metadata holds the subset keys and values of this endpoint.
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(key, size(key) <= 63)",message="a key has at most 63 bytes"
	// +mapType=atomic
	// +optional
	Metadata map[string]MetadataValue `json:"metadata,omitempty"`

	// NodeName is the pod's node. Only that node's registrar may write the object.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="an endpoint does not move to another node"
	NodeName string `json:"nodeName"`
	// PodName is the pod's name.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	PodName string `json:"podName,omitempty"`
	// PodUID is the pod's UID.
	// +kubebuilder:validation:MaxLength=128
	// +optional
	PodUID string `json:"podUID,omitempty"`
	// ContainerID is the sandbox's CNI container ID.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	ContainerID string `json:"containerID,omitempty"`
}

// Locality is the topology of the pod's node.
//
// +structType=atomic
type Locality struct {
	// Region may be empty.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Region string `json:"region,omitempty"`
	// Zone may be empty.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Zone string `json:"zone,omitempty"`
}

// ServiceEndpointList is a list of them.
//
// +kubebuilder:object:root=true
type ServiceEndpointList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// Items are the objects.
	Items []ServiceEndpoint `json:"items"`
}
