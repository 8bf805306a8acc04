// Package server serves the cache to Envoy over gRPC: delta ADS for everything
// that an Envoy holds, and a delta CDS stream of its own for clusters that are
// asked for by name (XDS-D2).
//
// Every stream gets a delta server of go-control-plane and a cache.Stream of its
// own, so a stream's state ends with it and a stuck stream holds up nobody. The
// package knows streams and their peers; it knows no resource and no pod.
package server
