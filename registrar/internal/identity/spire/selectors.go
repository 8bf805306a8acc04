package spire

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spiffe/spire-api-sdk/proto/spire/api/types"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// DefaultSelectors are those of SPIRE's Kubernetes workload attestor for an account.
const DefaultSelectors = "k8s:ns:{namespace},k8s:sa:{account}"

// What a template stands for.
const (
	namespaceMark = "{namespace}"
	accountMark   = "{account}"
)

// Selectors make the selectors by which the agent finds an identity's entry. All of
// an entry's selectors must be among them.
type Selectors struct{ templates []string }

// ParseSelectors reads templates of the form TYPE:VALUE, separated by commas. Both
// {namespace} and {account} must occur in them: without one of them, accounts would
// share their certificates.
func ParseSelectors(s string) (Selectors, error) {
	templates := strings.Split(s, ",")
	for _, t := range templates {
		kind, value, ok := strings.Cut(t, ":")
		if !ok || kind == "" || value == "" || strings.ContainsAny(kind, "{}") {
			return Selectors{}, fmt.Errorf("selector %q: need TYPE:VALUE, such as %s", t, DefaultSelectors)
		}
	}
	if !strings.Contains(s, namespaceMark) || !strings.Contains(s, accountMark) {
		return Selectors{}, errors.New("selectors " + s + ": need both " + namespaceMark + " and " + accountMark)
	}
	return Selectors{templates: templates}, nil
}

// of returns the selectors of an identity in their order.
func (s Selectors) of(id model.Identity) []*types.Selector {
	fill := strings.NewReplacer(namespaceMark, id.Namespace, accountMark, id.Account)
	out := make([]*types.Selector, 0, len(s.templates))
	for _, t := range s.templates {
		kind, value, _ := strings.Cut(t, ":")
		out = append(out, &types.Selector{Type: kind, Value: fill.Replace(value)})
	}
	return out
}
