package kubetest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	// adminSocket is where a node's registrar answers `registrar status`.
	adminSocket = "/run/portolan/admin.sock"
	// envoySocket is where a node's Envoy has its admin interface.
	envoySocket = "/run/portolan/envoy/admin.sock"
)

// onNode gets a path from a unix socket of a node. A socket is a file: it is
// reached through the node's process, without entering its namespaces.
func (c *cluster) onNode(ctx context.Context, node int, socket, path string) ([]byte, error) {
	pid, err := os.ReadFile(filepath.Join(c.lab.dir, "pid", fmt.Sprintf("node%d", node)))
	if err != nil {
		return nil, err
	}
	file := filepath.Join("/proc", strings.TrimSpace(string(pid)), "root", socket)
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", file)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://node"+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("node%d: %w", node, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("node%d: %s: %s: %s", node, path, resp.Status, body)
	}
	return body, err
}

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
	body, err := c.onNode(ctx, node, adminSocket, "/status")
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

// envoyClusters are the clusters that a node's Envoy has, each with the addresses of
// its endpoints, sorted. One that is not healthy by EDS has the reason behind it.
func (c *cluster) envoyClusters(ctx context.Context, node int) (map[string][]string, error) {
	body, err := c.onNode(ctx, node, envoySocket, "/clusters?format=json")
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
