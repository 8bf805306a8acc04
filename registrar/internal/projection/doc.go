// Package projection maps services to what Envoy and DNS are told about them: the
// only place where an authority becomes a (service, port, wire class, selector)
// and that becomes a cluster name, an EDS name, an SNI and a virtual host
// (contract 2, dataplane decisions 5, 6, 8 and 10).
//
// The Engine takes one record per pod (model.Endpoint) and keeps, per service, the
// table of its ports, its default port, its virtual address and its names:
//
//	Upsert, Delete   records come and go; nothing is computed yet
//	TakeDirty        everything since the last call is settled as one set, and the
//	                 services that changed are named, sorted
//	View, Cluster    what one service, or one cluster, looks like now
//	Resolve          what to answer when Envoy asks for a cluster by name
//	Advance          Envoy has acknowledged the step that a View awaited
//
// It is pure: no goroutine, no clock, no file, no Envoy type. One goroutine owns it;
// no method is safe for concurrent use. It never sees a registry or a stream.
//
// # Changes in steps
//
// A cluster name that a route leads to can change its meaning in two cases: the
// cluster F of a service whose default port changes, and the flat name that passes
// from one namespace's service to another's. Between two acknowledgements Envoy may
// hold the old or the new form of each resource, so the two forms of the route table
// and of the clusters must be right in every combination. Each such change is
// therefore cut into steps (type Step); a View shows one step and says in Await what
// has to be acknowledged before Advance. The invariant of every step: an explicit
// port is routed only to a cluster that means this port and no other, in whatever
// order Envoy applies what the step changes (I1).
//
// # What equal input guarantees
//
// Changes between two reads are one set: their order does not matter (I5), except
// that the records of one UID follow their generation. Two things depend on history
// by design: accounts, once pinned, stay pinned while the service is known (I4), and
// a service without endpoints keeps the table it had when it was last read with some.
// For addresses see vipPool.
package projection
