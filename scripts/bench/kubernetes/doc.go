// Command kubernetes measures what the mesh costs on a real Kubernetes of two nodes
// (package lab), in the form of `make bench`. It is run by `make bench-kubernetes`.
//
// It brings up a lab of its own in LAB (default /tmp/portolan-bench), starts itself
// again inside it, in the control plane's network namespace, measures what is to be
// known of the lab without the mesh, installs the mesh by its manifests, measures the
// rest, and takes the lab down. Nodes share the machine's processors, so two nodes
// cost each other time here that they would not in the field.
package main
