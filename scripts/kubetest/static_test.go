package kubetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// staticPod is a pod that a kubelet has from a file.
const staticPod = `
apiVersion: v1
kind: Pod
metadata:
  name: fixed
  namespace: static
  annotations: {endpoint.aether.io/ports: "8080,9090=h2", endpoint.aether.io/service: fixed}
spec:
  terminationGracePeriodSeconds: 2
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=fixed, "http:8080", "h2:9090"]}
`

// TestStaticPod: who deletes the mirror of a static pod ends nothing. No request fails,
// also in the minute or more until the kubelet has made another. With the file goes the
// endpoint.
func TestStaticPod(t *testing.T) {
	const namespace, name = "static", "fixed-node1"
	c := scenario(t, namespace)
	remove := c.staticPod(t, "node1", "fixed", staticPod)
	c.apply(t, namespace, clients)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	c.awaitServing(t, namespace, "fixed", 1)
	var loads []*load
	for i := range callers {
		loads = append(loads, c.startLoad(t, &callers[i], 50, "http://fixed.static.aether.internal/", "http://fixed.static.aether.internal:9090/"))
	}
	mirror := c.mirror(t, namespace, name, "")
	c.kubectl(t, "-n", namespace, "delete", "pod", name, "--grace-period=0", "--force")
	c.mirror(t, namespace, name, mirror)
	stopLoads(t, callers, loads)
	if endpoints, err := c.endpoints(t.Context(), namespace); err != nil || len(endpoints) != 1 || endpoints[0].OwnerReferences[0].Kind != "Node" {
		t.Errorf("endpoints %v, %v", endpoints, err)
	}
	checked(t, "a static pod is served on while its mirror is away")
	remove()
	eventually(t, patience, func() string {
		_, err := c.client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		endpoints, err2 := c.endpoints(t.Context(), namespace)
		if !apierrors.IsNotFound(err) || err2 != nil || len(endpoints) != 0 {
			return fmt.Sprintf("without its file: mirror %v, endpoints %v, %v", err, endpoints, err2)
		}
		return ""
	})
}

// staticPod gives a node's kubelet a pod by file, until remove or the end of the test.
func (c *cluster) staticPod(t *testing.T, node, name, manifest string) (remove func()) {
	t.Helper()
	path := filepath.Join(c.lab.Dir, node, "manifests", name+".yaml")
	draft := filepath.Join(c.lab.Dir, node, name+".yaml") // the kubelet reads a file while it is written
	if err := errors.Join(os.WriteFile(draft, []byte(manifest), 0o600), os.Rename(draft, path)); err != nil {
		t.Fatal(err)
	}
	remove = func() {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
	t.Cleanup(remove)
	return remove
}

// mirror waits until a mirror that is not the former one is Ready, and returns its UID.
func (c *cluster) mirror(t *testing.T, namespace, name string, former types.UID) (uid types.UID) {
	t.Helper()
	eventually(t, patience, func() string {
		pod, err := c.client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		uid = pod.UID
		if uid == former || !atRest(pod) {
			return fmt.Sprintf("no mirror of %s after %q is Ready: %s", name, former, pod.UID)
		}
		return ""
	})
	return uid
}
