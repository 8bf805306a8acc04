// Package netnstest makes network namespaces with real interfaces for tests: a
// pod's and its outside world. Only tests and the packages that support them
// import it; it is never shipped. It needs root and is meant for test binaries
// that run in a sandbox (scripts/sandbox), which removes whatever a killed test
// leaves.
package netnstest
