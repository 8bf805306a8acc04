// Package e2e tests the mesh from outside: a whole node with its real Envoy and
// pods made by the real CNI chain (package node), asked by the clients that
// users have. It knows the contract and none of our internals.
package e2e
