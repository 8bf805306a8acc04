// Package annotation is the one parser of the pod annotations of contract 1.
// The plugin, the registrar and the Kubernetes source all use it, so that one
// pod can never mean two things (MESH-6). It is strict: a value that is not
// exactly what the contract allows is an error that names key, value and remedy,
// because a pod whose ports are unknown must not run half-meshed. It decides
// nothing: whether a pod joins also depends on its namespace, and that is the
// registrar's affair.
package annotation
