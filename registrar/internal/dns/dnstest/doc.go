// Package dnstest has what the tests of mesh DNS need around them: network
// namespaces with real interfaces, and an upstream resolver that does as it is
// told. It needs root and is meant for test binaries that run in a sandbox
// (scripts/sandbox), which removes whatever a killed test leaves.
package dnstest
