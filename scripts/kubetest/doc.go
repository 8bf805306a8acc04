// Package kubetest tests the mesh on a real Kubernetes (scripts/lab): two nodes
// with kubelet and containerd, the mesh installed by its manifests, and pods that
// the kubelet starts. It knows the contract and none of our internals.
//
// `make e2e` runs it. TestMain brings up a lab of its own in LAB (default
// /tmp/portolan-e2e), puts the images on its nodes, installs the mesh, runs the
// tests in the control plane's network namespace, which reaches the API server, and
// takes the lab down, however the tests end. A test that fails says in which folder
// it has left the registrars' logs and status, Envoy's configuration and the events.
//
// KEEP=1 leaves the lab up and takes one that is up as it is, for work by hand:
//
//	KEEP=1 go test -count 1 -v ./scripts/kubetest -run TestAddressing
//	LAB=/tmp/portolan-e2e scripts/lab/lab.sh kubectl get sep -A
//	LAB=/tmp/portolan-e2e scripts/lab/lab.sh down
package kubetest
