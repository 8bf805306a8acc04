package kubetest

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	endpointv1alpha1 "github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/scripts/lab"
)

const (
	// meshNamespace is where the manifests install the mesh.
	meshNamespace = lab.MeshNamespace
	// patience bounds every wait; it matters only when something is broken.
	patience = 90 * time.Second
	// poll is the pause between two looks at what has no event.
	poll = 50 * time.Millisecond
)

// cluster is the lab's Kubernetes with the mesh, as its administrator sees it.
type cluster struct {
	lab    lab.Lab
	config *rest.Config
	client kubernetes.Interface
	// objects are of any type, by resource.
	objects dynamic.Interface
}

// newCluster is the cluster for one test.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	l, err := openLab()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{lab: l}
	if c.config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(l.Dir, "kubeconfig")); err != nil {
		t.Fatal(err)
	}
	c.config.QPS = -1
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		t.Fatal(err)
	}
	if c.objects, err = dynamic.NewForConfig(c.config); err != nil {
		t.Fatal(err)
	}
	return c
}

// scenario is a cluster with a namespace for one test, which is emptied when the
// test ends; one that fails leaves a dump before.
func scenario(t *testing.T, namespaces ...string) *cluster {
	t.Helper()
	c := newCluster(t)
	for _, namespace := range namespaces {
		c.makeNamespace(t, namespace)
	}
	c.dumpOnFailure(t)
	return c
}

// dumpOnFailure leaves a dump when the test has failed. It is called after the
// clean-ups were named which take away what the dump is to show.
func (c *cluster) dumpOnFailure(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			dump(t.Context(), c.lab, strings.ReplaceAll(t.Name(), "/", "-"))
		}
	})
}

// makeNamespace makes a namespace that is deleted with the test. The end of the
// test waits until it is gone: its pods could be deleted.
func (c *cluster) makeNamespace(t *testing.T, name string) {
	t.Helper()
	_, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.deleteNamespace(context.WithoutCancel(t.Context()), t, name) })
}

// deleteNamespace deletes a namespace and waits until it is gone.
func (c *cluster) deleteNamespace(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	err := c.client.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("delete namespace %s: %v", name, err)
		return
	}
	eventually(t, patience, func() string {
		_, err := c.client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return ""
		}
		return fmt.Sprintf("namespace %s is not gone: %v", name, err)
	})
}

// kubectl runs kubectl as administrator and returns its output.
func (c *cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.kubectlInput(t.Context(), "", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// kubectlInput is kubectl with a standard input. An error has the standard error.
func (c *cluster) kubectlInput(ctx context.Context, input string, args ...string) (string, error) {
	cmd := c.kubectlCommand(ctx, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s%s", strings.Join(args, " "), err, stdout.String(), stderr.String())
	}
	return stdout.String(), nil
}

// apply applies manifests to a namespace.
func (c *cluster) apply(t *testing.T, namespace, manifests string) {
	t.Helper()
	if _, err := c.kubectlInput(t.Context(), manifests, "-n", namespace, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

// pods lists the pods of a label selector, by name.
func (c *cluster) pods(ctx context.Context, namespace, selector string) ([]corev1.Pod, error) {
	list, err := c.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// awaitPods waits until there are exactly so many pods of the selector, all of them
// Ready and none terminating, and returns them.
func (c *cluster) awaitPods(t *testing.T, namespace, selector string, want int) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	eventually(t, patience, func() string {
		var err error
		if pods, err = c.pods(t.Context(), namespace, selector); err != nil {
			return err.Error()
		}
		ready := 0
		for i := range pods {
			if atRest(&pods[i]) {
				ready++
			}
		}
		if ready == want && len(pods) == want {
			return ""
		}
		return fmt.Sprintf("%d of %d pods of %s in %s are Ready, want %d: %s", ready, len(pods), selector, namespace, want, phases(pods))
	})
	return pods
}

// atRest reports that a pod is Ready and stays.
func atRest(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil || pod.Status.PodIP == "" {
		return false
	}
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// phases describes pods that are not what they should be.
func phases(pods []corev1.Pod) string {
	var all []string
	for i := range pods {
		pod := &pods[i]
		if atRest(pod) {
			continue
		}
		state := string(pod.Status.Phase)
		if pod.DeletionTimestamp != nil {
			state = "terminating"
		}
		for _, status := range pod.Status.ContainerStatuses {
			if status.State.Waiting != nil {
				state += " " + status.State.Waiting.Reason
			}
		}
		all = append(all, pod.Name+" "+state)
	}
	return strings.Join(all, ", ")
}

// on is the one pod of pods on a node.
func on(t *testing.T, pods []corev1.Pod, node string) *corev1.Pod {
	t.Helper()
	for i := range pods {
		if pods[i].Spec.NodeName == node {
			return &pods[i]
		}
	}
	t.Fatalf("no pod on %s", node)
	return nil
}

// endpointResource is where the API server has ServiceEndpoints.
func endpointResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{
		Group: endpointv1alpha1.Group, Version: endpointv1alpha1.Version, Resource: endpointv1alpha1.Resource,
	}
}

// endpoints lists the ServiceEndpoints of a namespace ("" is all).
func (c *cluster) endpoints(ctx context.Context, namespace string) ([]endpointv1alpha1.ServiceEndpoint, error) {
	list, err := c.objects.Resource(endpointResource()).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	all := make([]endpointv1alpha1.ServiceEndpoint, len(list.Items))
	for i := range list.Items {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(list.Items[i].Object, &all[i]); err != nil {
			return nil, fmt.Errorf("read ServiceEndpoint %s: %w", list.Items[i].GetName(), err)
		}
	}
	return all, nil
}

// eventually polls check until it returns "", and fails with what it returned last
// when limit is over.
func eventually(t *testing.T, limit time.Duration, check func() string) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		last := check()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %s", limit, last)
		}
		time.Sleep(poll)
	}
}

// checked prints what a scenario has proven; nothing when it has failed.
func checked(t *testing.T, format string, args ...any) {
	t.Helper()
	if t.Failed() {
		return
	}
	t.Logf("checked: "+format, args...)
}
