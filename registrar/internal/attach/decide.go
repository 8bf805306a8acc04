package attach

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/api/authority"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The keys of CNI_ARGS that name a pod (C25).
const (
	argNamespace = "K8S_POD_NAMESPACE"
	argName      = "K8S_POD_NAME"
	argUID       = "K8S_POD_UID"
)

// DefaultNamespace is the namespace of a pod whose runtime names none (contract 3).
const DefaultNamespace = "default"

// Decision is what becomes of a pod.
type Decision struct {
	// Meshed says whether the pod joins.
	Meshed bool
	// Reason says in one sentence why.
	Reason string
	// Pod is what was decided, when Meshed.
	Pod model.Pod
	// Unknown are annotation keys under the mesh's prefixes that nothing reads.
	Unknown []string
}

// Decide turns a request into a decision; it is pure. trustDomain is the mesh's.
// A bad annotation or an unusable name is an error of kind BadInput whose text
// names key, value and remedy: a pod whose ports are unknown must not run
// half-meshed (contract 1).
func Decide(req *cniv1.AddRequest, trustDomain string, now time.Time) (Decision, error) {
	if !req.GetAnnotationsKnown() {
		return Decision{Reason: "the runtime passed no annotations: declare the capability io.kubernetes.cri.pod-annotations in the conflist"}, nil
	}
	cfg, err := annotation.Parse(req.GetAnnotations())
	// A mistake matters only to a pod that is to join.
	if err != nil && cfg.Meshed {
		return Decision{}, &Error{Kind: BadInput, Err: err}
	}
	if !cfg.Meshed {
		reason := "no port annotation and no " + annotation.KeyManaged
		if cfg.Managed == annotation.Out {
			reason = annotation.KeyManaged + " is \"false\""
		}
		return Decision{Reason: reason, Unknown: cfg.Unknown}, nil
	}
	pod, err := podOf(req, cfg, now)
	if err != nil {
		return Decision{}, &Error{Kind: BadInput, Err: err}
	}
	pod.Identity.TrustDomain = trustDomain
	return Decision{Meshed: true, Reason: "joined by annotation", Pod: pod, Unknown: cfg.Unknown}, nil
}

func podOf(req *cniv1.AddRequest, cfg annotation.Config, now time.Time) (model.Pod, error) {
	args := req.GetCniArgs()
	namespace := args[argNamespace]
	if namespace == "" {
		namespace = DefaultNamespace
	}
	if !authority.ValidLabel(namespace) {
		return model.Pod{}, fmt.Errorf("%s %q is not a DNS label: use lower-case letters, digits and hyphens, at most 63", argNamespace, namespace)
	}
	service := cfg.Service
	if service == "" {
		service = args[argName]
	}
	if !authority.ValidLabel(service) {
		return model.Pod{}, fmt.Errorf("no service name for the pod: set %s to a DNS label (%s is %q)", annotation.KeyService, argName, args[argName])
	}
	addrs, err := parseAddrs("address", req.GetAddresses())
	if err != nil {
		return model.Pod{}, err
	}
	if len(addrs) == 0 {
		return model.Pod{}, fmt.Errorf("the chain's result has no address: the plugin before portolan must give the pod an IP")
	}
	// A chain may name resolvers that are no addresses we can use (IPv6 with a
	// zone, say); the node's own resolvers serve then.
	servers, err := parseAddrs("DNS server", req.GetDnsServers())
	if err != nil {
		servers = nil
	}
	return model.Pod{
		Key:          KeyOf(req.GetAttachment()),
		Network:      req.GetNetwork(),
		Netns:        req.GetNetns(),
		RuntimeNetns: req.GetRuntimeNetns(),
		Addresses:    addrs,
		Namespace:    namespace,
		Name:         args[argName],
		UID:          args[argUID],
		Service:      model.ServiceKey{Namespace: namespace, Name: service},
		// Standalone, the account is the service (contract 3).
		Identity:      model.Identity{Namespace: namespace, Account: service},
		Default:       cfg.Default,
		Ports:         slices.Clone(cfg.Ports),
		Weight:        cfg.Weight,
		Metadata:      cfg.Metadata,
		Upstreams:     cfg.Upstreams,
		ExcludePorts:  cfg.ExcludePorts,
		ExcludeRanges: cfg.ExcludeRanges,
		DNSServers:    servers,
		Since:         now,
	}, nil
}

func parseAddrs(what string, texts []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, 0, len(texts))
	for _, t := range texts {
		// prevResult carries interface prefixes in old spec versions.
		if host, _, ok := strings.Cut(t, "/"); ok {
			t = host
		}
		a, err := netip.ParseAddr(t)
		if err != nil {
			return nil, fmt.Errorf("%s %q is no IP address", what, t)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

// KeyOf reads the key of a validated message.
func KeyOf(a *cniv1.Attachment) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: a.GetContainerId(), IfName: a.GetIfname()}
}
