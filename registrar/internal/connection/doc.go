// Package connection ends TCP connections inside a pod's network namespace while
// its network is still there to say so to the other side.
package connection
