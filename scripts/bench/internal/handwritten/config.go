// Package handwritten is the Envoy that the mesh is compared with: a configuration that a
// person would write for one client pod and one server pod.
package handwritten

import (
	_ "embed" // for the configuration
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"text/template"
)

// The ports in the client pod at which the Envoy takes requests, by the protocol that it
// speaks to the server pod.
const (
	HTTP1Port = 16001
	HTTP2Port = 16002
)

//go:embed handwritten.yaml
var configuration string

// Config says where the two pods are. An Envoy that has only one of them on its node
// leaves the other's network namespace out.
type Config struct {
	// Dir has what WriteCertificates wrote.
	Dir string
	// ClientNetns and ServerNetns are paths.
	ClientNetns, ServerNetns string
	// ServerIP is the server pod's address.
	ServerIP netip.Addr
}

// Arguments are Envoy's: those of a node's Envoy with so many workers, with the
// configuration at a path.
func Arguments(path string, workers int) []string {
	return []string{"-c", path, "--concurrency", strconv.Itoa(workers), "--disable-hot-restart"}
}

// Write writes Envoy's configuration.
func (c Config) Write(path string) error {
	tmpl, err := template.New("").Parse(configuration)
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	var text strings.Builder
	if err := tmpl.Execute(&text, struct {
		Config
		Ports map[string]int
	}{c, map[string]int{"http_protocol_options": HTTP1Port, "http2_protocol_options": HTTP2Port}}); err != nil {
		return fmt.Errorf("write the configuration: %w", err)
	}
	if err := os.WriteFile(path, []byte(text.String()), 0o600); err != nil {
		return fmt.Errorf("write the configuration: %w", err)
	}
	return nil
}
