// Package pin keeps a pod's network namespace reachable under a path of ours: a
// bind mount at <netnsDir>/<containerID>-<ifname> in a folder that is a shared
// mount, so that the registrar and Envoy see it from their own mount namespaces
// whatever path the runtime gave (contract 4.1, CNI-64). The plugin pins at ADD
// and unpins at DEL, which is safe while Envoy still holds sockets inside.
package pin
