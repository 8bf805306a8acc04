package kubernetes

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// objectOf returns the object of a record; name is the mesh name of its service.
// The error names what of ep cannot be an object.
func objectOf(ep model.Endpoint, name string) (*v1alpha1.ServiceEndpoint, error) {
	se, err := registry.ToProto(ep, name)
	if err != nil {
		return nil, err
	}
	if ep.Generation < 1 || ep.Generation > math.MaxInt64 {
		return nil, fmt.Errorf("record %q: generation %d is not in 1-%d", ep.UID, ep.Generation, int64(math.MaxInt64))
	}
	object := &v1alpha1.ServiceEndpoint{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: v1alpha1.Kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: ep.Service.Namespace, Name: objectName(ep)},
		Spec:       specOf(ep.UID, se),
	}
	if len(ep.PodUID) == apiUID && ep.PodName != "" {
		object.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: ep.PodName, UID: types.UID(ep.PodUID)}}
	}
	return object, nil
}

// apiUID is how long the UID of an object of the API server is. The record of a static
// pod has a shorter one, of the kubelet's making: nothing can belong to that, and the
// pod's mirror can be gone while the pod goes on. Its object belongs to the node, as the
// mirror does (Backend.put).
const apiUID = len("00000000-0000-0000-0000-000000000000")

// specOf writes a record of the wire as a spec.
func specOf(uid string, se *endpointv1.ServiceEndpoint) v1alpha1.ServiceEndpointSpec {
	spec := v1alpha1.ServiceEndpointSpec{
		UID:            uid,
		Generation:     int64(se.GetGeneration()),
		SinceUnixNanos: se.GetSinceUnixNanos(),
		Service:        se.GetService(),
		ClusterName:    se.GetClusterName(),
		ServiceAccount: se.GetServiceAccount(),
		TrustDomain:    se.GetTrustDomain(),
		IP:             v1alpha1.Address(se.GetIp()),
		Port:           int32(se.GetPort()),
		Ports:          portsText(se),
		Health:         healthText(se.GetHealth()),
		Weight:         int32(se.GetWeight()),
		NodeName:       se.GetKubernetesMetadata().GetNodeName(),
		PodName:        se.GetKubernetesMetadata().GetPodName(),
		PodUID:         se.GetPodUid(),
		ContainerID:    se.GetContainerMetadata().GetContainerId(),
	}
	for _, text := range se.GetAddresses() {
		spec.Addresses = append(spec.Addresses, v1alpha1.Address(text))
	}
	if l := se.GetLocality(); l != nil {
		spec.Locality = &v1alpha1.Locality{Region: l.GetRegion(), Zone: l.GetZone()}
	}
	for n, h := range se.GetPortHealth() {
		if spec.PortHealth == nil {
			spec.PortHealth = make(map[string]v1alpha1.Health)
		}
		spec.PortHealth[strconv.FormatUint(uint64(n), 10)] = healthText(h)
	}
	for key, value := range se.GetMetadata() {
		if spec.Metadata == nil {
			spec.Metadata = make(map[string]v1alpha1.MetadataValue)
		}
		spec.Metadata[key] = v1alpha1.MetadataValue(value)
	}
	return spec
}

