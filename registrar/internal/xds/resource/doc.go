// Package resource builds what Envoy is told: one pure builder per resource type.
//
//	a pod of this node      Inbound, OutboundHTTP, OutboundTCP, AppCluster
//	a service               Cluster, Tombstone, Endpoints, NewVirtualHost
//	the node's route table  Routes
//	an identity             SVID, Bundle
//	the Envoy process       Bootstrap
//
// A builder gets a small value, checks it and returns a new message that nobody
// else holds. It reads no clock, no file and no state, and equal values give equal
// bytes in whatever order their lists come (I5): repeated fields are sorted, and
// what is packed into an Any is marshalled deterministically.
//
// The shapes are those of the data-plane decisions; every deviation from Envoy's
// defaults says its reason beside it. They are proven on the real Envoy by the
// wire tests of this package. The package knows no attachments, no registry and
// no streams: the publisher fills the values and hands the messages to the cache.
package resource
