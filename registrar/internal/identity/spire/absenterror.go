package spire

import (
	"fmt"
	"strings"

	"github.com/spiffe/spire-api-sdk/proto/spire/api/types"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// absentError says which registration entry is missing.
type absentError struct {
	id        model.Identity
	selectors []*types.Selector
	// others are the SPIFFE IDs that the agent has for the selectors instead.
	others []string
}

// Error implements error.
func (e *absentError) Error() string {
	var args strings.Builder
	for _, s := range e.selectors {
		fmt.Fprintf(&args, " -selector %s:%s", s.GetType(), s.GetValue())
	}
	instead := "nothing"
	if len(e.others) > 0 {
		instead = strings.Join(e.others, ", ")
	}
	return fmt.Sprintf("SPIRE has no registration entry of %s (it has %s); register it: spire-server entry create -parentID <SPIFFE ID of this node's agent> -spiffeID %s%s",
		e.id.SPIFFE(), instead, e.id.SPIFFE(), args.String())
}
