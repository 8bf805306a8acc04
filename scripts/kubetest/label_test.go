package kubetest

import (
	"testing"
	"time"
)

// plainApp is pods that say nothing of the mesh.
const plainApp = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: plain}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: plain}
spec:
  replicas: 6
  selector: {matchLabels: {app: plain}}
  template:
    metadata:
      labels: {app: plain}
    spec:
      serviceAccountName: plain
      terminationGracePeriodSeconds: 2
      containers:
      - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=plain, "http:8080"]}
---
`

// TestLateLabel: the pods of a namespace that gets the label of the mesh while they run
// are taken in at once, all of them and as they are.
func TestLateLabel(t *testing.T) {
	const namespace, pods = "labelled", 6
	c := scenario(t, namespace)
	c.apply(t, namespace, plainApp+clients)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	c.awaitPods(t, namespace, "app=plain", pods)
	running := c.containers(t, namespace)
	if endpoints, err := c.endpoints(t.Context(), namespace); err != nil || len(endpoints) != 0 {
		t.Fatalf("endpoints before the label: %v, %v", endpoints, err)
	}
	begin := time.Now()
	c.kubectl(t, "label", "namespace", namespace, "aether.io/managed=true")
	c.awaitServing(t, namespace, "plain", pods)
	took := time.Since(begin)
	for i := range callers {
		c.mustAnswer(t, &callers[i], "plain", namespace)
	}
	if now := c.containers(t, namespace); !equal(running, now) {
		t.Errorf("containers were %v, are %v after the label", running, now)
	}
	checked(t, "%d running pods of a namespace that was labelled are served %v later", pods, took.Round(time.Millisecond))
}
