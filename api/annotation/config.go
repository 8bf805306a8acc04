package annotation

import (
	"net/netip"
	"strings"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
)

// Limits of one pod. MaxPorts is contract 1's; the others are those of the
// records that carry the values (portolan.endpoint.v1, portolan.cni.v1).
const (
	// MaxPorts is how many ports a pod serves at most.
	MaxPorts = 64
	// MaxMetadata is how many subset keys an endpoint has at most.
	MaxMetadata = 32
	// MaxMetadataValue is the longest value of a subset key, in bytes.
	MaxMetadataValue = 253
	// MaxUpstreams is how many upstreams a pod declares at most.
	MaxUpstreams = 256
	// MaxExclusions is how many ports, and how many ranges, are excluded at most.
	MaxExclusions = 64
)

// defaultPort is served by a pod that says nothing about ports (contract 1).
const defaultPort = 8080

// Config is what a pod's annotations say, with contract 1's defaults filled in.
// Everything in it is the caller's own: no slice or map is shared.
type Config struct {
	// Managed is the word of aether.io/managed alone.
	Managed Managed
	// Meshed is the pod's own word: true when its annotations ask for the mesh.
	// When it is false and Managed is Unset, the namespace's word decides.
	Meshed bool
	// Default is the default port's number; 0 when the pod serves nothing.
	Default uint16
	// Ports are all ports served, ascending by number, Default among them. Empty
	// for a pure client.
	Ports []port.Port
	// Service is the service's name; empty when the annotation is absent.
	Service string
	// Weight is 1-65535.
	Weight uint32
	// Metadata are the subset keys and values; nil when there are none.
	Metadata map[string]string
	// Upstreams are the services that the pod calls, each "service" or
	// "service.namespace", sorted, without duplicates.
	Upstreams []string
	// ExcludePorts are never captured; ascending, without duplicates.
	ExcludePorts []uint16
	// ExcludeRanges are never captured; masked, sorted, none within another.
	ExcludeRanges []netip.Prefix
	// Unknown are the keys under our prefixes that mean nothing, sorted: to be
	// reported, never fatal.
	Unknown []string
}

// Parse reads a pod's annotations. Keys of others are ignored.
//
// The error is an Errors with every bad value. Managed, Meshed and Unknown are
// right even then, the rest of Config is empty: a caller refuses a pod that is to
// join (CNI code 102) and ignores the error of one that is not.
//
// A pod whose aether.io/managed is "false" stays out whatever else says, so that
// nothing else of it is looked at and no mistake there keeps it from starting.
func Parse(annotations map[string]string) (Config, error) {
	cfg := Config{
		Meshed:  OptIn(annotations) == Joined,
		Unknown: unknown(annotations),
	}
	p := &parser{annotations: annotations}
	if value, ok := annotations[KeyManaged]; ok {
		managed, err := parseManaged(value)
		if err != nil {
			p.errs = append(p.errs, err)
		}
		cfg.Managed = managed
	}
	if cfg.Managed == Out {
		return cfg, nil
	}
	said := cfg
	cfg.Ports, cfg.Default = p.ports()
	cfg.Service = p.service()
	cfg.Weight = p.weight()
	cfg.Metadata = p.metadata()
	cfg.Upstreams = p.upstreams()
	cfg.ExcludePorts = p.excludePorts()
	cfg.ExcludeRanges = p.excludeRanges()
	p.unsupported()
	if len(p.errs) > 0 {
		return said, p.errs
	}
	return cfg, nil
}

// parser collects what is wrong with one pod's annotations.
type parser struct {
	annotations map[string]string
	errs        Errors
}

// fail records that key's value is bad, up to maxErrors times.
func (p *parser) fail(key, problem, remedy string) {
	if len(p.errs) < maxErrors {
		p.errs = append(p.errs, &Error{Key: key, Value: p.annotations[key], Problem: problem, Remedy: remedy})
	}
}

// labelRemedy says what a DNS label is.
const labelRemedy = `use a-z, 0-9 and "-" inside, at most 63`

func (p *parser) service() string {
	name, ok := p.annotations[KeyService]
	if ok && !authority.ValidLabel(name) {
		p.fail(KeyService, "not a DNS label", labelRemedy)
	}
	return name
}

func (p *parser) weight() uint32 {
	text, ok := p.annotations[KeyWeight]
	if !ok {
		return 1
	}
	// A weight is spelled exactly as a port is: 1-65535 in one way only.
	n, err := port.ParseNumber(text)
	if err != nil {
		p.fail(KeyWeight, "not a whole number in 1-65535", "write one, such as 10")
	}
	return uint32(n)
}

// unsupported refuses the keys whose enforcement does not exist yet: a security
// key is never accepted silently. The documented default is harmless.
func (p *parser) unsupported() {
	for _, key := range []string{KeyRedirectAll, KeyStrict} {
		switch value, ok := p.annotations[key]; {
		case !ok || value == "false":
		case value == "true":
			p.fail(key, "not supported by this version", `remove the key or set it to "false"`)
		default:
			p.fail(key, `only "false" is supported by this version`, `remove the key`)
		}
	}
	if _, ok := p.annotations[KeyAllow]; ok {
		p.fail(KeyAllow, "not supported by this version", "remove the key")
	}
}

// elements splits a comma list. Blanks (spaces and tabs) around commas and at the
// ends are dropped. An empty element is reported once for key and left out.
func (p *parser) elements(key string) []string {
	text, ok := p.annotations[key]
	if !ok {
		return nil
	}
	if trim(text) == "" {
		p.fail(key, "empty value", "remove the key, or list something")
		return nil
	}
	var list []string
	empty := false
	for element := range strings.SplitSeq(text, ",") {
		element = trim(element)
		if element == "" {
			if !empty {
				p.fail(key, "empty element", "remove the extra comma")
			}
			empty = true
			continue
		}
		list = append(list, element)
	}
	return list
}

func trim(s string) string { return strings.Trim(s, " \t") }
