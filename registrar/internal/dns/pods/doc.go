// Package pods serves DNS inside the network namespaces of the pods: on the
// loopback of each, UDP and TCP, where the pod's own rules redirect port 53 to.
//
// A Set runs one goroutine per pod, which owns that pod's sockets: it opens them,
// keeps the capture of port 53 alive while they are open, opens them again when
// they fail, and lets go of the namespace when the pod is removed or its path
// vanishes. The order matters. The capture is refreshed only after the sockets
// are open, so no query is redirected to nobody; it is withdrawn before they are
// closed; and when the process dies instead, it ends by itself (contract 0).
//
// What a query is answered is the responder's affair, what upstream resolvers
// say the forwarder's. The package knows no names.
package pods
