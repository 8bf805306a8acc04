package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// EnvoyAdmin gets a path of Envoy's admin interface, such as "/config_dump".
func (n *Node) EnvoyAdmin(ctx context.Context, path string) (string, error) {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", adminPath)
		},
	}}
	return get(ctx, client, "http://envoy"+path)
}

// Metrics are the registrar's metrics in Prometheus's text format.
func (n *Node) Metrics(ctx context.Context) (string, error) {
	return get(ctx, http.DefaultClient, runURL+"/metrics")
}

// Metric is the value of the metric with this name and these labels, as it is
// written, for example `portolan_xds_nacks_total{type="cluster"}`; "" when
// there is no such metric.
func (n *Node) Metric(ctx context.Context, series string) (string, error) {
	metrics, err := n.Metrics(ctx)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(metrics) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", nil
}

// StatusJSON is what `registrar status -o json` prints.
func (n *Node) StatusJSON(ctx context.Context) ([]byte, error) {
	out, err := output(ctx, nil, n.Binary("registrar"), "status", "-o", "json")
	return []byte(out), err
}

// WaitHealthy waits until exactly pods endpoints of the service (its mesh name
// without the domain) are healthy on this port.
func (n *Node) WaitHealthy(ctx context.Context, service string, port uint16, pods int) error {
	return wait(ctx, fmt.Sprintf("%d healthy pods of %s:%d", pods, service, port), func(ctx context.Context) error {
		out, err := n.StatusJSON(ctx)
		if err != nil {
			return err
		}
		var status nodeStatus
		if err := json.Unmarshal(out, &status); err != nil {
			return fmt.Errorf("read the registrar's status %q: %w", out, err)
		}
		if got := status.healthy(service, port); got != pods {
			return fmt.Errorf("%d are healthy", got)
		}
		return nil
	}, n.Registrar)
}

// nodeStatus is the part of the registrar's status that the harness reads.
type nodeStatus struct {
	Endpoints []struct {
		Service string `json:"service"`
		Ports   []struct {
			Port   uint16 `json:"port"`
			Health string `json:"health"`
		} `json:"ports"`
	} `json:"endpoints"`
}

func (s nodeStatus) healthy(service string, port uint16) int {
	count := 0
	for _, endpoint := range s.Endpoints {
		for _, p := range endpoint.Ports {
			if endpoint.Service == service && p.Port == port && p.Health == "healthy" {
				count++
			}
		}
	}
	return count
}

func getOK(ctx context.Context, url string) error {
	_, err := get(ctx, http.DefaultClient, url)
	return err
}

// get returns the body of a 200.
func get(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", fmt.Errorf("get %s: %w", url, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("get: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("get %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("get %s: %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
	return string(body), nil
}
