// Package nettest has what the tests of the plugin and of the capture need around
// them: network namespaces (scripts/netnstest) with servers that say who answers,
// and clients that tell how the kernel took their packets. It needs root.
package nettest
