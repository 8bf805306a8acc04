package endpointv1

import (
	"fmt"
	"maps"
	"slices"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/limit"
)

// The limits that endpoint.proto states. Lengths are in bytes.
const (
	// MaxAddress bounds one textual IP address.
	MaxAddress = 45
	// MaxAddresses bounds addresses.
	MaxAddresses = 8
	// MaxName bounds cluster_name, service_account, container_id, pod_name and node_name.
	MaxName = 253
	// MaxTrustDomain bounds trust_domain.
	MaxTrustDomain = 255
	// MaxPodUID bounds pod_uid.
	MaxPodUID = 128
	// MaxLocality bounds region and zone.
	MaxLocality = 63
	// MaxWeight is the largest weight.
	MaxWeight = 65535
	// MaxPorts bounds ports, port_protocols and port_health.
	MaxPorts = 64
	// MaxProtocol bounds one value of port_protocols.
	MaxProtocol = 16
	// MaxMetadata bounds the entries of metadata.
	MaxMetadata = 32
	// MaxMetadataKey bounds one key of metadata.
	MaxMetadataKey = 63
	// MaxMetadataValue bounds one value of metadata.
	MaxMetadataValue = 253
)

// Validate checks every limit that endpoint.proto states. Writers check a record
// before they send it and readers before they use it. The error is a *limit.FieldError
// for the first field in the order of the .proto; map entries are looked at in the
// order of their keys. A protocol or a health that this version does not know is
// no error: the reader leaves that port out (contract 3).
func (x *ServiceEndpoint) Validate() error {
	if x == nil {
		return limit.Errorf("service_endpoint", "is missing")
	}
	return limit.First(
		func() error { return checkAddress("ip", x.GetIp()) },
		func() error { return limit.Bytes("cluster_name", x.GetClusterName(), MaxName) },
		x.checkPort,
		x.checkMetadata,
		x.checkOrigin,
		x.checkPorts,
		x.checkAddresses,
		x.checkIdentity,
	)
}

func (x *ServiceEndpoint) checkPort() error {
	switch {
	case x.GetPort() > 65535:
		return limit.Errorf("port", "%d is not in 1-65535", x.GetPort())
	case x.GetPort() == 0 && len(x.GetPorts()) > 0:
		return limit.Errorf("port", "is missing although ports has %d", len(x.GetPorts()))
	case x.GetWeight() > MaxWeight:
		return limit.Errorf("weight", "%d is not in 1-%d", x.GetWeight(), MaxWeight)
	}
	if err := limit.Bytes("locality.region", x.GetLocality().GetRegion(), MaxLocality); err != nil {
		return err
	}
	return limit.Bytes("locality.zone", x.GetLocality().GetZone(), MaxLocality)
}

func (x *ServiceEndpoint) checkMetadata() error {
	if err := limit.Count("metadata", len(x.GetMetadata()), MaxMetadata); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(x.GetMetadata())) {
		if len(key) > MaxMetadataKey {
			return limit.Errorf("metadata", "key %.16q... of %d bytes, at most %d are allowed", key, len(key), MaxMetadataKey)
		}
		if err := limit.Bytes(fmt.Sprintf("metadata[%q]", key), x.GetMetadata()[key], MaxMetadataValue); err != nil {
			return err
		}
	}
	return nil
}

func (x *ServiceEndpoint) checkOrigin() error {
	pod := x.GetKubernetesMetadata()
	if err := limit.Bytes("container_metadata.container_id", x.GetContainerMetadata().GetContainerId(), MaxName); err != nil {
		return err
	}
	if ns := pod.GetNamespace(); ns != "" && !authority.ValidLabel(ns) {
		return limit.Errorf("kubernetes_metadata.namespace", "%.64q is no DNS label", ns)
	}
	if err := limit.Bytes("kubernetes_metadata.pod_name", pod.GetPodName(), MaxName); err != nil {
		return err
	}
	if err := limit.Bytes("kubernetes_metadata.node_name", pod.GetNodeName(), MaxName); err != nil {
		return err
	}
	if pod.GetNodeIp() == "" {
		return nil
	}
	return checkAddress("kubernetes_metadata.node_ip", pod.GetNodeIp())
}

func (x *ServiceEndpoint) checkPorts() error {
	if err := limit.List("ports", x.GetPorts(), MaxPorts, limit.Port); err != nil {
		return err
	}
	if err := limit.Count("port_protocols", len(x.GetPortProtocols()), MaxPorts); err != nil {
		return err
	}
	for _, n := range slices.Sorted(maps.Keys(x.GetPortProtocols())) {
		if err := limit.Bytes(fmt.Sprintf("port_protocols[%d]", n), x.GetPortProtocols()[n], MaxProtocol); err != nil {
			return err
		}
	}
	return limit.Count("port_health", len(x.GetPortHealth()), MaxPorts)
}

func (x *ServiceEndpoint) checkAddresses() error {
	return limit.List("addresses", x.GetAddresses(), MaxAddresses, checkAddress)
}

func (x *ServiceEndpoint) checkIdentity() error {
	if err := limit.Bytes("service_account", x.GetServiceAccount(), MaxName); err != nil {
		return err
	}
	if account := x.GetServiceAccount(); account != "" && !segment(account, true) {
		return limit.Errorf("service_account", "%.64q is no segment of a SPIFFE ID", account)
	}
	if err := limit.Bytes("trust_domain", x.GetTrustDomain(), MaxTrustDomain); err != nil {
		return err
	}
	if domain := x.GetTrustDomain(); domain != "" && !segment(domain, false) {
		return limit.Errorf("trust_domain", "%.64q is no SPIFFE trust domain", domain)
	}
	if err := limit.Bytes("pod_uid", x.GetPodUid(), MaxPodUID); err != nil {
		return err
	}
	if service := x.GetService(); service != "" && !authority.ValidLabel(service) {
		return limit.Errorf("service", "%.64q is no DNS label", service)
	}
	if x.GetSinceUnixNanos() < 0 {
		return limit.Errorf("since_unix_nanos", "%d is before 1970", x.GetSinceUnixNanos())
	}
	return nil
}

// segment says whether s has only the characters of a SPIFFE ID's path segment
// (upper-case letters only if they may be) and is no dot segment: what a slash or
// ".." would make of an identity is another identity.
func segment(s string, upper bool) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '.', c == '-', c == '_':
		case upper && 'A' <= c && c <= 'Z':
		default:
			return false
		}
	}
	return s != "." && s != ".."
}

func checkAddress(field, text string) error { return limit.Address(field, text, MaxAddress) }
