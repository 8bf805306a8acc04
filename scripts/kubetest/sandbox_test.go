package kubetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// statefulApp is a StatefulSet of one pod on node1, which answers with its UID.
const statefulApp = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: db}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 1
  selector: {matchLabels: {app: db}}
  template:
    metadata:
      labels: {app: db}
      annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
    spec:
      serviceAccountName: db
      nodeSelector: {kubernetes.io/hostname: node1}
      terminationGracePeriodSeconds: 120
      containers:
      - name: app
        image: portolan/podserver:lab
        command: [/usr/local/bin/podserver, serve, --name=$(ID), "http:8080", "h2:9090"]
        env: [{name: ID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}]
---
` + clients

// TestRecreated: a pod of a StatefulSet is made again with its name while its old
// sandbox is still there; the old sandbox's DEL comes later and touches nothing.
func TestRecreated(t *testing.T) {
	const namespace = "recreated"
	c := scenario(t, namespace)
	c.apply(t, namespace, statefulApp)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	old := c.awaitPods(t, namespace, "app=db", 1)[0]
	c.awaitServing(t, namespace, "db", 1)
	urls := []string{"http://db.recreated.aether.internal/", "http://db.recreated.aether.internal:9090/"}
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], urls...)); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
	}
	before := c.attachments(t, 1, namespace, "db-0")

	// Without its shim the old container does not end: the kubelet tears its sandbox down
	// late.
	sandbox := strings.TrimSuffix(before[0], "-eth0")
	if err := c.signalShim(t.Context(), "node1", sandbox, "STOP"); err != nil {
		t.Fatal(err)
	}
	resume := func(ctx context.Context) error { return c.signalShim(ctx, "node1", sandbox, "CONT") }
	t.Cleanup(func() { _ = resume(context.WithoutCancel(t.Context())) })
	err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), old.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	if err != nil {
		t.Fatal(err)
	}
	renewed := c.awaitPods(t, namespace, "app=db", 1)
	if renewed[0].UID == old.UID || renewed[0].Name != old.Name {
		t.Fatalf("pod %s %s came after %s %s, want the same name and another UID", renewed[0].Name, renewed[0].UID, old.Name, old.UID)
	}
	eventually(t, patience, func() string { return c.unequal(t.Context(), namespace, "db", renewed) })
	both := c.attachments(t, 1, namespace, "db-0")
	if len(both) != 2 || !slices.Contains(both, before[0]) {
		t.Fatalf("node1 has the attachments %v of db-0, want the old one %v and a new one: the DEL is not late", both, before)
	}
	object := c.endpointUIDs(t, namespace)
	checked(t, "%s re-created (%s -> %s) beside its old sandbox: every view has the new one alone", old.Name, old.Status.PodIP, renewed[0].Status.PodIP)

	var loads []*load
	for i := range callers {
		loads = append(loads, c.startLoad(t, &callers[i], 50, urls...))
	}
	if err := resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, func() string {
		if got := c.attachments(t, 1, namespace, "db-0"); len(got) != 1 || got[0] == before[0] {
			return fmt.Sprintf("node1 has the attachments %v of db-0, want the new one alone", got)
		}
		return ""
	})
	for i := range callers {
		want := []string{"200 " + string(renewed[0].UID) + ":8080", "200 " + string(renewed[0].UID) + ":9090"}
		if tally := c.get(t, &callers[i], append([]string{"-n", "20"}, urls...)...); !slices.Equal(keys(tally.Answers), want) {
			t.Errorf("%s: got %v, want %v", callers[i].Name, tally.Answers, want)
		}
		tally := loads[i].stop(t)
		if !slices.Equal(keys(tally.Answers), want) {
			t.Errorf("%s: during the late DEL got %v, want %v", callers[i].Name, tally.Answers, want)
		}
		checked(t, "%s: %d requests while the old sandbox's DEL came, all answered by the new pod", callers[i].Name, tally.Requests)
	}
	if got := c.endpointUIDs(t, namespace); !slices.Equal(got, object) {
		t.Errorf("ServiceEndpoints %v became %v by the old sandbox's DEL", object, got)
	}
	if text := c.unequal(t.Context(), namespace, "db", renewed); text != "" {
		t.Error(text)
	}
	checked(t, "after the late DEL every view still has the new pod, its ServiceEndpoint is the same object")
}

// signalShim signals the process by which the runtime speaks to a sandbox.
func (c *cluster) signalShim(ctx context.Context, node, sandbox, signal string) error {
	const script = `found=1
for p in /proc/[0-9]*; do
  if tr '\0' ' ' < "$p/cmdline" | grep -q -- "-id $1 "; then kill "-$2" "${p#/proc/}" && found=0; fi
done 2> /dev/null
exit $found`
	if err := c.nodeCommand(ctx, node, "sh", "-c", script, "sh", sandbox, signal).Run(); err != nil {
		return fmt.Errorf("send %s to the shim of %s: %w", signal, sandbox, err)
	}
	return nil
}

// attachments are the attachments of a pod name on a node.
func (c *cluster) attachments(t *testing.T, node int, namespace, pod string) []string {
	t.Helper()
	s, err := c.registrarStatus(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, attachment := range s.Attachments {
		if attachment.Namespace == namespace && attachment.Pod == pod {
			all = append(all, attachment.Attachment)
		}
	}
	return all
}

// endpointUIDs are the UIDs of the ServiceEndpoint objects of a namespace.
func (c *cluster) endpointUIDs(t *testing.T, namespace string) []string {
	t.Helper()
	objects, err := c.endpoints(t.Context(), namespace)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for i := range objects {
		all = append(all, string(objects[i].UID))
	}
	slices.Sort(all)
	return all
}
