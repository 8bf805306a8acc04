// Package simulation tests the registrar's parts together; it ships nothing.
//
// Two tests run the real attachments, registry, projection, publisher and cache:
// a simulation, in which only what is outside of them is made up and a seed decides
// what happens when (TestSimulation says how far), and an independent reader of the
// real xDS socket. What both expect is computed from contract sections 2 to 4 by code
// of their own (contract_test.go), which shares nothing with the projection.
//
// The simulation runs in two ways. As it is, many runs share the processors, with the race
// detector if there is one: that finds races, and every run of a seed takes another order.
// With -simulation.repeatable it runs in a process in which a seed gives one order of
// events, and one trace:
//
//	go test ./registrar/internal/simulation -run 'TestSimulation$/^seed' \
//	  -simulation.repeatable -simulation.first 3093 -simulation.seeds 1 -simulation.steps 400
//
// says the same every time, which ends at the same fault, and the log of a fault is what to
// look at after a change. -simulation.traces=/folder writes each run's whole trace to a
// file, so that diff shows where two versions of the product part. What fails only the
// first way is found again by a search the second way, over more seeds. Seeds are those of
// one version: what changes an order of events, changes everything that follows.
//
// The repeatable process is the same test, built with edits to the runtime of Go
// (repeat_test.go: Go's overlay, nothing is installed) and run with one goroutine at a time.
// TestSameSeed holds that equal seeds give equal traces.
package simulation
