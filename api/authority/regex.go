package authority

import "regexp"

const (
	// labelRegex is a DNS label in lower case.
	labelRegex = `[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?`
	// portRegex is a port 1-65535 without leading zero. The bound is spelled out,
	// so that :65536 is a 404 of the route table and no question to anybody (XDS-65).
	portRegex = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
)

// MeshRegex returns the RE2 expression of every well-formed authority of the
// mesh domain in lower case, for the universal catch-all route: one or two
// labels, the domain, optionally a port. Envoy matches a safe_regex as a whole
// (XDS-49), so it carries no anchors. The trailing dot is not in it: Envoy strips
// it (strip_trailing_host_dot) before it routes. Envoy counts 558 instructions of
// its RE2 program for aether.internal and 668 for the longest domain; its own
// limit of 100 is raised to 1000 by the bootstrap.
func MeshRegex(domain string) string {
	return labelRegex + `\.(` + labelRegex + `\.)?` + regexp.QuoteMeta(domain) + `(:` + portRegex + `)?`
}

// PortRegex returns the RE2 expression of an authority that ends in a valid
// port, for the virtual host "F:*", whose host part Envoy has compared already
// (dataplane decision 6). It matches the whole authority, as MeshRegex does.
func PortRegex() string { return `[^:]*:` + portRegex }
