package projection

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/authority"
)

// The defaults of contract 2 and dataplane decision 6.
const (
	// DefaultUnknownCap is how many names that lead nowhere are remembered.
	DefaultUnknownCap = 1000
	// DefaultRetention is how long a service stays known after its last endpoint.
	DefaultRetention = 10 * time.Minute
)

// Config is what an Engine is made with. It does not change while the Engine lives.
type Config struct {
	// Domain is the mesh domain, one that authority.ValidateDomain accepts.
	Domain string
	// FlatNamespaces are the namespaces whose services also have the one-label name.
	// When two of them have a service of the same name, the first listed gets it.
	FlatNamespaces []string
	// VIP4 and VIP6 are the ranges of virtual addresses. A service has the same host
	// part in both.
	VIP4, VIP6 netip.Prefix
	// Node is the name of this node, whose pods' addresses no other node's record takes.
	Node string
	// UnknownCap is how many names that are nobody's are remembered (I9).
	UnknownCap int
	// Retention is how long a service stays known after its last endpoint.
	Retention time.Duration
}

// Validate says which setting is wrong and what it may be.
func (c Config) Validate() error {
	if err := authority.ValidateDomain(c.Domain); err != nil {
		return err
	}
	for i, ns := range c.FlatNamespaces {
		if !authority.ValidLabel(ns) {
			return fmt.Errorf("flat namespace %q is no DNS label", ns)
		}
		if slices.Contains(c.FlatNamespaces[:i], ns) {
			return fmt.Errorf("flat namespace %q is listed twice; list each once, the first wins", ns)
		}
	}
	if err := validateRanges(c.VIP4, c.VIP6); err != nil {
		return err
	}
	if c.UnknownCap < 1 {
		return fmt.Errorf("cap of %d unknown names; it must be at least 1", c.UnknownCap)
	}
	if c.Retention <= 0 {
		return fmt.Errorf("retention of %s; it must be longer than 0", c.Retention)
	}
	return nil
}

// rank is the place of a namespace among the flat ones, -1 if it is not flat.
func (c Config) rank(namespace string) int { return slices.Index(c.FlatNamespaces, namespace) }
