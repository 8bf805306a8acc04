package kubetest

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestInvalidAnnotation: a pod that asks for the mesh in a way that cannot be
// understood does not start, and its owner reads why. Nobody else is touched.
func TestInvalidAnnotation(t *testing.T) {
	const namespace, bypassed = "invalid", "kube-system"
	c := scenario(t, namespace)
	invalid := map[string]string{"endpoint.aether.io/ports": "8080=pigeon"}
	t.Cleanup(func() {
		if _, err := c.kubectlInput(context.WithoutCancel(t.Context()), "", "-n", bypassed, "delete", "pod", "kubetest-invalid"); err != nil {
			t.Error(err)
		}
	})
	c.apply(t, namespace, barePod("invalid", invalid))
	c.apply(t, bypassed, barePod("kubetest-invalid", invalid))
	c.apply(t, namespace, clients)
	c.apply(t, namespace, serverPod("valid", "8080"))
	event := c.awaitEvent(t, namespace, "invalid", "FailedCreatePodSandBox", "pigeon")
	checked(t, "the event of the pod: %s", event)
	c.awaitPods(t, namespace, "app=valid", 1)
	c.awaitServing(t, namespace, "valid", 1)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	for i := range callers {
		c.mustAnswer(t, &callers[i], "valid", namespace)
	}
	c.awaitPods(t, bypassed, "app=kubetest-invalid", 1)
	if pods, err := c.pods(t.Context(), namespace, "app=invalid"); err != nil || len(pods) != 1 || atRest(&pods[0]) {
		t.Errorf("the invalid pod runs: %s, %v", phases(pods), err)
	}
	checked(t, "meanwhile a valid pod serves both nodes and one of %s with the same annotation runs", bypassed)
}

// listOptions selects by fields.
func listOptions(fields string) metav1.ListOptions { return metav1.ListOptions{FieldSelector: fields} }
