// Package netconf reads what a runtime gives the plugin: the network
// configuration on standard input, the result of the plugins before it, and
// CNI_ARGS. It is pure: no file, no environment, no clock. Its errors are
// *types.Error with the CNI code that the plugin prints.
package netconf
