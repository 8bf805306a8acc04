package netconf

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/portolan-mesh/portolan/api/annotation"
)

// Args are the K8S_* pairs of CNI_ARGS (C25).
type Args map[string]string

// Namespace of the pod, "" when the runtime says none.
func (a Args) Namespace() string { return a["K8S_POD_NAMESPACE"] }

// Pod is namespace/name for messages, "" when the runtime says none.
func (a Args) Pod() string {
	if a["K8S_POD_NAME"] == "" {
		return ""
	}
	return a.Namespace() + "/" + a["K8S_POD_NAME"]
}

// ParseArgs reads CNI_ARGS: pairs separated by semicolons in any order, of which
// the K8S_* ones are ours. With an error (CNI code 4) the pairs that could be
// read are returned all the same.
func ParseArgs(text string) (Args, error) {
	args := Args{}
	var err error
	for pair := range strings.SplitSeq(text, ";") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			err = types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS: %.60q is no KEY=VALUE pair", pair), "")
			continue
		}
		if strings.HasPrefix(key, "K8S_") {
			args[key] = value
		}
	}
	return args, err
}

// Verdict is what the plugin decides by itself about a pod (contract 4.1).
type Verdict uint8

// The verdicts. The zero value asks.
const (
	// Ask leaves the decision to the registrar; a pod whose registrar is away
	// starts unmeshed (contract 5).
	Ask Verdict = iota
	// Join is a pod that asks for the mesh by its own annotations: it starts
	// meshed or not at all.
	Join
	// Pass is a pod that nobody is asked about.
	Pass
)

// Decide evaluates the bypass list and the pod's own word, and says why.
func (c Config) Decide(args Args) (Verdict, string) {
	if ns := args.Namespace(); ns != "" && slices.Contains(c.BypassNamespaces, ns) {
		return Pass, "namespace " + ns + " is in bypassNamespaces"
	}
	switch annotation.OptIn(c.Annotations) {
	case annotation.Out:
		return Pass, "annotation " + annotation.KeyManaged + " keeps it out"
	case annotation.Joined:
		return Join, "annotations ask for the mesh"
	case annotation.Unset:
	}
	return Ask, "annotations do not say"
}
