// Package deploy holds the manifests of a cluster, and the test that an API server
// takes them.
package deploy
