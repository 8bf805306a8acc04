// Package podsource knows the pods of this node from the Kubernetes API: who a pod
// is (its ServiceAccount), whether labels ask for the mesh, whether it is Ready,
// and when it ends. It watches the pods of one node and the labels of namespaces,
// keeps of each only what the mesh reads, and hands every change to one sink.
//
// An ADD asks it for its pod and waits at most a moment; no call to the API is made
// for that. With the API away, what was seen last stands (contract 4.8).
//
// A static pod is told by what the runtime knows it by. Its API object is but a mirror:
// who deletes that ends nothing, and the kubelet makes another one.
package podsource
