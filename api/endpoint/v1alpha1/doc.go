// Package v1alpha1 is the ServiceEndpoint of Kubernetes: the record that package
// endpointv1 defines, as an object of the API server (contract 3). One object per
// pod, in the pod's namespace, is written by the registrar of the pod's node and
// read by every registrar.
//
// The fields are those of the protobuf, with two differences that make the object
// readable: container_metadata and kubernetes_metadata are flat, and ports and
// port_protocols are one text in the grammar of the pod's annotation. The object's
// own namespace is the pod's.
//
// The limits are those that endpointv1 states; the schema in
// registrar/deploy/crd is generated from here.
//
// +groupName=endpoint.aether.io
// +kubebuilder:object:generate=true
package v1alpha1
