package endpointv1

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/portolan-mesh/portolan/api/authority"
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

// FieldError is the error of Validate: one field breaks its limit or its form.
type FieldError struct {
	// Field is the path of the field in the message, as the .proto spells it.
	Field string
	// Problem says what is wrong with it, with what was met and the limit.
	Problem string
}

// Error returns field and problem.
func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

func fieldErrorf(field, format string, args ...any) error {
	return &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)}
}

// Validate checks every limit that endpoint.proto states. Writers check a record
// before they send it and readers before they use it. The error is a *FieldError
// for the first field in the order of the .proto; map entries are looked at in the
// order of their keys. A protocol or a health that this version does not know is
// no error: the reader leaves that port out (contract 3).
func (x *ServiceEndpoint) Validate() error {
	if x == nil {
		return fieldErrorf("service_endpoint", "is missing")
	}
	for _, check := range []func() error{
		func() error { return checkAddress("ip", x.GetIp()) },
		func() error { return checkBytes("cluster_name", x.GetClusterName(), MaxName) },
		x.checkPort,
		x.checkMetadata,
		x.checkOrigin,
		x.checkPorts,
		x.checkAddresses,
		x.checkIdentity,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (x *ServiceEndpoint) checkPort() error {
	switch {
	case x.GetPort() > 65535:
		return fieldErrorf("port", "%d is not in 1-65535", x.GetPort())
	case x.GetPort() == 0 && len(x.GetPorts()) > 0:
		return fieldErrorf("port", "is missing although ports has %d", len(x.GetPorts()))
	case x.GetWeight() > MaxWeight:
		return fieldErrorf("weight", "%d is not in 1-%d", x.GetWeight(), MaxWeight)
	}
	if err := checkBytes("locality.region", x.GetLocality().GetRegion(), MaxLocality); err != nil {
		return err
	}
	return checkBytes("locality.zone", x.GetLocality().GetZone(), MaxLocality)
}

func (x *ServiceEndpoint) checkMetadata() error {
	if err := checkCount("metadata", len(x.GetMetadata()), MaxMetadata); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(x.GetMetadata())) {
		if len(key) > MaxMetadataKey {
			return fieldErrorf("metadata", "key %.16q... of %d bytes, at most %d are allowed", key, len(key), MaxMetadataKey)
		}
		if err := checkBytes(fmt.Sprintf("metadata[%q]", key), x.GetMetadata()[key], MaxMetadataValue); err != nil {
			return err
		}
	}
	return nil
}

func (x *ServiceEndpoint) checkOrigin() error {
	pod := x.GetKubernetesMetadata()
	if err := checkBytes("container_metadata.container_id", x.GetContainerMetadata().GetContainerId(), MaxName); err != nil {
		return err
	}
	if ns := pod.GetNamespace(); ns != "" && !authority.ValidLabel(ns) {
		return fieldErrorf("kubernetes_metadata.namespace", "%.64q is no DNS label", ns)
	}
	if err := checkBytes("kubernetes_metadata.pod_name", pod.GetPodName(), MaxName); err != nil {
		return err
	}
	if err := checkBytes("kubernetes_metadata.node_name", pod.GetNodeName(), MaxName); err != nil {
		return err
	}
	if pod.GetNodeIp() == "" {
		return nil
	}
	return checkAddress("kubernetes_metadata.node_ip", pod.GetNodeIp())
}

func (x *ServiceEndpoint) checkPorts() error {
	if err := checkCount("ports", len(x.GetPorts()), MaxPorts); err != nil {
		return err
	}
	for i, n := range x.GetPorts() {
		if n < 1 || n > 65535 {
			return fieldErrorf(fmt.Sprintf("ports[%d]", i), "%d is not in 1-65535", n)
		}
	}
	if err := checkCount("port_protocols", len(x.GetPortProtocols()), MaxPorts); err != nil {
		return err
	}
	for _, n := range slices.Sorted(maps.Keys(x.GetPortProtocols())) {
		if err := checkBytes(fmt.Sprintf("port_protocols[%d]", n), x.GetPortProtocols()[n], MaxProtocol); err != nil {
			return err
		}
	}
	return checkCount("port_health", len(x.GetPortHealth()), MaxPorts)
}

func (x *ServiceEndpoint) checkAddresses() error {
	if err := checkCount("addresses", len(x.GetAddresses()), MaxAddresses); err != nil {
		return err
	}
	for i, addr := range x.GetAddresses() {
		if err := checkAddress(fmt.Sprintf("addresses[%d]", i), addr); err != nil {
			return err
		}
	}
	return nil
}

func (x *ServiceEndpoint) checkIdentity() error {
	if err := checkBytes("service_account", x.GetServiceAccount(), MaxName); err != nil {
		return err
	}
	if account := x.GetServiceAccount(); account != "" && !segment(account, true) {
		return fieldErrorf("service_account", "%.64q is no segment of a SPIFFE ID", account)
	}
	if err := checkBytes("trust_domain", x.GetTrustDomain(), MaxTrustDomain); err != nil {
		return err
	}
	if domain := x.GetTrustDomain(); domain != "" && !segment(domain, false) {
		return fieldErrorf("trust_domain", "%.64q is no SPIFFE trust domain", domain)
	}
	if err := checkBytes("pod_uid", x.GetPodUid(), MaxPodUID); err != nil {
		return err
	}
	if service := x.GetService(); service != "" && !authority.ValidLabel(service) {
		return fieldErrorf("service", "%.64q is no DNS label", service)
	}
	if x.GetSinceUnixNanos() < 0 {
		return fieldErrorf("since_unix_nanos", "%d is before 1970", x.GetSinceUnixNanos())
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

func checkBytes(field, value string, limit int) error {
	if len(value) > limit {
		return fieldErrorf(field, "%d bytes, at most %d are allowed", len(value), limit)
	}
	return nil
}

func checkCount(field string, n, limit int) error {
	if n > limit {
		return fieldErrorf(field, "%d entries, at most %d are allowed", n, limit)
	}
	return nil
}

func checkAddress(field, text string) error {
	if err := checkBytes(field, text, MaxAddress); err != nil {
		return err
	}
	if addr, err := netip.ParseAddr(text); err != nil || addr.Zone() != "" {
		return fieldErrorf(field, "%q is not an IP address without zone", text)
	}
	return nil
}
