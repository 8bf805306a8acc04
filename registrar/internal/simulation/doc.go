// Package simulation tests the registrar's parts together; it ships nothing.
//
// Two tests run the real attachments, registry, projection, publisher and cache:
// a simulation, in which only what is outside of them is made up and a seed decides
// what happens when (TestSimulation says how far), and an independent reader of the
// real xDS socket. What both expect is computed from contract sections 2 to 4 by code
// of their own (contract_test.go), which shares nothing with the projection.
//
// The simulation runs in a process of its own, in which a seed gives one order of events
// and one trace: the same test, built with edits to the runtime of Go (repeat_test.go:
// Go's overlay, nothing is installed), one goroutine at a time. TestSameSeed holds that.
//
//	go test ./registrar/internal/simulation -run 'TestSimulation$/^seed' \
//	  -simulation.first 3093 -simulation.seeds 1 -simulation.steps 400
//
// says the same every time, and the log of a fault is what to look at after a change.
// -simulation.traces=/folder writes each run's whole trace to a file, so that diff shows
// where two versions of the product part. Seeds are those of one version: what changes an
// order of events, changes everything that follows.
//
// With -simulation.free it runs as it is, many runs at once, with the race detector if
// there is one: every run of a seed takes another order. TestSimulationInAnyOrder does a
// few. What fails this way is found again by a search the other way, over more seeds.
package simulation
