package annotation

import (
	"slices"
	"strings"
)

// The keys of contract 1.
const (
	// KeyManaged joins the mesh ("true") or stays out whatever else says ("false").
	KeyManaged = "aether.io/managed"
	// KeyPort is the default port.
	KeyPort = "endpoint.aether.io/port"
	// KeyPorts lists all ports served, each with an optional protocol, or is "none".
	KeyPorts = "endpoint.aether.io/ports"
	// KeyService is the service's name.
	KeyService = "endpoint.aether.io/service"
	// KeyWeight is the load-balancing weight.
	KeyWeight = "endpoint.aether.io/weight"
	// KeyMetadataPrefix, followed by a DNS label, is one subset key of the endpoint.
	KeyMetadataPrefix = "metadata.endpoint.aether.io/"
	// KeyUpstreams lists the services that this pod calls.
	KeyUpstreams = "config.aether.io/upstreams"
	// KeyExcludePorts lists destination ports that are never captured.
	KeyExcludePorts = "capture.aether.io/exclude-outbound-ports"
	// KeyExcludeRanges lists destination CIDRs that are never captured.
	KeyExcludeRanges = "capture.aether.io/exclude-outbound-ip-ranges"
	// KeyRedirectAll sends all outbound TCP through the mesh. Not in this version.
	KeyRedirectAll = "capture.aether.io/redirect-all"
	// KeyStrict closes declared ports to everything but the mesh. Not in this version.
	KeyStrict = "inbound.aether.io/strict"
	// KeyAllow says who may call which port. Not in this version.
	KeyAllow = "inbound.aether.io/allow"
)

// ownDomain is the domain under which every key of ours lies.
const ownDomain = "aether.io"

// known says whether key is one that Parse looks at.
func known(key string) bool {
	switch key {
	case KeyManaged, KeyPort, KeyPorts, KeyService, KeyWeight, KeyUpstreams,
		KeyExcludePorts, KeyExcludeRanges, KeyRedirectAll, KeyStrict, KeyAllow:
		return true
	}
	return strings.HasPrefix(key, KeyMetadataPrefix)
}

// Own reports whether key lies under aether.io or a name below it: all that a
// source of pods has to keep. The prefix may be in capitals, as Kubernetes allows
// it.
func Own(key string) bool {
	prefix, _, ok := strings.Cut(key, "/")
	prefix = strings.ToLower(prefix)
	return ok && (prefix == ownDomain || strings.HasSuffix(prefix, "."+ownDomain))
}

// unknown returns the own keys that Parse does not look at, sorted: spelling
// mistakes such as endpoint.aether.io/prots or endpoints.aether.io/port (CNI-46).
func unknown(annotations map[string]string) []string {
	var keys []string
	for key := range annotations {
		if Own(key) && !known(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}
