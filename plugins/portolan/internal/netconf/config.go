package netconf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// The defaults of contract 7.
const (
	DefaultSocket   = "/run/portolan/cni/cni.sock"
	DefaultTimeout  = 5 * time.Second
	DefaultSpoolDir = "/run/portolan/spool"
	DefaultNetnsDir = "/run/portolan/netns"
)

const (
	// maxTimeout is the most that timeoutSeconds may ask for: runtimes give up
	// on a sandbox after two minutes.
	maxTimeout = time.Minute
	// maxSocketPath is what a unix socket address holds.
	maxSocketPath = 107
	// maxPath leaves room for the names of pins and notes.
	maxPath = 3800
	// capability is the key of runtimeConfig that holds the pod's annotations (C24).
	capability = "io.kubernetes.cri.pod-annotations"
)

// attachmentKeys are the spellings of the list of live attachments in GC: the
// specification and the library disagreed, and libraries now write both (CNI-30).
func attachmentKeys() []string {
	return []string{"cni.dev/valid-attachments", "cni.dev/attachments"}
}

// Config is the network configuration as the plugin uses it.
type Config struct {
	// CNIVersion of the configuration, and so of the result (C9).
	CNIVersion string
	// Name of the network.
	Name string
	// Socket is the registrar's unix socket.
	Socket string
	// Timeout bounds one command as a whole.
	Timeout time.Duration
	// BypassNamespaces are the namespaces whose pods are passed through without
	// asking anybody (CNI-D11).
	BypassNamespaces []string
	// ReportStatus lets STATUS say that the registrar is away or not ready (CNI-D12).
	ReportStatus bool
	// SpoolDir holds notes for the registrar, NetnsDir the pins.
	SpoolDir, NetnsDir string
	// Annotations of the pod; AnnotationsKnown is false when the runtime passed
	// none at all, which is not the same as a pod without annotations (CNI-45).
	Annotations      map[string]string
	AnnotationsKnown bool
	// Live are the attachments that GC must keep; LiveKnown is false when the
	// list is absent or null, and then GC does nothing (CNI-30).
	Live      []types.GCAttachment
	LiveKnown bool

	prevResult json.RawMessage // nil when absent or null
}

// parser reads the fields of one configuration and keeps the first error.
type parser struct {
	fields map[string]json.RawMessage
	err    error
}

// Parse reads a network configuration. Fields that it does not know are ignored
// (C5, C23). With an error the Config is usable all the same: fields that could
// not be read have their defaults, so that DEL never depends on them (C16).
func Parse(stdin []byte) (Config, error) {
	cfg := Config{
		Socket: DefaultSocket, Timeout: DefaultTimeout, SpoolDir: DefaultSpoolDir, NetnsDir: DefaultNetnsDir,
		BypassNamespaces: []string{"kube-system", "portolan-system"},
	}
	p := parser{}
	if err := json.Unmarshal(stdin, &p.fields); err != nil {
		return cfg, types.NewError(types.ErrDecodingFailure, "network configuration is not a JSON object: fix the conflist", err.Error())
	}
	decode(&p, "cniVersion", "a version such as \"1.1.0\"", &cfg.CNIVersion, func(string) bool { return true })
	decode(&p, "name", "the network's name", &cfg.Name, func(s string) bool { return s != "" })
	decode(&p, "socket", fmt.Sprintf("an absolute path of at most %d bytes, default %s", maxSocketPath, DefaultSocket),
		&cfg.Socket, func(s string) bool { return strings.HasPrefix(s, "/") && len(s) <= maxSocketPath })
	isDir := func(s string) bool { return strings.HasPrefix(s, "/") && len(s) <= maxPath }
	decode(&p, "spoolDir", "an absolute path, default "+DefaultSpoolDir, &cfg.SpoolDir, isDir)
	decode(&p, "netnsDir", "an absolute path, default "+DefaultNetnsDir, &cfg.NetnsDir, isDir)
	seconds := int64(DefaultTimeout / time.Second)
	decode(&p, "timeoutSeconds", "a whole number of seconds, 1-60, default 5",
		&seconds, func(n int64) bool { return n >= 1 && n <= int64(maxTimeout/time.Second) })
	cfg.Timeout = time.Duration(seconds) * time.Second
	decode(&p, "bypassNamespaces", `a list of namespaces, default ["kube-system","portolan-system"]`,
		&cfg.BypassNamespaces, func([]string) bool { return true })
	decode(&p, "reportStatus", "true or false, default false", &cfg.ReportStatus, func(bool) bool { return true })
	p.annotations(&cfg)
	p.attachments(&cfg)
	if raw := p.fields["prevResult"]; !isNull(raw) {
		cfg.prevResult = raw
	}
	return cfg, p.err
}

// decode reads one field into *to if it is there and valid says so; else it
// keeps what *to has and says what the field should be.
func decode[T any](p *parser, key, want string, to *T, valid func(T) bool) {
	raw := p.fields[key]
	if isNull(raw) {
		return
	}
	var value T
	if err := json.Unmarshal(raw, &value); err != nil || !valid(value) {
		p.refuse(key, raw, want)
		return
	}
	*to = value
}

// refuse keeps the first bad field as a CNI error 7.
func (p *parser) refuse(key string, raw json.RawMessage, want string) {
	if p.err != nil {
		return
	}
	text := string(raw)
	if compact := new(bytes.Buffer); json.Compact(compact, raw) == nil {
		text = compact.String()
	}
	if len(text) > 40 {
		text = text[:40] + "..."
	}
	p.err = types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("conflist key %s=%s is not valid: write %s", key, text, want), "")
}

// annotations reads the capability; anything but an object of texts is refused.
func (p *parser) annotations(cfg *Config) {
	var runtime map[string]json.RawMessage
	decode(p, "runtimeConfig", "an object", &runtime, func(map[string]json.RawMessage) bool { return true })
	raw := runtime[capability]
	if isNull(raw) {
		return
	}
	if err := json.Unmarshal(raw, &cfg.Annotations); err != nil {
		cfg.Annotations = nil
		p.refuse("runtimeConfig/"+capability, raw, "an object of texts (the runtime does)")
		return
	}
	cfg.AnnotationsKnown = true
}

// attachments reads the list of GC under either key. When both are there, what
// either one lists is live: nothing that a list names may be removed.
func (p *parser) attachments(cfg *Config) {
	for _, key := range attachmentKeys() {
		raw := p.fields[key]
		if isNull(raw) {
			continue
		}
		var list []types.GCAttachment
		if err := json.Unmarshal(raw, &list); err != nil {
			p.refuse(key, raw, `a list of {"containerID", "ifname"} (the runtime does)`)
			cfg.Live, cfg.LiveKnown = nil, false
			return
		}
		cfg.Live = append(cfg.Live, list...)
		cfg.LiveKnown = true
	}
}

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || string(bytes.TrimSpace(raw)) == "null"
}
