// Package node is one complete Portolan node for the demo and the end-to-end
// tests: `registrar run`, `registrar dns`, an Envoy, a resolver that stands for
// the world outside the mesh, and pods that are made through the real CNI chain
// (libcni running the reference bridge plugin, then portolan).
//
// It uses the default paths of contract section 7 and therefore runs only in a
// sandbox (package sandbox), one node at a time:
//
//	n, err := node.Start(ctx, node.Options{Bin: "bin"})
//	defer n.Close(ctx)
//	pod, err := n.AddPod(ctx, node.PodSpec{Name: "payments-1", Annotations: ..., Servers: ...})
//	out, err := pod.Exec(ctx, "curl", "-s", "http://payments.aether.internal/")
//
// What a pod is here: a network namespace at /run/netns/cni-<uuid>, attached by
// the chain; a pause process with a mount namespace whose /etc/resolv.conf is
// the pod's; and servers started in both. The order of things is a container
// runtime's: ADD before the first process, processes ended before DEL, DEL
// after an ADD that failed.
package node
