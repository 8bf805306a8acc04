// Package wiretest lets tests put generated resources on a real Envoy and talk
// through it on real sockets: a node and its pods as network namespaces (Lab), the
// Envoy process (Envoy), a small delta xDS server that serves exactly what a test
// gives it (XDS), a certificate authority (CA) and servers for the pods to run.
//
// For tests only. It needs root and an Envoy binary, and fails a test that lacks
// either. Everything it makes lives in network namespaces of its own and in the
// test's temporary directory, and goes when the test ends.
package wiretest
