package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The names by which the API server knows the type.
const (
	// Group is the API group.
	Group = "endpoint.aether.io"
	// Version is the version of this package in the group.
	Version = "v1alpha1"
	// Kind of a single object.
	Kind = "ServiceEndpoint"
	// Resource is the plural that paths and RBAC rules use.
	Resource = "serviceendpoints"
)

// GroupVersion returns group and version together.
func GroupVersion() schema.GroupVersion { return schema.GroupVersion{Group: Group, Version: Version} }

// AddToScheme makes the types known to s, which is what a client decodes with.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion(), &ServiceEndpoint{}, &ServiceEndpointList{})
	metav1.AddToGroupVersion(s, GroupVersion())
	return nil
}
