// Package registry is the stream of records of contract 4.7: one record per pod,
// with uid, generation, identity and addresses, and a marker that says when a
// reader has seen everything. How records are stored is a backend's affair:
//
//	embedded     a bbolt file, one machine (registry/embedded)
//	kubernetes   one object per pod at an API server (registry/kubernetes)
//
// The package has what backends share: the Backend interface, the Table that
// keeps the records in memory and feeds the watchers, and the conversion between
// a record and its protobuf. It owns no service, port or name: those are views
// that the projection makes of the records.
package registry
