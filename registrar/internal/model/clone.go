package model

import (
	"maps"
	"slices"
)

// Clone returns a copy of e that shares no memory with it (MESH-23).
func (e Endpoint) Clone() Endpoint {
	e.Addresses = slices.Clone(e.Addresses)
	e.Ports = slices.Clone(e.Ports)
	e.Metadata = maps.Clone(e.Metadata)
	return e
}
