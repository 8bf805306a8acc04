// Package endpointv1 is the record that registrars exchange: one pod with all
// its ports (contract 3). The messages are generated from endpoint.proto; Validate
// is written by hand and holds the limits that its comments state. What a record
// means to a reader is the registry's affair (registrar/internal/registry).
package endpointv1
