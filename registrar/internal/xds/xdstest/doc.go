// Package xdstest is a delta xDS client for tests. It shares no code with the
// server: it subscribes, keeps what it is given, and acknowledges, rejects or
// withholds by the test's judgement, so that a test sees from outside what an
// Envoy would see.
//
// Dial connects to a real socket; Pipe connects to a handler in the same process
// without a network, so that a test can run in a testing/synctest bubble.
package xdstest
