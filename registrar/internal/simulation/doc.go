// Package simulation tests the registrar's parts together; it ships nothing.
//
// What is expected is computed from contract sections 2 to 4 by code of its own
// (contract_test.go), which shares nothing with the projection.
package simulation
