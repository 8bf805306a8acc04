package kubernetes

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// policyName is the admission policy's of registrar/deploy.
const policyName = "portolan-serviceendpoints"

// explain adds the remedy to what people can set right, and leaves out the long
// address of the request. Who else forbids a request, such as another policy or a
// webhook, says so itself.
func explain(err error) error {
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err
	}
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w: install the CustomResourceDefinition of %s.%s", err, v1alpha1.Resource, v1alpha1.Group)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: the token is not taken: is the registrar's ServiceAccount still there, and its pod?", err)
	case forbiddenBy(err, "User "):
		return fmt.Errorf("%w: bind the registrar's ServiceAccount to its ClusterRole", err)
	case forbiddenBy(err, "ValidatingAdmissionPolicy '"+policyName+"' "):
		return fmt.Errorf("%w: run the registrar as a pod of the node that --node-name names, and install it and the policy from one version", err)
	}
	return err
}

// forbiddenBy reports whether a request was forbidden by whom the text begins with: only
// that tells the authorizer, who names the user, from admission.
func forbiddenBy(err error, who string) bool {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	if !ok || !apierrors.IsForbidden(err) {
		return false
	}
	_, cause, ok := strings.Cut(status.ErrStatus.Message, "forbidden: ")
	return ok && strings.HasPrefix(cause, who)
}
