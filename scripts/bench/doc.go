// Command bench measures what the mesh costs, on this machine and now: each row of
// its table compares in the same run, in turns, so that a noisy machine hurts both
// sides alike. It is run by `make bench`; README.md has the figures and says where
// limits are.
//
// A row begins with ok or MISS and gives the figure, what it is compared with and
// the aim. A MISS is a result, not a failure: the exit status is 1 only when a row
// could not be measured.
//
// It works like the demo: it starts itself again in a sandbox (package sandbox),
// with real nodes (package node), the reference CNI plugins and fortio as the one
// load generator. The state folders of everybody there, of host-local's as of the
// registrar's, are in memory. Rows that are in one process come from the Go
// benchmarks of their packages.
package main
