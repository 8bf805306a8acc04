package installer

import (
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
)

// PluginType is the CNI type of the plugin and the name of its binary (contract 7).
const PluginType = "portolan"

// annotationsCapability makes the runtime pass the pod's annotations (C24).
const annotationsCapability = "io.kubernetes.cri.pod-annotations"

// Entry is our entry of a network configuration list. A field that is empty is
// left out, and the plugin then uses its default (contract 7).
type Entry struct {
	// Socket is where the plugin calls the registrar.
	Socket string
	// SpoolDir and NetnsDir hold the plugin's notes and pins.
	SpoolDir, NetnsDir string
	// BypassNamespaces are never in the mesh and never wait for the registrar. The
	// registrar's own namespace must be among them (CNI-4, CNI-D11).
	BypassNamespaces []string
}

// JSON is the entry as it is written.
func (e Entry) JSON() ([]byte, error) {
	text, err := json.Marshal(struct {
		Type             string          `json:"type"`
		Capabilities     map[string]bool `json:"capabilities"`
		Socket           string          `json:"socket,omitempty"`
		SpoolDir         string          `json:"spoolDir,omitempty"`
		NetnsDir         string          `json:"netnsDir,omitempty"`
		BypassNamespaces []string        `json:"bypassNamespaces,omitempty"`
	}{PluginType, map[string]bool{annotationsCapability: true}, e.Socket, e.SpoolDir, e.NetnsDir, e.BypassNamespaces})
	if err != nil {
		return nil, fmt.Errorf("entry of the network configuration: %w", err)
	}
	return text, nil
}

// isOurs reports whether a runtime would call our plugin for this entry of a list.
// It decodes as libcni does: through a map first, then by the field's name.
func isOurs(entry []byte) bool {
	var fields map[string]any
	if json.Unmarshal(entry, &fields) != nil {
		return false
	}
	again, err := json.Marshal(fields)
	if err != nil {
		return false
	}
	var conf types.PluginConf
	return json.Unmarshal(again, &conf) == nil && conf.Type == PluginType
}