// portsText writes ports in the grammar of the pod's annotation.
func portsText(se *endpointv1.ServiceEndpoint) string {
	parts := make([]string, 0, len(se.GetPorts()))
	for _, n := range se.GetPorts() {
		text := strconv.FormatUint(uint64(n), 10)
		if protocol, ok := se.GetPortProtocols()[n]; ok && protocol != port.HTTP.String() {
			text += "=" + protocol
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ",")
}

func healthText(h endpointv1.Health) v1alpha1.Health {
	switch h {
	case endpointv1.Health_HEALTH_HEALTHY:
		return v1alpha1.Healthy
	case endpointv1.Health_HEALTH_DRAINING:
		return v1alpha1.Draining
	case endpointv1.Health_HEALTH_UNHEALTHY, endpointv1.Health_HEALTH_UNSPECIFIED:
	}
	return v1alpha1.Unhealthy
}

// recordOf returns what an object means to this version, as registry.FromProto
// does, with the same leftOut and errors.
func recordOf(object *v1alpha1.ServiceEndpoint) (ep model.Endpoint, leftOut []string, err error) {
	r := specReading{spec: &object.Spec}
	se, err := r.proto(object.Namespace)
	if err != nil {
		return model.Endpoint{}, nil, fmt.Errorf("record %.128q: %w", object.Spec.UID, err)
	}
	ep, leftOut, err = registry.FromProto(object.Spec.UID, se)
	return ep, append(r.leftOut, leftOut...), err
}

// specReading is one recordOf up to the wire's form; it collects what is left out.
type specReading struct {
	spec    *v1alpha1.ServiceEndpointSpec
	leftOut []string
}

func (r *specReading) leave(format string, args ...any) {
	r.leftOut = append(r.leftOut, fmt.Sprintf(format, args...))
}

// proto returns the spec as a record of the wire. The pod's namespace is that of
// the object: no writer can put a record into a namespace where it may not write.
func (r *specReading) proto(namespace string) (*endpointv1.ServiceEndpoint, error) {
	spec := r.spec
	for name, n := range map[string]int64{
		"generation": spec.Generation, "sinceUnixNanos": spec.SinceUnixNanos, "port": int64(spec.Port), "weight": int64(spec.Weight),
	} {
		if n < 0 {
			return nil, fmt.Errorf("%s %d is negative", name, n)
		}
	}
	se := &endpointv1.ServiceEndpoint{
		Ip:                 string(spec.IP),
		ClusterName:        spec.ClusterName,
		Port:               uint32(spec.Port),
		Weight:             uint32(spec.Weight),
		ContainerMetadata:  &endpointv1.ContainerMetadata{ContainerId: spec.ContainerID},
		KubernetesMetadata: &endpointv1.KubernetesMetadata{Namespace: namespace, PodName: spec.PodName, NodeName: spec.NodeName},
		Health:             r.health("health", spec.Health),
		ServiceAccount:     spec.ServiceAccount,
		TrustDomain:        spec.TrustDomain,
		PodUid:             spec.PodUID,
		Service:            spec.Service,
		Generation:         uint64(spec.Generation),
		SinceUnixNanos:     spec.SinceUnixNanos,
	}
	for _, a := range spec.Addresses {
		se.Addresses = append(se.Addresses, string(a))
	}
	if l := spec.Locality; l != nil {
		se.Locality = &endpointv1.Locality{Region: l.Region, Zone: l.Zone}
	}
	for key, value := range spec.Metadata {
		if se.Metadata == nil {
			se.Metadata = make(map[string]string)
		}
		se.Metadata[key] = string(value)
	}
	if err := r.ports(se); err != nil {
		return nil, err
	}
	return se, nil
}

// ports reads ports and portHealth into se.
func (r *specReading) ports(se *endpointv1.ServiceEndpoint) error {
	if r.spec.Ports != "" {
		for text := range strings.SplitSeq(r.spec.Ports, ",") {
			number, protocol, named := strings.Cut(text, "=")
			n, err := strconv.ParseUint(number, 10, 16)
			if err != nil || n == 0 {
				return fmt.Errorf("ports: %.32q is no port", text)
			}
			if slices.Contains(se.GetPorts(), uint32(n)) {
				return fmt.Errorf("ports: %d is listed twice", n)
			}
			se.Ports = append(se.Ports, uint32(n))
			if named {
				if se.PortProtocols == nil {
					se.PortProtocols = make(map[uint32]string)
				}
				se.PortProtocols[uint32(n)] = protocol
			}
		}
	}
	for _, text := range slices.Sorted(maps.Keys(r.spec.PortHealth)) {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			r.leave("portHealth: %.32q is no port", text)
			continue
		}
		if se.PortHealth == nil {
			se.PortHealth = make(map[uint32]endpointv1.Health)
		}
		se.PortHealth[uint32(n)] = r.health("portHealth["+text+"]", r.spec.PortHealth[text])
	}
	return nil
}

func (r *specReading) health(field string, h v1alpha1.Health) endpointv1.Health {
	switch h {
	case v1alpha1.Healthy:
		return endpointv1.Health_HEALTH_HEALTHY
	case v1alpha1.Draining:
		return endpointv1.Health_HEALTH_DRAINING
	case v1alpha1.Unhealthy, "":
	default:
		r.leave("%s: %.32q is not known to this version, it counts as unhealthy", field, string(h))
	}
	return endpointv1.Health_HEALTH_UNHEALTHY
}
