// Demo shows the mesh on one machine: it makes a node in a sandbox, with pods,
// and tries from a client pod what a user would try. It prints one line for
// each, with what was asked, what was expected and what came back, and ends
// with the line "N passed, N failed". It exits 0 when nothing failed.
//
// Everything it makes goes with its process. With -keep it stays until Ctrl-C
// and says how to look around.
package main
