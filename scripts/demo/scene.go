package main

import (
	"context"
	"errors"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// readyTime bounds the time until every port of the scene is ready.
const readyTime = 20 * time.Second

// The scene's annotations.
const (
	keyPorts   = "endpoint.aether.io/ports"
	keyService = "endpoint.aether.io/service"
)

// scene is the pods of the demo on their node.
type scene struct {
	node *node.Node
	// both serves 8080, 9090 and 5432, by two containers.
	both *node.Pod
	// plain is a pod of the same service that serves 8080 only.
	plain *node.Pod
	// client serves nothing.
	client *node.Pod
}

// newScene makes the pods and waits until their ports are ready.
func newScene(ctx context.Context, n *node.Node) (*scene, error) {
	sc := &scene{node: n}
	for _, add := range []struct {
		pod  **node.Pod
		spec node.PodSpec
	}{
		{&sc.both, node.PodSpec{
			Name:        "payments-1",
			Annotations: map[string]string{keyService: "payments", keyPorts: "8080,9090=h2,5432=tcp"},
			Servers: []node.Server{
				{Container: "web", Listen: []string{"http:8080"}},
				{Container: "ledger", Listen: []string{"h2:9090", "tcp:5432"}},
			},
		}},
		{&sc.plain, plainSpec()},
		{&sc.client, node.PodSpec{
			Name:        "client",
			Annotations: map[string]string{keyPorts: "none"},
		}},
	} {
		pod, err := n.AddPod(ctx, add.spec)
		if err != nil {
			return nil, err
		}
		*add.pod = pod
	}
	return sc, sc.waitReady(ctx)
}

func plainSpec() node.PodSpec {
	return node.PodSpec{
		Name:        "payments-2",
		Annotations: map[string]string{keyService: "payments", keyPorts: "8080"},
		Servers:     []node.Server{{Container: "web", Listen: []string{"http:8080"}}},
	}
}

// restore adds the pod again that a check deleted, so that who looks around finds
// what the checks showed.
func (sc *scene) restore(ctx context.Context) error {
	var err error
	if sc.plain, err = sc.node.AddPod(ctx, plainSpec()); err != nil {
		return err
	}
	return sc.waitReady(ctx)
}

// waitReady waits until every port of every pod is ready.
func (sc *scene) waitReady(ctx context.Context) error {
	ready, cancel := context.WithTimeoutCause(ctx, readyTime, errors.New("the pods' ports are not ready"))
	defer cancel()
	for _, port := range []struct {
		number uint16
		pods   int
	}{{8080, 2}, {9090, 1}, {5432, 1}} {
		if err := sc.node.WaitHealthy(ready, "default/payments", port.number, port.pods); err != nil {
			return err
		}
	}
	return nil
}
