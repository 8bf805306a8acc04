// Package dns is mesh DNS: the process `registrar dns` (Run), and the client by
// which `registrar run` gives it its table (Client).
//
// They are two processes because their lives differ. The DNS process is part of
// the data plane: pods depend on it for every name they look up, so it is
// updated rarely, serves on while the registrar is away, and keeps its last
// table on disk to start from. What it does for a pod is in the sub-packages:
//
//	table      what is known: names, addresses, pods; and the file it outlives in
//	responder  one query in, one decision out; pure
//	forward    everything that is not a mesh name, from upstream resolvers
//	pods       the sockets in the pods' network namespaces
//
// The table's stream is api/dns/v1. This package owns its two ends and the
// process around them; it decides nothing about a query.
package dns
