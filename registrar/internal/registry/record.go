package registry

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/authority"
	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// MaxUID is the longest UID of a record, in bytes: a namespace and a name of
// Kubernetes, or a container ID and an interface, fit.
const MaxUID = 512

// defaultNamespace is that of a record which names none (contract 3).
const defaultNamespace = "default"

// FromProto returns what a record of the wire or of a file means to this version.
// leftOut says, in sentences for people, what of it could not be used: the reader
// reports them. The error says that nothing of it can be used. The result shares
// no memory with se (MESH-23).
//
// Contract 3: no ports means {port}; a health that is not said is UNHEALTHY; a
// protocol that is not known makes its port unroutable (port.Unknown), never HTTP
// (MESH-8).
func FromProto(uid string, se *endpointv1.ServiceEndpoint) (ep model.Endpoint, leftOut []string, err error) {
	if uid == "" || len(uid) > MaxUID {
		return model.Endpoint{}, nil, fmt.Errorf("record with a UID of %d bytes: it must have 1 to %d", len(uid), MaxUID)
	}
	if err := se.Validate(); err != nil {
		return model.Endpoint{}, nil, fmt.Errorf("record %q: %w", uid, err)
	}
	r := reading{se: se}
	ep = model.Endpoint{
		UID:         uid,
		Generation:  se.GetGeneration(),
		Since:       r.since(),
		Service:     r.service(),
		Addresses:   r.addresses(),
		Default:     uint16(se.GetPort()),
		Ports:       r.ports(),
		Weight:      max(se.GetWeight(), 1),
		Locality:    model.Locality{Region: se.GetLocality().GetRegion(), Zone: se.GetLocality().GetZone()},
		Metadata:    maps.Clone(se.GetMetadata()),
		PodName:     se.GetKubernetesMetadata().GetPodName(),
		PodUID:      se.GetPodUid(),
		Node:        se.GetKubernetesMetadata().GetNodeName(),
		ContainerID: se.GetContainerMetadata().GetContainerId(),
	}
	ep.Identity = model.Identity{TrustDomain: se.GetTrustDomain(), Namespace: ep.Service.Namespace, Account: se.GetServiceAccount()}
	if err := check(ep); err != nil {
		return model.Endpoint{}, nil, fmt.Errorf("record %q: %w", uid, err)
	}
	return ep, r.leftOut, nil
}

// reading is one FromProto; its methods collect what is left out.
type reading struct {
	se      *endpointv1.ServiceEndpoint
	leftOut []string
}

func (r *reading) leave(format string, args ...any) {
	r.leftOut = append(r.leftOut, fmt.Sprintf(format, args...))
}

func (r *reading) since() time.Time {
	if r.se.GetSinceUnixNanos() == 0 {
		return time.Time{}
	}
	return time.Unix(0, r.se.GetSinceUnixNanos()).UTC()
}

// service returns the key; an older writer says it in its mesh name only.
func (r *reading) service() model.ServiceKey {
	key := model.ServiceKey{Namespace: r.se.GetKubernetesMetadata().GetNamespace(), Name: r.se.GetService()}
	if key.Namespace == "" {
		key.Namespace = defaultNamespace
	}
	if key.Name == "" {
		key.Name, _, _ = strings.Cut(r.se.GetClusterName(), ".")
	}
	return key
}

// addresses returns the primary one, then the others that can be used.
func (r *reading) addresses() []netip.Addr {
	list := []netip.Addr{netip.MustParseAddr(r.se.GetIp()).Unmap()} // Validate has parsed them
	for _, text := range r.se.GetAddresses() {
		switch addr := netip.MustParseAddr(text).Unmap(); {
		case slices.Contains(list, addr):
		case !usable(addr):
			r.leave("address %s is no address of a pod", text)
		default:
			list = append(list, addr)
		}
	}
	return list
}

