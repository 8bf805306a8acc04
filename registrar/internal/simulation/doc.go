// Package simulation tests the registrar's parts together; it ships nothing.
//
// Two tests run the real attachments, registry, projection, publisher and cache:
// a simulation, in which only what is outside of them is made up and a seed decides
// what happens when (TestSimulation says how far), and an independent reader of the
// real xDS socket. What both expect is computed from contract sections 2 to 4 by code
// of their own (contract_test.go), which shares nothing with the projection.
package simulation
