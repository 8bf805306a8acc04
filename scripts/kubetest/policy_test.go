package kubetest

import (
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// TestPolicy: a pod's own account writes no ServiceEndpoint, and the registrar of node1
// none of node2; the same requests for a pod of node1 are allowed to it.
func TestPolicy(t *testing.T) {
	const namespace = "policy"
	c := scenario(t, namespace)
	c.apply(t, namespace, paymentsApp)
	pods := c.awaitPods(t, namespace, "app=payments", nodes)
	c.awaitServing(t, namespace, "payments", nodes)
	registrars, err := c.pods(t.Context(), meshNamespace, "app.kubernetes.io/name=portolan-registrar")
	if err != nil {
		t.Fatal(err)
	}
	registrar := c.as(t, on(t, registrars, "node1")).Resource(endpointResource()).Namespace(namespace)
	workload := c.as(t, on(t, pods, "node1")).Resource(endpointResource()).Namespace(namespace)
	near, far := c.endpointOf(t, on(t, pods, "node1")), c.endpointOf(t, on(t, pods, "node2"))

	for _, writer := range []struct {
		name string
		by   dynamic.ResourceInterface
		of   *unstructured.Unstructured
		// refusal is a part of the API server's reason; empty: it is allowed.
		refusal string
	}{
		{"a pod's own account, for itself", workload, near, "cannot"},
		{"a pod's own account, for another", workload, far, "cannot"},
		{"node1's registrar, for a pod of node2", registrar, far, "only the registrar of that node may write it"},
		{"node1's registrar, for a pod of node1", registrar, near, ""},
	} {
		var last error
		for verb, err := range writes(t, writer.by, writer.of) {
			switch {
			case writer.refusal == "" && err != nil:
				t.Errorf("%s: %s: %v, want it allowed", writer.name, verb, err)
			case writer.refusal != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), writer.refusal)):
				t.Errorf("%s: %s: %v, want it forbidden with %q", writer.name, verb, err, writer.refusal)
			}
			last = err
		}
		if last == nil {
			checked(t, "%s: create, apply, patch and delete are allowed", writer.name)
		} else {
			checked(t, "%s: create, apply, patch and delete are refused, such as: %v", writer.name, last)
		}
	}

	moved := near.DeepCopy()
	if err := unstructured.SetNestedField(moved.Object, "node2", "spec", "nodeName"); err != nil {
		t.Fatal(err)
	}
	moved.SetName("moved")
	if _, err := registrar.Apply(t.Context(), "moved", moved, applyOptions()); !apierrors.IsForbidden(err) {
		t.Errorf("node1's registrar makes an endpoint of node2: %v, want it forbidden", err)
	}
	_, err = c.as(t, on(t, registrars, "node1")).Resource(corev1.SchemeGroupVersion.WithResource("secrets")).
		Namespace(meshNamespace).List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("node1's registrar lists Secrets: %v, want it forbidden", err)
	}
	checked(t, "node1's registrar cannot make an endpoint of node2 and reads no Secret")
}

// applyOptions try an apply without its effect.
func applyOptions() metav1.ApplyOptions {
	return metav1.ApplyOptions{FieldManager: "kubetest", Force: true, DryRun: []string{metav1.DryRunAll}}
}

// writes tries each way to write an object, without effect, and returns the errors.
func writes(t *testing.T, by dynamic.ResourceInterface, object *unstructured.Unstructured) map[string]error {
	t.Helper()
	all, dry := make(map[string]error), []string{metav1.DryRunAll}
	created := object.DeepCopy()
	created.SetName(object.GetName() + "-x")
	_, all["create"] = by.Create(t.Context(), created, metav1.CreateOptions{DryRun: dry})
	applied := object.DeepCopy()
	_, all["apply"] = by.Apply(t.Context(), applied.GetName(), applied, applyOptions())
	_, all["patch"] = by.Patch(t.Context(), object.GetName(), types.MergePatchType, []byte(`{"spec":{"weight":7}}`), metav1.PatchOptions{DryRun: dry})
	all["delete"] = by.Delete(t.Context(), object.GetName(), metav1.DeleteOptions{DryRun: dry})
	return all
}

// as is a client with a token as the kubelet gives it to a pod.
func (c *cluster) as(t *testing.T, pod *corev1.Pod) dynamic.Interface {
	t.Helper()
	token, err := c.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(t.Context(), pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token.Status.Token
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// endpointOf is the ServiceEndpoint of a pod, as it would be written.
func (c *cluster) endpointOf(t *testing.T, pod *corev1.Pod) *unstructured.Unstructured {
	t.Helper()
	list, err := c.objects.Resource(endpointResource()).Namespace(pod.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		object := &list.Items[i]
		if name, _, _ := unstructured.NestedString(object.Object, "spec", "podName"); name == pod.Name {
			object.SetManagedFields(nil)
			object.SetResourceVersion("")
			object.SetUID("")
			return object
		}
	}
	t.Fatalf("pod %s has no ServiceEndpoint", pod.Name)
	return nil
}
