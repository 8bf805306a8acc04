package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
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

// Status of the registrar, the part that the harness reads.
type Status struct {
	Services []struct {
		// Service is namespace/name.
		Service string `json:"service"`
		// Ports are the union of what the service's pods advertise.
		Ports []struct {
			Port       uint16 `json:"port"`
			Advertised int    `json:"advertised"`
			Healthy    int    `json:"healthy"`
		} `json:"ports"`
	} `json:"services"`
	Attachments []struct {
		// Attachment is containerID-ifname.
		Attachment string `json:"attachment"`
		Pod        string `json:"pod"`
	} `json:"attachments"`
	NACKs []struct {
		Kind   string `json:"kind"`
		Name   string `json:"name"`
		Reason string `json:"reason"`
	} `json:"nacks"`
}

// Healthy is how many pods of the service (namespace/name) are healthy on the port.
func (s Status) Healthy(service string, port uint16) int {
	for _, candidate := range s.Services {
		for _, p := range candidate.Ports {
			if candidate.Service == service && p.Port == port {
				return p.Healthy
			}
		}
	}
	return 0
}

// notReady is the exit status by which `registrar status` says that it printed what
// a registrar knows that is not ready.
const notReady = 2

// status runs `registrar status`; a registrar that is not ready is no error.
func (n *Node) status(ctx context.Context, args ...string) (string, error) {
	out, err := output(ctx, append([]string{n.Binary("registrar"), "status"}, args...)...)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == notReady {
		return out, nil
	}
	return out, err
}

// RegistrarStatus asks the registrar what it knows, by `registrar status`.
func (n *Node) RegistrarStatus(ctx context.Context) (Status, error) {
	var status Status
	out, err := n.status(ctx, "-o", "json")
	if err != nil {
		return status, err
	}
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		return status, fmt.Errorf("read the registrar's status %q: %w", out, err)
	}
	return status, nil
}

// StatusText is what `registrar status` prints for people.
func (n *Node) StatusText(ctx context.Context) (string, error) {
	return n.status(ctx)
}

// WaitHealthy waits until exactly pods of the service (namespace/name) are
// healthy on this port.
func (n *Node) WaitHealthy(ctx context.Context, service string, port uint16, pods int) error {
	return wait(ctx, fmt.Sprintf("%d healthy pods of %s on port %d", pods, service, port), func(ctx context.Context) error {
		status, err := n.RegistrarStatus(ctx)
		if err != nil {
			return err
		}
		if got := status.Healthy(service, port); got != pods {
			return fmt.Errorf("%d are healthy", got)
		}
		return nil
	}, n.Registrar)
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