func (r *reading) ports() []model.PortStatus {
	numbers := slices.Clone(r.se.GetPorts())
	if r.se.GetPort() != 0 {
		numbers = append(numbers, r.se.GetPort())
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	health := r.health("health", r.se.GetHealth())
	var list []model.PortStatus
	for _, n := range numbers {
		status := model.PortStatus{Port: port.Port{Number: uint16(n), Protocol: port.HTTP}, Health: health}
		if text, ok := r.se.GetPortProtocols()[n]; ok {
			if status.Protocol, ok = port.ParseProtocol(text); !ok {
				r.leave("port %d: protocol %q is not known to this version, the port is not routed", n, text)
			}
		}
		if own, ok := r.se.GetPortHealth()[n]; ok {
			status.Health = r.health(fmt.Sprintf("port_health[%d]", n), own)
		}
		list = append(list, status)
	}
	for _, n := range slices.Sorted(maps.Keys(r.se.GetPortProtocols())) {
		if _, ok := slices.BinarySearch(numbers, n); !ok {
			r.leave("port_protocols[%d]: the record has no such port", n)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(r.se.GetPortHealth())) {
		if _, ok := slices.BinarySearch(numbers, n); !ok {
			r.leave("port_health[%d]: the record has no such port", n)
		}
	}
	return list
}

func (r *reading) health(field string, h endpointv1.Health) model.Health {
	switch h {
	case endpointv1.Health_HEALTH_HEALTHY:
		return model.Healthy
	case endpointv1.Health_HEALTH_DRAINING:
		return model.Draining
	case endpointv1.Health_HEALTH_UNHEALTHY, endpointv1.Health_HEALTH_UNSPECIFIED:
		return model.Unhealthy
	}
	r.leave("%s: %d is not known to this version, it counts as unhealthy", field, int32(h))
	return model.Unhealthy
}

// ToProto returns the record of ep for the wire or a file; name is the mesh name
// of its service, which the projection gives. What it returns, FromProto reads
// back to ep, but for further addresses of link scope, which are left out. The error
// names what of ep cannot be a record. The result shares no memory with ep.
func ToProto(ep model.Endpoint, name string) (*endpointv1.ServiceEndpoint, error) {
	if wide := beyondLink(ep.Addresses); len(wide) > 0 {
		ep.Addresses = wide
	}
	if err := check(ep); err != nil {
		return nil, fmt.Errorf("record %q: %w", ep.UID, err)
	}
	se := &endpointv1.ServiceEndpoint{
		Ip:                ep.Addresses[0].String(),
		ClusterName:       name,
		Port:              uint32(ep.Default),
		Weight:            ep.Weight,
		Metadata:          maps.Clone(ep.Metadata),
		ContainerMetadata: &endpointv1.ContainerMetadata{ContainerId: ep.ContainerID},
		KubernetesMetadata: &endpointv1.KubernetesMetadata{
			Namespace: ep.Service.Namespace, PodName: ep.PodName, NodeName: ep.Node,
		},
		Health:         endpointv1.Health_HEALTH_UNHEALTHY,
		ServiceAccount: ep.Identity.Account,
		TrustDomain:    ep.Identity.TrustDomain,
		PodUid:         ep.PodUID,
		Service:        ep.Service.Name,
		Generation:     ep.Generation,
	}
	if ep.Locality != (model.Locality{}) {
		se.Locality = &endpointv1.Locality{Region: ep.Locality.Region, Zone: ep.Locality.Zone}
	}
	if !ep.Since.IsZero() {
		se.SinceUnixNanos = ep.Since.UnixNano()
	}
	for _, addr := range ep.Addresses {
		se.Addresses = append(se.Addresses, addr.String())
	}
	writePorts(se, ep)
	if err := se.Validate(); err != nil {
		return nil, fmt.Errorf("record %q: %w", ep.UID, err)
	}
	return se, nil
}

// writePorts sets the ports of se. The health of the whole is that of the default
// port, the only one that an older reader knows.
func writePorts(se *endpointv1.ServiceEndpoint, ep model.Endpoint) {
	for _, p := range ep.Ports {
		if p.Number == ep.Default {
			se.Health = wireHealth(p.Health)
		}
	}
	for _, p := range ep.Ports {
		n := uint32(p.Number)
		se.Ports = append(se.Ports, n)
		if p.Protocol != port.HTTP {
			if se.PortProtocols == nil {
				se.PortProtocols = make(map[uint32]string)
			}
			se.PortProtocols[n] = p.Protocol.String()
		}
		if h := wireHealth(p.Health); h != se.GetHealth() {
			if se.PortHealth == nil {
				se.PortHealth = make(map[uint32]endpointv1.Health)
			}
			se.PortHealth[n] = h
		}
	}
}

func wireHealth(h model.Health) endpointv1.Health {
	switch h {
	case model.Healthy:
		return endpointv1.Health_HEALTH_HEALTHY
	case model.Draining:
		return endpointv1.Health_HEALTH_DRAINING
	case model.Unhealthy:
	}
	return endpointv1.Health_HEALTH_UNHEALTHY
}

// check says what keeps ep from being a record beyond the limits of the protobuf.
func check(ep model.Endpoint) error {
	switch {
	case ep.UID == "" || len(ep.UID) > MaxUID:
		return fmt.Errorf("a UID of %d bytes: it must have 1 to %d", len(ep.UID), MaxUID)
	case !authority.ValidLabel(ep.Service.Name) || !authority.ValidLabel(ep.Service.Namespace):
		return fmt.Errorf("service %.128q is not two DNS labels", ep.Service)
	case ep.Identity.TrustDomain == "" || ep.Identity.Account == "":
		// Nobody could be pinned to it, so nobody may be sent there.
		return errors.New("trust_domain or service_account is missing")
	case ep.Identity.Namespace != ep.Service.Namespace:
		return fmt.Errorf("identity %s is not of the service's namespace %s", ep.Identity.SPIFFE(), ep.Service.Namespace)
	case ep.Weight == 0:
		return errors.New("weight 0 is not in 1-65535")
	case len(ep.Addresses) == 0:
		return errors.New("it has no address")
	}
	for i, addr := range ep.Addresses {
		if !usable(addr) || addr.Is4In6() {
			return fmt.Errorf("address %s is no address of a pod", addr)
		}
		if slices.Contains(ep.Addresses[:i], addr) {
			return fmt.Errorf("address %s is listed twice", addr)
		}
	}
	hasDefault := len(ep.Ports) == 0 && ep.Default == 0
	for i, p := range ep.Ports {
		if p.Number == 0 || i > 0 && ep.Ports[i-1].Number >= p.Number {
			return fmt.Errorf("ports are not ascending from 1 at %d", p.Number)
		}
		if port.Mesh(p.Number) {
			return fmt.Errorf("port %d belongs to the mesh", p.Number)
		}
		hasDefault = hasDefault || p.Number == ep.Default
	}
	if !hasDefault {
		return fmt.Errorf("default port %d is not among its %d ports", ep.Default, len(ep.Ports))
	}
	return nil
}

// usable says whether addr can be dialled as one pod's address from any node.
func usable(addr netip.Addr) bool {
	return addr.Zone() == "" && addr.IsGlobalUnicast()
}

// beyondLink returns the addresses without those of link scope, which a pod may have
// besides those that other nodes can dial.
func beyondLink(addrs []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addrs), func(addr netip.Addr) bool {
		return addr.Zone() == "" && addr.IsLinkLocalUnicast()
	})
}
