package kubetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// readinessApp is a pod of payments that serves both ports from its start.
const readinessApp = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: payments}
---
apiVersion: v1
kind: Pod
metadata:
  name: steady
  annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
spec:
  serviceAccountName: payments
  terminationGracePeriodSeconds: 2
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=steady, "http:8080", "h2:9090"]}
---
` + clients

// latePods are a pod whose 9090 comes up 5 s after its 8080, and one whose readiness
// probe fails.
const latePods = `
apiVersion: v1
kind: Pod
metadata:
  name: late
  annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
spec:
  serviceAccountName: payments
  terminationGracePeriodSeconds: 2
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=late, "http:8080", "h2:9090,delay=5s"]}
---
apiVersion: v1
kind: Pod
metadata:
  name: unready
  annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
spec:
  serviceAccountName: payments
  terminationGracePeriodSeconds: 2
  containers:
  - name: app
    image: portolan/podserver:lab
    command: [/usr/local/bin/podserver, serve, --name=unready, "http:8080", "h2:9090"]
    readinessProbe: {periodSeconds: 1, failureThreshold: 1, httpGet: {port: 8080, path: /status/500}}
`

// TestReadiness: a port is in a set when its pod is Ready and the port listens, each
// port for itself, and nobody is refused on the way there.
func TestReadiness(t *testing.T) {
	const namespace = "readiness"
	c := scenario(t, namespace)
	c.apply(t, namespace, readinessApp)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	urls := []string{"http://payments.readiness.aether.internal/", "http://payments.readiness.aether.internal:9090/"}
	c.awaitServing(t, namespace, "payments", 1)
	var loads []*load
	for i := range callers {
		// Both nodes have the clusters before a set can change.
		if n, answers := failed(c.get(t, &callers[i], urls...)); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
		loads = append(loads, c.startLoad(t, &callers[i], 50, urls...))
	}

	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	views := make([]sets, nodes)
	for i := range views {
		group.Go(func() { views[i].watch(ctx, c, i+1, namespace) })
	}
	c.apply(t, namespace, latePods)
	late := c.awaitAddress(t, namespace, "late")
	unready := c.awaitAddress(t, namespace, "unready")
	eventually(t, patience, func() string {
		for i := range views {
			if !slices.Contains(views[i].last(), "9090 "+late) {
				return fmt.Sprintf("node%d: 9090 of late is in no set: %v", i+1, views[i].last())
			}
		}
		return ""
	})
	eventually(t, patience, func() string {
		pod, err := c.client.CoreV1().Pods(namespace).Get(t.Context(), "unready", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if len(pod.Status.ContainerStatuses) == 1 && pod.Status.ContainerStatuses[0].State.Running != nil {
			return ""
		}
		return "unready does not run"
	})
	// Requests that begin now find every set as it is to be.
	for i := range callers {
		tally := c.get(t, &callers[i], append([]string{"-n", "40"}, urls...)...)
		want := []string{"200 late:8080", "200 late:9090", "200 steady:8080", "200 steady:9090"}
		if got := keys(tally.Answers); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", callers[i].Name, tally.Answers, want)
		}
	}
	stop()
	group.Wait()

	for i := range views {
		first := views[i].first("8080 " + late)
		if first == nil {
			t.Errorf("node%d: 8080 of late was in no set", i+1)
		} else if slices.Contains(first, "9090 "+late) {
			t.Errorf("node%d: both ports of late came at once, want 9090 later: %v", i+1, first)
		}
		for _, set := range views[i].all() {
			if slices.ContainsFunc(set, func(entry string) bool { return strings.Contains(entry, unready) }) {
				t.Errorf("node%d: unready is in %v", i+1, set)
			}
		}
		checked(t, "node%d: late is in 8080's set first and in 9090's later, unready in none: %d states seen of %v", i+1, len(views[i].all()), views[i].all())
	}
	for i, l := range loads {
		tally := l.stop(t)
		if n, answers := failed(tally); n != 0 {
			t.Errorf("%s: %d of %d requests failed: %v", callers[i].Name, n, tally.Requests, answers)
		}
		for answer := range tally.Answers {
			if strings.Contains(answer, "unready") {
				t.Errorf("%s: unready answered: %v", callers[i].Name, tally.Answers)
			}
		}
		checked(t, "%s: %d requests to both ports in the meantime, none failed: %v", callers[i].Name, tally.Requests, tally.Answers)
	}
}

// awaitAddress waits until a pod has an address and returns it.
func (c *cluster) awaitAddress(t *testing.T, namespace, name string) string {
	t.Helper()
	var address string
	eventually(t, patience, func() string {
		pod, err := c.client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if address = pod.Status.PodIP; address == "" {
			return name + " has no address"
		}
		return ""
	})
	return address
}

// sets are all states of payments' endpoint sets that one Envoy was seen in, in
// order. An entry is a port and an address.
type sets struct {
	mu     sync.Mutex
	states [][]string // guarded by mu
}

// watch notes every state until ctx ends.
func (s *sets) watch(ctx context.Context, c *cluster, node int, namespace string) {
	for ctx.Err() == nil {
		s.note(s.look(ctx, c, node, namespace))
		time.Sleep(poll)
	}
}

// look is the state now; nil when it could not be had.
func (*sets) look(ctx context.Context, c *cluster, node int, namespace string) []string {
	clusters, err := c.envoyClusters(ctx, node)
	if err != nil {
		return nil
	}
	var state []string
	for port, cluster := range map[string]string{"8080": "payments." + namespace + ".aether.internal", "9090": "payments." + namespace + ".aether.internal:9090"} {
		for _, address := range clusters[cluster] {
			state = append(state, port+" "+address)
		}
	}
	slices.Sort(state)
	return state
}

func (s *sets) note(state []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state != nil && (len(s.states) == 0 || !slices.Equal(s.states[len(s.states)-1], state)) {
		s.states = append(s.states, state)
	}
}

func (s *sets) all() [][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.states)
}

// last is the newest state.
func (s *sets) last() []string {
	all := s.all()
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}

// first is the first state with an entry; nil without one.
func (s *sets) first(entry string) []string {
	for _, state := range s.all() {
		if slices.Contains(state, entry) {
			return state
		}
	}
	return nil
}
