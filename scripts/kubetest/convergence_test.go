package kubetest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// churnApp is a Deployment of one pod, which serves both ports.
const churnApp = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: payments}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: payments}
spec:
  replicas: 1
  selector: {matchLabels: {app: payments}}
  template:
    metadata:
      labels: {app: payments}
      annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
    spec:
      serviceAccountName: payments
      terminationGracePeriodSeconds: 2
      containers:
      - name: app
        image: portolan/podserver:lab
        command: [/usr/local/bin/podserver, serve, --name=$(POD), "http:8080", "h2:9090"]
        env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
`

// TestConvergence: whatever happens to pods, when they are at rest every view is
// equal to them and nothing is left of those that went.
func TestConvergence(t *testing.T) {
	const namespace, outside, many = "churn", "churn-clients", 20
	c := scenario(t, namespace, outside)
	c.apply(t, namespace, churnApp)
	c.apply(t, outside, clients)
	callers := c.awaitPods(t, outside, "app=client", nodes)
	c.awaitPods(t, namespace, "app=payments", 1)
	c.awaitServing(t, namespace, "payments", 1)
	urls := []string{"http://payments.churn.aether.internal/", "http://payments.churn.aether.internal:9090/"}
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], urls...)); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
	}
	// settle waits for the pods' rest, then for every view.
	settle := func(step string, want int) []corev1.Pod {
		t.Helper()
		pods := c.awaitPods(t, namespace, "app=payments", want)
		begin := time.Now()
		eventually(t, patience, func() string { return c.unequal(t.Context(), namespace, "payments", pods) })
		took := time.Since(begin)
		eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, pods) })
		checked(t, "%s: ServiceEndpoints, registrars and Envoys of %d nodes are equal to the %d pods %v after their rest, no ghost", step, nodes, want, took.Round(time.Millisecond))
		return pods
	}
	settle("1 pod", 1)

	c.kubectl(t, "-n", namespace, "scale", "deployment/payments", fmt.Sprint("--replicas=", many))
	pods := settle("scaled to 20", many)

	for i := range pods[:5] {
		err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), pods[i].Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		if err != nil {
			t.Fatal(err)
		}
	}
	pods = settle("5 deleted by force", many)

	killed := make(map[string]bool)
	for i := range pods[:4] {
		killed[pods[i].Name] = true
		c.inNode(t, pods[i].Spec.NodeName, "ctr", "-n", "k8s.io", "task", "kill", "--signal", "SIGKILL", containerID(&pods[i]))
	}
	eventually(t, patience, func() string {
		all, err := c.pods(t.Context(), namespace, "app=payments")
		if err != nil {
			return err.Error()
		}
		for i := range all {
			if killed[all[i].Name] && all[i].Status.ContainerStatuses[0].RestartCount == 0 {
				return all[i].Name + " is not restarted"
			}
		}
		return ""
	})
	settle("4 containers killed", many)

	c.kubectl(t, "-n", namespace, "scale", "deployment/payments", "--replicas=1")
	pods = settle("scaled to 1", 1)
	for i := range callers {
		tally := c.get(t, &callers[i], append([]string{"-n", "20"}, urls...)...)
		for answer := range tally.Answers {
			if !strings.HasPrefix(answer, "200 "+pods[0].Name+":") {
				t.Errorf("%s: got %v, want answers of %s alone", callers[i].Name, tally.Answers, pods[0].Name)
			}
		}
	}

	c.deleteNamespace(t.Context(), t, namespace)
	settle("namespace deleted", 0)
	for i := range callers {
		if tally := c.get(t, &callers[i], append([]string{"-n", "2"}, urls...)...); tally.Answers["503"] != 4 {
			t.Errorf("%s: got %v, want 503 for a service without pods", callers[i].Name, tally.Answers)
		}
	}
}

// containerID is the runtime's ID of a pod's first container.
func containerID(pod *corev1.Pod) string {
	_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
	return id
}
