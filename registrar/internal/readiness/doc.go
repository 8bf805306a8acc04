// Package readiness watches which ports of the local pods listen, and whether the
// mesh's own listeners do (contract 4.2, 4.3). It polls the kernel's listen table
// of each pod: often after an ADD or a change, seldom later. One goroutine polls
// all pods and takes no more than a quarter of a core, less than a hundredth for
// 200 pods at rest.
//
// A port that goes is told at once. One that comes is told at once too, unless it
// was lost again and again: then only after it has stayed for a while, longer with
// each loss (XDS-55).
package readiness
