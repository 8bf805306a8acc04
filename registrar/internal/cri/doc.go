// Package cri asks the container runtime which sandboxes run on this node (the
// Container Runtime Interface, as containerd and CRI-O serve it). It is how pods
// that started without the plugin are found; it never changes anything.
package cri
