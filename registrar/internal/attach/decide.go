package attach

import (
	"cmp"
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
	// Workload is the pod as the orchestrator knows it; nil standalone.
	Workload *model.Workload
}

// Facts are what a decision rests on besides the request.
type Facts struct {
	// TrustDomain is the mesh's.
	TrustDomain string
	// Now is when the attachment is made.
	Now time.Time
	// Workload is the pod as the orchestrator knows it; nil standalone. It has the
	// word on identity and, being newer than the runtime's copy, on annotations.
	Workload *model.Workload
	// ServiceRanges are those of the mesh's service addresses.
	ServiceRanges model.Ranges
}

// Decide turns a request into a decision; it is pure. A bad annotation or an
// unusable name is an error of kind BadInput whose text names key, value and
// remedy: a pod whose ports are unknown must not run half-meshed (contract 1).
func Decide(req *cniv1.AddRequest, facts Facts) (Decision, error) {
	annotations := req.GetAnnotations()
	w := facts.Workload
	switch {
	case w != nil:
		annotations = w.Annotations
	case !req.GetAnnotationsKnown():
		return Decision{Reason: "the runtime passed no annotations: declare the capability io.kubernetes.cri.pod-annotations in the conflist"}, nil
	}
	cfg, err := annotation.Parse(annotations)
	meshed, reason := joins(cfg, w)
	// A mistake matters only to a pod that is to join.
	if err != nil && meshed {
		return Decision{Workload: w}, &Error{Kind: BadInput, Err: err}
	}
	if !meshed {
		return Decision{Reason: reason, Unknown: cfg.Unknown, Workload: w}, nil
	}
	pod, err := podOf(req, cfg, facts)
	if err != nil {
		return Decision{Workload: w}, &Error{Kind: BadInput, Err: err}
	}
	return Decision{Meshed: true, Reason: reason, Pod: pod, Unknown: cfg.Unknown, Workload: w}, nil
}

// joins says whether a pod joins, and why: its own annotations win over its label,
// that over its namespace's (contract 1).
func joins(cfg annotation.Config, w *model.Workload) (meshed bool, reason string) {
	switch {
	case w != nil && w.HostNetwork:
		return false, "the pod uses the node's network and has no ports of its own to capture; take hostNetwork out of the pod, or the mesh's annotations"
	case w != nil && w.Ending == model.Finished:
		return false, "the pod has ended"
	case cfg.Meshed:
		return true, "joined by annotation"
	case cfg.Managed == annotation.Out:
		return false, annotation.KeyManaged + " is \"false\""
	case w != nil && w.Word == annotation.Joined:
		return true, "joined by the label " + annotation.KeyManaged
	case w != nil && w.Word == annotation.Out:
		return false, "the label " + annotation.KeyManaged + " is \"false\""
	case w != nil && w.WordProblem != "":
		return false, w.WordProblem
	}
	return false, "no port annotation and no " + annotation.KeyManaged
}

func podOf(req *cniv1.AddRequest, cfg annotation.Config, facts Facts) (model.Pod, error) {
	args := req.GetCniArgs()
	namespace := args[argNamespace]
	if namespace == "" {
		namespace = DefaultNamespace
	}
	if !authority.ValidLabel(namespace) {
		return model.Pod{}, fmt.Errorf("%s %q is not a DNS label: use lower-case letters, digits and hyphens, at most 63", argNamespace, namespace)
	}
	uid, account, fallback, what := args[argUID], "", args[argName], "name"
	runtimeUID := uid
	if w := facts.Workload; w != nil {
		uid, account, fallback, what = w.ObjectUID, w.Account, w.Account, "ServiceAccount"
		runtimeUID = w.UID
	}
	service := cmp.Or(cfg.Service, fallback)
	if !authority.ValidLabel(service) {
		return model.Pod{}, fmt.Errorf("the pod's %s %q cannot name its service, as it is not a DNS label: give the pod the annotation %s, with a-z, 0-9 and \"-\" inside, at most 63",
			what, fallback, annotation.KeyService)
	}
	addrs, err := parseAddrs("address", req.GetAddresses())
	if err != nil {
		return model.Pod{}, err
	}
	if len(addrs) == 0 {
		return model.Pod{}, fmt.Errorf("the chain's result has no address: the plugin before portolan must give the pod an IP")
	}
	if addr, in, hit := facts.ServiceRanges.Hit(addrs); hit {
		return model.Pod{}, fmt.Errorf("the pod's address %s is in %s, whose addresses are the mesh's services: give pods addresses of another range, or the mesh (settings vipRange and vipRange6, flags --vip-range and --vip-range6)", addr, in)
	}
	// A chain may name resolvers that are no addresses we can use (IPv6 with a
	// zone, say); the node's own resolvers serve then.
	servers, err := parseAddrs("DNS server", req.GetDnsServers())
	if err != nil {
		servers = nil
	}
	return model.Pod{
		Key:          model.KeyOf(req.GetAttachment()),
		Network:      req.GetNetwork(),
		Netns:        req.GetNetns(),
		RuntimeNetns: req.GetRuntimeNetns(),
		Addresses:    addrs,
		Namespace:    namespace,
		Name:         args[argName],
		UID:          uid,
		RuntimeUID:   runtimeUID,
		Service:      model.ServiceKey{Namespace: namespace, Name: service},
		// Standalone, the account is the service (contract 3).
		Identity:      model.Identity{TrustDomain: facts.TrustDomain, Namespace: namespace, Account: cmp.Or(account, service)},
		Default:       cfg.Default,
		Ports:         slices.Clone(cfg.Ports),
		Weight:        cfg.Weight,
		Metadata:      cfg.Metadata,
		Upstreams:     cfg.Upstreams,
		ExcludePorts:  cfg.ExcludePorts,
		ExcludeRanges: cfg.ExcludeRanges,
		DNSServers:    servers,
		Since:         facts.Now,
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
