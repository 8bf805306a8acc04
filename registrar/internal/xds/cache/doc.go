// Package cache holds every resource that Envoy may be given and the view that
// each connected stream has of them.
//
// It is used under the delta server of go-control-plane: a Stream is the
// ConfigWatcher of exactly one gRPC stream. The publisher is the only writer; it
// calls Apply, drains Demand and waits with Await. The package imports nothing
// of ours and knows neither pods nor services, only names and bytes.
//
// What it promises, by the rules of a correct delta control plane:
//
//   - A name that is asked for is answered, also when the client is believed to
//     have it (XDS-R3); a name that does not exist is remembered (XDS-R4).
//   - One response per type and stream is unacknowledged at a time; newer state
//     waits and is coalesced (XDS-R11). Nothing here waits for a peer (XDS-R12).
//   - Only an acknowledgement makes a version acknowledged. A rejected resource
//     is remembered, its neighbours are sent again without it, and it is not
//     sent again until it changes or is touched (XDS-R9, XDS-R10).
//   - On one stream listeners wait for the clusters they may name, routes for
//     both, cluster removals for the listeners and routes that named them, and secret
//     removals for the listeners and clusters that did (XDS-R14). The load assignment of an on-demand cluster waits for that
//     cluster's acknowledgement (dataplane decision 5). No gate holds longer
//     than Config.GateTimeout.
//   - A cluster that is sent takes its load assignment along, also when that is
//     unchanged (XDS-D7). By our naming both have the same name (XDS-D6).
//   - Nothing is answered before Release (XDS-R21).
//
// One mutex guards the store and all streams: every critical section is bounded
// by what changed, and none contains a call that can block.
package cache
