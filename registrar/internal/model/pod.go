package model

import (
	"net/netip"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
)

// Pod is one local, meshed attachment: what the registrar decided from the CNI
// request and the pod's annotations. It is persisted as it is, so that a restart
// with a stricter parser cannot un-mesh a running pod.
type Pod struct {
	// Key identifies the attachment.
	Key AttachmentKey
	// Network is the conflist's name; GC is scoped by it.
	Network string
	// Netns is the path of the plugin's pin: what Envoy, DNS and readiness open.
	Netns string
	// RuntimeNetns is the path the runtime gave; when it is gone, so is the pod.
	RuntimeNetns string
	// Addresses of both families, the primary first. Never empty.
	Addresses []netip.Addr
	// Namespace, Name and UID are the pod's own.
	Namespace string
	Name      string
	UID       string
	// RuntimeUID is what the runtime calls the pod. Of a static pod it is not UID, which
	// is that of its API object and changes when that is made anew; empty when nobody
	// said it.
	RuntimeUID string
	// Service is the service that the pod belongs to.
	Service ServiceKey
	// Identity is the workload identity its certificates carry.
	Identity Identity
	// Default is the default port's number, 0 for a pure client.
	Default uint16
	// Ports are the ports served, ascending; empty for a pure client.
	Ports []port.Port
	// Weight is the load-balancing weight, 1-65535.
	Weight uint32
	// Metadata are the subset keys and values.
	Metadata map[string]string
	// Upstreams are the services to warm, as annotated: one or two labels each.
	Upstreams []string
	// ExcludePorts and ExcludeRanges are never captured.
	ExcludePorts  []uint16
	ExcludeRanges []netip.Prefix
	// DNSServers are the nameservers of the chain's result, if it named any.
	DNSServers []netip.Addr
	// Since is when the attachment was made.
	Since time.Time
}

// Static reports whether the pod is of the node's own making, and its API object only a
// mirror.
func (p Pod) Static() bool { return p.RuntimeUID != "" && p.RuntimeUID != p.UID }

// IPv6 reports whether the pod has an IPv6 address of more than link scope.
func (p Pod) IPv6() bool {
	for _, a := range p.Addresses {
		if a.Is6() && !a.Is4In6() && !a.IsLinkLocalUnicast() {
			return true
		}
	}
	return false
}

// MeshDNS reports whether the pod's look-ups are redirected to the mesh DNS: not
// those of a pod that serves port 53 (dataplane decision 9), nor of one that
// excludes it from the capture.
func (p Pod) MeshDNS() bool {
	const dns = 53
	serves := slices.ContainsFunc(p.Ports, func(pt port.Port) bool { return pt.Number == dns })
	return !serves && !slices.Contains(p.ExcludePorts, dns)
}
