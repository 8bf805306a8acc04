// Package daemonset answers, from the Kubernetes API, the one question that an
// installer asks at its end: is the registrar's DaemonSet gone for good?
package daemonset

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	appsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"

	"github.com/portolan-mesh/portolan/registrar/internal/installer"
)

// Removal implements installer.Removal for one DaemonSet.
type Removal struct {
	// Client may get the DaemonSet: "get" on that name is all it needs.
	Client appsv1.DaemonSetsGetter
	// Namespace and Name are the DaemonSet's.
	Namespace, Name string
}

var _ installer.Removal = Removal{}

// Removed reports whether the DaemonSet is being deleted or does not exist. Only the
// API's own words count: a node that shuts down, an expired token, a proxy that knows
// no such path and a time-out are errors (CNI-3).
func (r Removal) Removed(ctx context.Context) (bool, error) {
	ds, err := r.Client.DaemonSets(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	switch {
	case err == nil:
		return ds.DeletionTimestamp != nil, nil
	case apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		return true, nil
	}
	return false, fmt.Errorf("get DaemonSet %s/%s: %w", r.Namespace, r.Name, err)
}
