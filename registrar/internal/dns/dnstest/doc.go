// Package dnstest has what the tests of mesh DNS need around them: network
// namespaces (scripts/netnstest) with DNS clients, and an upstream resolver that
// does as it is told. It needs root.
package dnstest
