// Package nettest makes network namespaces with real interfaces for the tests of
// the plugin and of the capture: a pod's and its outside world. It needs root and
// is meant for test binaries that run in a sandbox (scripts/sandbox), which
// removes whatever a killed test leaves.
package nettest
