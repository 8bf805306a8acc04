// Package cniv1 is the contract between the CNI plugin and the registrar of a
// node: the messages and the service of cni.proto, generated, and beside them
// what generation cannot express, the limits of every field. Both ends call
// Validate on what they send and on what they got; nobody else speaks it.
package cniv1
