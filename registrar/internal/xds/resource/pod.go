package resource

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Pod is one attached pod of this node, as far as Envoy must know it. Nothing in
// it depends on another pod or service (I3).
type Pod struct {
	// ID is the attachment, containerID-ifname; it is in every name of the pod.
	ID string
	// Netns is the path of the netns pin, as Envoy sees it. A path is never used
	// again for another network namespace: Envoy would keep the old sockets.
	Netns string
	// Identity is the pod's own; its certificate serves inbound connections and
	// opens outbound ones.
	Identity model.Identity
	// Service is the service that the pod belongs to.
	Service model.ServiceKey
	// OwnNames are the host names of the service, without port: the namespaced one,
	// and the flat one where the namespace is flat. In lower case.
	OwnNames []string
	// Domain is the mesh domain.
	Domain string
	// Default is the default port, one of Ports; 0 for a pure client.
	Default uint16
	// Ports are the ports served. Empty for a pure client.
	Ports []port.Port
	// IPv6 says whether the pod's kernel has IPv6 sockets. Without it every listener
	// is IPv4 only.
	IPv6 bool
	// VIPRanges are the mesh's address ranges. Only connections to them ask for a
	// cluster on demand; one that an application opens to 15002 itself is closed.
	VIPRanges []netip.Prefix
}

// validate names the first thing that would make a wrong or an unsafe listener.
func (p Pod) validate() error {
	switch {
	case p.ID == "" || !utf8.ValidString(p.ID) || strings.Contains(p.ID, "|"):
		return fmt.Errorf("pod %q: the ID is empty or not usable in a name", p.ID)
	case !filepath.IsAbs(p.Netns) || !utf8.ValidString(p.Netns):
		return fmt.Errorf("pod %s: netns path %q is not absolute", p.ID, p.Netns)
	case len(p.VIPRanges) == 0:
		return fmt.Errorf("pod %s: no VIP range is given", p.ID)
	}
	if err := validateIdentity(p.Identity); err != nil {
		return fmt.Errorf("pod %s: %w", p.ID, err)
	}
	return p.validatePorts()
}

func (p Pod) validatePorts() error {
	if len(p.Ports) == 0 {
		return nil
	}
	if err := authority.ValidateDomain(p.Domain); err != nil {
		return fmt.Errorf("pod %s: %w", p.ID, err)
	}
	if !authority.ValidLabel(p.Service.Name) || !authority.ValidLabel(p.Service.Namespace) {
		return fmt.Errorf("pod %s: service %q has a part that is no DNS label", p.ID, p.Service)
	}
	if len(p.OwnNames) == 0 {
		return fmt.Errorf("pod %s: no own name is given; every request would be refused", p.ID)
	}
	for _, name := range p.OwnNames {
		if a, err := authority.Parse(name, p.Domain); err != nil || a.HostPort(p.Domain) != name || a.Port != 0 {
			return fmt.Errorf("pod %s: own name %q is no host name of domain %s in lower case", p.ID, name, p.Domain)
		}
	}
	seen := make(map[uint16]bool, len(p.Ports))
	for _, pt := range p.Ports {
		if pt.Number == 0 || pt.Protocol.Class() == port.ClassNone {
			return fmt.Errorf("pod %s: port %d has protocol %q; leave it out, it is not routable", p.ID, pt.Number, pt.Protocol)
		}
		if seen[pt.Number] {
			return fmt.Errorf("pod %s: port %d is listed twice", p.ID, pt.Number)
		}
		seen[pt.Number] = true
	}
	if !seen[p.Default] {
		return fmt.Errorf("pod %s: default port %d is not among its ports", p.ID, p.Default)
	}
	return nil
}

// validateIdentity refuses an identity whose SPIFFE ID would be a prefix or a
// part of another one (MESH-27).
func validateIdentity(id model.Identity) error {
	if id.TrustDomain == "" || id.Namespace == "" || id.Account == "" {
		return fmt.Errorf("identity %q has an empty part", id.SPIFFE())
	}
	if !utf8.ValidString(id.SPIFFE()) || strings.ContainsAny(id.TrustDomain+id.Namespace+id.Account, "/|% ") {
		return fmt.Errorf("identity %q has a part that a SPIFFE ID cannot carry", id.SPIFFE())
	}
	return nil
}

// sortedPorts returns the ports ascending by number.
func (p Pod) sortedPorts() []port.Port {
	return slices.SortedFunc(slices.Values(p.Ports), func(a, b port.Port) int { return cmp.Compare(a.Number, b.Number) })
}

// sortedNames returns the own names ascending, each once.
func (p Pod) sortedNames() []string {
	return slices.Compact(slices.Sorted(slices.Values(p.OwnNames)))
}

// single reports whether the pod has the shape of a single-port HTTP pod: one
// default chain, no matcher (I3).
func (p Pod) single() bool {
	return len(p.Ports) == 1 && p.Ports[0].Protocol.Class() == port.ClassHTTP
}
