// Package kubernetes is the registry of a cluster: one ServiceEndpoint object per
// pod (api/endpoint/v1alpha1), written by the registrar of the pod's node and read
// by every registrar. There is nothing between nodes but the API server.
//
// Memory is the truth for this node's pods, the API server for all others. What a
// pod of this node publishes is in the local table, and with every watcher here, at
// once; the API server gets it behind (writer.go): the newest state of each record,
// without a pause, by a few writers. Who changes or deletes an object of this node
// meanwhile is overruled. What other nodes publish comes by a streaming watch
// (reader.go), of which one record per pod is kept and no object.
//
// The local table is an embedded.Backend with a bucket of its own in state.db. Once
// it has held a complete list it is a snapshot: a registrar that starts while the
// API server is away serves it, marked stale, and catches up later (contract 4.8).
//
// An object is read by its namespace and name, a record by its UID. Two objects with
// one UID are a mistake of somebody: the first one keeps it.
package kubernetes
