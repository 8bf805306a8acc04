package node

import (
	"context"
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
	out, err := output(ctx, nil, n.registrar(), "status", "-o", "json")
	return []byte(out), err
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
