// Package authority is the one grammar of the mesh's names (contract 2):
//
//	service[.namespace].domain[:port]
//
// It says what such a name means (Parse), how it is written (Host, HostPort)
// and how Envoy recognises it (MeshRegex, PortRegex). DNS, the on-demand server,
// the projection and the route table all use it, so that no two of them can
// disagree about a name. It knows no services: whether a well-formed name leads
// anywhere is the projection's affair.
package authority
