// Package model holds the value types that flow through the registrar: what a
// pod offers (Endpoint), who it is (Identity) and which service it belongs to
// (ServiceKey). Values are immutable once they were handed to another package;
// a change is a new value with a higher Generation.
package model

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
)

// AttachmentKey identifies one interface of one sandbox. Everything local is
// keyed by it, never by the pod's name (CNI-D2).
type AttachmentKey struct {
	// ContainerID is CNI_CONTAINERID.
	ContainerID string
	// IfName is CNI_IFNAME.
	IfName string
}

// KeyOf reads a key from a message of the mesh's own protocols, nil included.
func KeyOf(m interface {
	GetContainerId() string
	GetIfname() string
},
) AttachmentKey {
	return AttachmentKey{ContainerID: m.GetContainerId(), IfName: m.GetIfname()}
}

// String returns containerID-ifname, the file name of the netns pin.
func (k AttachmentKey) String() string { return k.ContainerID + "-" + k.IfName }

// Compare orders keys as their texts.
func (k AttachmentKey) Compare(o AttachmentKey) int { return strings.Compare(k.String(), o.String()) }

// ServiceKey names a service.
type ServiceKey struct {
	// Namespace is a DNS label.
	Namespace string
	// Name is a DNS label.
	Name string
}

// String returns namespace/name.
func (k ServiceKey) String() string { return k.Namespace + "/" + k.Name }

// TCPServerName is the SNI that selects a tcp port of the service: it names the
// service, so that a pod which got a re-used address refuses it even if it has
// the same account and serves the same port (dataplane decision 8).
func (k ServiceKey) TCPServerName(number uint16) string {
	return strconv.Itoa(int(number)) + "." + k.Name + "." + k.Namespace
}

// Compare orders keys by namespace, then name.
func (k ServiceKey) Compare(o ServiceKey) int {
	switch {
	case k.Namespace < o.Namespace:
		return -1
	case k.Namespace > o.Namespace:
		return 1
	case k.Name < o.Name:
		return -1
	case k.Name > o.Name:
		return 1
	}
	return 0
}

// Identity is who a workload is: the parts of its SPIFFE ID.
type Identity struct {
	// TrustDomain without scheme.
	TrustDomain string
	// Namespace of the account.
	Namespace string
	// Account is the service account.
	Account string
}

// SPIFFE returns spiffe://<trust-domain>/ns/<namespace>/sa/<account>.
func (i Identity) SPIFFE() string {
	return "spiffe://" + i.TrustDomain + "/ns/" + i.Namespace + "/sa/" + i.Account
}

// Health says whether traffic may be sent.
type Health uint8

// The healths of contract section 3. The zero value is Unhealthy, so that a
// record nobody judged is never called.
const (
	// Unhealthy is known but not called.
	Unhealthy Health = iota
	// Healthy may be called.
	Healthy
	// Draining finishes what is in flight.
	Draining
)

// String returns the lower-case name.
func (h Health) String() string {
	switch h {
	case Healthy:
		return "healthy"
	case Draining:
		return "draining"
	case Unhealthy:
	}
	return "unhealthy"
}

// PortStatus is one served port and its health.
type PortStatus struct {
	port.Port
	// Health of this port alone.
	Health Health
}

// Locality is the topology of a node.
type Locality struct {
	// Region, may be empty.
	Region string
	// Zone, may be empty.
	Zone string
}

// Endpoint is one pod with all its ports: the one record per pod from which
// every view is projected (contract 4.5).
type Endpoint struct {
	// UID identifies the record for ever: containerID-ifname, or the name of the
	// object it came from.
	UID string
	// Generation grows with every change by the record's one writer; the highest wins.
	Generation uint64
	// Since is when the pod was added. Of two living records with one address a pod of
	// the reader's own node owns it, else the later one (XDS-12); the zero time is older
	// than any other.
	Since time.Time
	// Service is the service the pod belongs to.
	Service ServiceKey
	// Identity is the SPIFFE identity that its inbound certificate carries.
	Identity Identity
	// Addresses of both families, the primary first. Never empty.
	Addresses []netip.Addr
	// Default is the default port's number; one of Ports.
	Default uint16
	// Ports are all ports served, ascending by number. Empty for a pure client.
	Ports []PortStatus
	// Weight is 1-65535.
	Weight uint32
	// Locality of the pod's node.
	Locality Locality
	// Metadata are the subset keys and values.
	Metadata map[string]string
	// PodName, PodUID, Node and ContainerID are attributes for people and for status.
	PodName     string
	PodUID      string
	Node        string
	ContainerID string
}
