package kubetest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/portolan-mesh/portolan/scripts/lab"
)

// adminSocket is where a node's registrar answers `registrar status`.
const adminSocket = "/run/portolan/admin.sock"

// status is what the tests read of `registrar status -o json`.
type status struct {
	Ready       bool   `json:"ready"`
	Missing     string `json:"missing"`
	Attachments []struct {
		Attachment string `json:"attachment"`
		Namespace  string `json:"namespace"`
		Pod        string `json:"pod"`
		State      string `json:"state"`
	} `json:"attachments"`
	Services []struct {
		// Service is namespace/name.
		Service string       `json:"service"`
		Ports   []statusPort `json:"ports"`
	} `json:"services"`
}

// statusPort is one port of a service with the number of pods in each state.
type statusPort struct {
	Port       int `json:"port"`
	Advertised int `json:"advertised"`
	Healthy    int `json:"healthy"`
	Draining   int `json:"draining"`
}

// registrarStatus asks a node's registrar what it knows.
func (c *cluster) registrarStatus(ctx context.Context, node int) (status, error) {
	var s status
	body, err := c.lab.Get(ctx, node, adminSocket, "/status")
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(body, &s); err != nil {
		return s, fmt.Errorf("status of node%d: %w", node, err)
	}
	return s, nil
}

// ports are the ports of a service (namespace/name).
func (s status) ports(service string) []statusPort {
	for _, candidate := range s.Services {
		if candidate.Service == service {
			return candidate.Ports
		}
	}
	return nil
}

// unhealthy says that a service (namespace/name) has not exactly so many healthy pods
// on each of its ports; "" when it has.
func (s status) unhealthy(service string, pods int) string {
	ports := s.ports(service)
	if len(ports) == 0 {
		return service + " is not known"
	}
	for _, p := range ports {
		if p.Healthy != pods || p.Advertised != pods {
			return fmt.Sprintf("%s has %+v, want %d healthy pods", service, p, pods)
		}
	}
	return ""
}

// unhealthyAnywhere is unhealthy for the registrars of all nodes.
func (c *cluster) unhealthyAnywhere(ctx context.Context, service string, pods int) string {
	for i := 1; i <= nodes; i++ {
		s, err := c.registrarStatus(ctx, i)
		if err != nil {
			return err.Error()
		}
		if text := s.unhealthy(service, pods); text != "" {
			return fmt.Sprintf("node%d: %s", i, text)
		}
	}
	return ""
}

// envoyClusters are the clusters that a node's Envoy has, each with the addresses of
// its endpoints, sorted. One that is not healthy by EDS has the reason behind it.
func (c *cluster) envoyClusters(ctx context.Context, node int) (map[string][]string, error) {
	body, err := c.lab.Get(ctx, node, lab.EnvoySocket, "/clusters?format=json")
	if err != nil {
		return nil, err
	}
	var doc struct {
		Clusters []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Address struct {
					Socket struct {
						Address string `json:"address"`
					} `json:"socket_address"`
				} `json:"address"`
				Health struct {
					EDS string `json:"eds_health_status"`
				} `json:"health_status"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return nil, fmt.Errorf("clusters of node%d: %w", node, err)
	}
	clusters := make(map[string][]string, len(doc.Clusters))
	for _, cluster := range doc.Clusters {
		addresses := make([]string, 0, len(cluster.Hosts))
		for _, host := range cluster.Hosts {
			address := host.Address.Socket.Address
			if host.Health.EDS != "HEALTHY" {
				address += " " + host.Health.EDS
			}
			addresses = append(addresses, address)
		}
		slices.Sort(addresses)
		clusters[cluster.Name] = addresses
	}
	return clusters, nil
}

// unequal says where a view of a service differs from its pods, which are at rest: the
// ServiceEndpoints, each node's registrar, each node's Envoy. It returns "" when all
// views are equal. The service serves 8080 and 9090, and both Envoys know it.
func (c *cluster) unequal(ctx context.Context, namespace, service string, pods []corev1.Pod) string {
	want, addresses := make([]string, 0, len(pods)), make([]string, 0, len(pods))
	for i := range pods {
		want = append(want, fmt.Sprint(pods[i].Name, " ", pods[i].UID, " ", pods[i].Status.PodIP, " Healthy []"))
		addresses = append(addresses, pods[i].Status.PodIP)
	}
	slices.Sort(want)
	slices.Sort(addresses)
	objects, err := c.endpoints(ctx, namespace)
	if err != nil {
		return err.Error()
	}
	var got []string
	for _, object := range objects {
		if spec := object.Spec; spec.Service == service {
			got = append(got, fmt.Sprint(spec.PodName, " ", spec.PodUID, " ", spec.IP, " ", spec.Health, " ", slices.Collect(maps.Keys(spec.PortHealth))))
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		return fmt.Sprintf("the API server has %d endpoints, want %d:\n%v\n%v", len(got), len(want), got, want)
	}
	for node := 1; node <= nodes; node++ {
		s, err := c.registrarStatus(ctx, node)
		if err != nil {
			return err.Error()
		}
		ports := s.ports(namespace + "/" + service)
		if len(pods) > 0 && len(ports) != 2 {
			return fmt.Sprintf("node%d's registrar has ports %+v, want 8080 and 9090", node, ports)
		}
		for _, p := range ports {
			if p.Advertised != len(pods) || p.Healthy != len(pods) || p.Draining != 0 {
				return fmt.Sprintf("node%d's registrar has %+v, want %d healthy pods", node, p, len(pods))
			}
		}
		clusters, err := c.envoyClusters(ctx, node)
		if err != nil {
			return err.Error()
		}
		name := service + "." + namespace + ".aether.internal"
		for _, cluster := range []string{name, name + ":9090"} {
			// Without a pod the cluster may be gone as well.
			if got, known := clusters[cluster]; !slices.Equal(got, addresses) || !known && len(pods) > 0 {
				return fmt.Sprintf("node%d's Envoy has %v in %s, want %v", node, got, cluster, addresses)
			}
		}
	}
	return ""
}

// ghosts names the attachments of a namespace that belong to none of pods, and the
// pods that have none.
func (c *cluster) ghosts(ctx context.Context, namespace string, pods []corev1.Pod) string {
	for node := 1; node <= nodes; node++ {
		s, err := c.registrarStatus(ctx, node)
		if err != nil {
			return err.Error()
		}
		var want, got []string
		for i := range pods {
			if pods[i].Spec.NodeName == fmt.Sprintf("node%d", node) {
				want = append(want, pods[i].Name)
			}
		}
		for _, attachment := range s.Attachments {
			if attachment.Namespace == namespace {
				got = append(got, attachment.Pod)
			}
		}
		slices.Sort(want)
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Sprintf("node%d has the attachments %v, want %v", node, got, want)
		}
	}
	return ""
}
