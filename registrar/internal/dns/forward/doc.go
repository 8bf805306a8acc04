// Package forward asks the upstream resolvers what the mesh does not know.
//
// It is transparent: the query goes on as the bytes that the pod sent, with
// another ID, and the answer comes back as the bytes that the resolver sent, so
// that EDNS options, cookies, signatures and record types that nobody here has
// heard of pass. Nothing is cached: the resolvers of a node cache already, an
// answer stays as fresh as without the mesh, nothing can be poisoned, and no
// name that a pod invents takes memory (I9).
//
// Forwarder bounds the time of a look-up, Limiter how many there are at once.
package forward
