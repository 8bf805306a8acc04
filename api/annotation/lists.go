package annotation

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
)

// metadata reads the keys under KeyMetadataPrefix in the order of their names.
func (p *parser) metadata() map[string]string {
	var found map[string]string
	for _, key := range slices.Sorted(maps.Keys(p.annotations)) {
		name, ok := strings.CutPrefix(key, KeyMetadataPrefix)
		if !ok {
			continue
		}
		value := p.annotations[key]
		switch {
		case !authority.ValidLabel(name):
			p.fail(key, "the key is no DNS label", labelRemedy)
		case reserved(name):
			p.fail(key, "the key is reserved", "use a name other than ip, pod, node, namespace")
		case len(value) > MaxMetadataValue:
			p.fail(key, fmt.Sprintf("value of %d bytes", len(value)), fmt.Sprintf("use at most %d bytes", MaxMetadataValue))
		case !utf8.ValidString(value):
			p.fail(key, "value is not UTF-8", "write it as text")
		default:
			if found == nil {
				found = make(map[string]string)
			}
			found[name] = value
		}
		if len(found) > MaxMetadata {
			p.fail(key, fmt.Sprintf("more than %d subset keys", MaxMetadata), "remove some")
			break
		}
	}
	return found
}

// reserved says whether a subset key of this name is set by the mesh itself.
func reserved(name string) bool {
	switch name {
	case "ip", "pod", "node", "namespace":
		return true
	}
	return false
}

// upstreams reads the services that the pod calls.
func (p *parser) upstreams() []string {
	var list []string
	for _, element := range p.elements(KeyUpstreams) {
		service, namespace, two := strings.Cut(element, ".")
		if !authority.ValidLabel(service) || two && !authority.ValidLabel(namespace) {
			p.fail(KeyUpstreams, quote(element, maxEntryText)+" is no service name", `write "payments" or "payments.shop"`)
			continue
		}
		list = append(list, element)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	p.limit(KeyUpstreams, len(list), MaxUpstreams)
	return list
}

// excludePorts reads the destination ports that are never captured. Ports of the
// mesh are not refused: they only matter inside the pod.
func (p *parser) excludePorts() []uint16 {
	var list []uint16
	for _, element := range p.elements(KeyExcludePorts) {
		n, err := port.ParseNumber(element)
		if err != nil {
			p.fail(KeyExcludePorts, numberProblem(err), `write 1-65535, as in "25,3306"`)
			continue
		}
		list = append(list, n)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	p.limit(KeyExcludePorts, len(list), MaxExclusions)
	return list
}

// excludeRanges reads the destination CIDRs that are never captured. What lies
// within another one is dropped, since the kernel's sets refuse overlaps.
func (p *parser) excludeRanges() []netip.Prefix {
	const remedy = `write "10.0.0.0/8" or "fd00::/8"`
	var list []netip.Prefix
	for _, element := range p.elements(KeyExcludeRanges) {
		prefix, err := netip.ParsePrefix(element)
		switch {
		case err != nil:
			p.fail(KeyExcludeRanges, quote(element, maxEntryText)+" is no CIDR", remedy)
		case prefix.Addr().Is4In6():
			p.fail(KeyExcludeRanges, quote(element, maxEntryText)+" is IPv4 in IPv6", remedy)
		default:
			list = append(list, prefix.Masked())
		}
	}
	// Sorted by address, then length: a range stands before all within it.
	slices.SortFunc(list, netip.Prefix.Compare)
	var apart []netip.Prefix
	for _, prefix := range list {
		if len(apart) == 0 || !apart[len(apart)-1].Overlaps(prefix) {
			apart = append(apart, prefix)
		}
	}
	p.limit(KeyExcludeRanges, len(apart), MaxExclusions)
	return apart
}

// limit reports a list that is too long.
func (p *parser) limit(key string, n, most int) {
	if n > most {
		p.fail(key, fmt.Sprintf("%d entries, more than %d", n, most), "remove some")
	}
}
