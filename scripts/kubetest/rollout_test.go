package kubetest

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

const (
	registrars = "app.kubernetes.io/name=portolan-registrar"
	// perNode is the load of each client, 200 requests a second together.
	perNode = 100
	// away takes every registrar off its node. Deleting the DaemonSet would be an
	// uninstall.
	away = `{"spec":{"template":{"spec":{"nodeSelector":{"kubetest.test/nowhere":"true"}}}}}`
	back = `{"spec":{"template":{"spec":{"nodeSelector":null}}}}`
)

// absence is how long the registrars are away; five minutes by hand.
var absence = flag.Duration("kubetest.absence", time.Minute, "how long TestRegistrarAway keeps the registrars away")

// serverPod is a pod of an account of its own, service and pod in one name.
func serverPod(name, ports string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: ServiceAccount
metadata: {name: %[1]s}
---
apiVersion: v1
kind: Pod
metadata:
  name: %[1]s
  labels: {app: %[1]s}
  annotations: {endpoint.aether.io/ports: %[2]q}
spec:
  serviceAccountName: %[1]s
  terminationGracePeriodSeconds: 2
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=%[1]s, "http:8080", "h2:9090", "http:7000"]}
---
`, name, ports)
}

// TestRolledRegistrar: while every registrar is replaced no request fails, nor does a
// name that nobody has asked for before, and the new ones have nothing to write.
func TestRolledRegistrar(t *testing.T) {
	const namespace = "rolled"
	c := scenario(t, namespace)
	c.apply(t, namespace, paymentsApp)
	var firsts []string
	for i := range 6 {
		name := fmt.Sprintf("first%d", i)
		firsts = append(firsts, name)
		c.apply(t, namespace, serverPod(name, "8080"))
	}
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	c.awaitPods(t, namespace, "app=payments", 2)
	c.awaitServing(t, namespace, "payments", 2)
	for _, name := range firsts {
		c.awaitServing(t, namespace, name, 1)
	}
	loads := c.loadPayments(t, namespace, callers)
	old := c.awaitPods(t, meshNamespace, registrars, nodes)
	c.kubectl(t, "-n", meshNamespace, "rollout", "restart", "daemonset/portolan-registrar")
	asked := 0
	for _, name := range firsts { // spread over the replacement of both
		eventually(t, patience, func() string { return c.notReplaced(t.Context(), old, asked*2/len(firsts)) })
		for i := range callers {
			c.mustAnswer(t, &callers[i], name, namespace)
		}
		asked++
	}
	eventually(t, patience, func() string { return c.notReplaced(t.Context(), old, nodes) })
	c.awaitPods(t, meshNamespace, registrars, nodes)
	stopLoads(t, callers, loads)
	for i := 1; i <= nodes; i++ {
		// No pod has changed: who writes has shown a pod to all nodes as what it is not.
		if writes, _ := c.counted(t, i, "portolan_registry_api_writes_total"); writes != 0 {
			t.Errorf("node%d: the new registrar has written %v ServiceEndpoints", i, writes)
		}
	}
	checked(t, "both registrars were replaced and wrote nothing; meanwhile %d names were looked up and requested for the first time from each node", asked)
}

// notReplaced says why fewer than want of the old pods are gone.
func (c *cluster) notReplaced(ctx context.Context, old []corev1.Pod, want int) string {
	now, err := c.pods(ctx, meshNamespace, registrars)
	if err != nil {
		return err.Error()
	}
	gone := 0
	for i := range old {
		if !slices.ContainsFunc(now, func(p corev1.Pod) bool { return p.UID == old[i].UID }) {
			gone++
		}
	}
	if gone < want {
		return fmt.Sprintf("%d of %d registrars are replaced", gone, want)
	}
	return ""
}

// loadPayments lets every client send to both ports of payments, each request through
// a connection of its own and so with a look-up of its own.
func (c *cluster) loadPayments(t *testing.T, namespace string, callers []corev1.Pod) []*load {
	t.Helper()
	urls := []string{"http://payments." + namespace + ".aether.internal/", "http://payments." + namespace + ".aether.internal:9090/"}
	loads := make([]*load, len(callers))
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], urls...)); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
		loads[i] = c.startLoad(t, &callers[i], perNode, append([]string{"-keepalive=false"}, urls...)...)
	}
	return loads
}

// stopLoads ends the loads; no request of them may have failed.
func stopLoads(t *testing.T, callers []corev1.Pod, loads []*load) {
	t.Helper()
	for i, l := range loads {
		tally := l.stop(t)
		if n, answers := failed(tally); n != 0 {
			t.Errorf("%s on %s: %d of %d requests failed: %v", callers[i].Name, callers[i].Spec.NodeName, n, tally.Requests, answers)
		}
		checked(t, "from %s: %d requests, each with a look-up, all answered; the slowest took %d ms", callers[i].Spec.NodeName, tally.Requests, tally.MaxMillis)
	}
}

// mustAnswer looks a service up and sends it a request, which outlasts the wait for a
// registrar that is away.
func (c *cluster) mustAnswer(t *testing.T, client *corev1.Pod, service, namespace string) {
	t.Helper()
	name := service + "." + namespace + ".aether.internal"
	var dns answer.DNS
	if c.podserver(t, client, &dns, "lookup", name); dns.Rcode != "NOERROR" || len(dns.Addresses) == 0 {
		t.Errorf("%s: look-up of %s: %+v", client.Spec.NodeName, name, dns)
	}
	if n, answers := failed(c.get(t, client, "-timeout=30s", "http://"+name+"/")); n != 0 {
		t.Errorf("%s: %s: %v", client.Spec.NodeName, name, answers)
	}
}

// TestRegistrarAway: without registrars what runs goes on, pods outside the mesh and of
// a bypassed namespace start, and those of the mesh wait, say why, and come with the
// registrars. A pod of the mesh can be deleted meanwhile.
func TestRegistrarAway(t *testing.T) {
	const namespace, bypassed = "away", "kube-system"
	c := scenario(t, namespace)
	c.apply(t, namespace, paymentsApp)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	servers := c.awaitPods(t, namespace, "app=payments", 2)
	c.apply(t, namespace, serverPod("leaver", "8080"))
	c.awaitPods(t, namespace, "app=leaver", 1)
	c.awaitServing(t, namespace, "payments", 2)
	c.awaitServing(t, namespace, "leaver", 1)
	loads := c.loadPayments(t, namespace, callers)

	t.Cleanup(func() { // whatever happened, the next test has its registrars
		if _, err := c.kubectlInput(context.WithoutCancel(t.Context()), "", "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", back); err != nil {
			t.Error(err)
		}
	})
	c.kubectl(t, "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", away)
	c.awaitPods(t, meshNamespace, registrars, 0)
	begin := time.Now()
	c.apply(t, namespace, serverPod("meshed", "8080"))
	c.apply(t, namespace, barePod("unmeshed", nil))
	meshed := map[string]string{"endpoint.aether.io/ports": "8080"}
	c.apply(t, bypassed, barePod("kubetest-bypassed", meshed))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := c.kubectlInput(ctx, "", "-n", bypassed, "delete", "pod", "kubetest-bypassed"); err != nil {
			t.Error(err)
		}
	})
	c.awaitPods(t, namespace, "app=unmeshed", 1)
	c.awaitPods(t, bypassed, "app=kubetest-bypassed", 1)
	event := c.awaitEvent(t, namespace, "meshed", "FailedCreatePodSandBox", "portolan")
	checked(t, "with no registrar an unmeshed pod and one of %s run; the meshed one waits with the event: %s", bypassed, event)
	for i := range callers {
		c.mustAnswer(t, &callers[i], "payments", namespace)
	}
	c.kubectl(t, "-n", namespace, "delete", "--wait", "--timeout=60s", "pod", "leaver")
	eventually(t, *absence+patience, func() string {
		if since := time.Since(begin); since < *absence {
			return fmt.Sprintf("away for %v only", since)
		}
		return ""
	})
	if pods, err := c.pods(t.Context(), namespace, "app=meshed"); err != nil || len(pods) != 1 || atRest(&pods[0]) {
		t.Errorf("the meshed pod did not wait: %v, %v", phases(pods), err)
	}
	c.kubectl(t, "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", back)
	c.awaitPods(t, meshNamespace, registrars, nodes)
	meshedPods := c.awaitPods(t, namespace, "app=meshed", 1)
	c.awaitServing(t, namespace, "meshed", 1)
	eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, slices.Concat(callers, servers, meshedPods)) })
	for i := range callers {
		c.mustAnswer(t, &callers[i], "meshed", namespace)
	}
	stopLoads(t, callers, loads)
	checked(t, "the meshed pod started with the registrars, %v after they went, and of the pod that was deleted meanwhile nothing is left", time.Since(begin).Round(time.Second))
}

// barePod is a pod with a server on 8080 and the account of its namespace.
func barePod(name string, annotations map[string]string) string {
	var lines strings.Builder
	for key, value := range annotations {
		fmt.Fprintf(&lines, "\n    %s: %q", key, value)
	}
	if lines.Len() == 0 {
		lines.WriteString(" {}")
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: %[1]s
  labels: {app: %[1]s}
  annotations:%[2]s
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: app, image: "portolan/podserver:lab", command: [/usr/local/bin/podserver, serve, --name=%[1]s, "http:8080"]}
`, name, lines.String())
}

// awaitEvent waits for an event of a pod whose message has a part, and returns it.
func (c *cluster) awaitEvent(t *testing.T, namespace, pod, reason, part string) string {
	t.Helper()
	var message string
	eventually(t, patience, func() string {
		list, err := c.client.CoreV1().Events(namespace).List(t.Context(), listOptions("involvedObject.name="+pod))
		if err != nil {
			return err.Error()
		}
		seen := make([]string, 0, len(list.Items))
		for i := range list.Items {
			e := &list.Items[i]
			if e.Reason == reason && strings.Contains(e.Message, part) {
				message = e.Message
				return ""
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return fmt.Sprintf("%s has no event %s with %q: %q", pod, reason, part, seen)
	})
	return message
}

// TestChangedPorts: a running pod's set follows its annotation, and an invalid one
// changes nothing but is told.
func TestChangedPorts(t *testing.T) {
	const namespace = "changed"
	c := scenario(t, namespace)
	c.apply(t, namespace, clients+"---\n"+serverPod("payments", "8080,9090=h2"))
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	before := c.awaitPods(t, namespace, "app=payments", 1)[0]
	c.awaitServing(t, namespace, "payments", 1)
	url := "http://payments." + namespace + ".aether.internal"
	loads := make([]*load, len(callers))
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], url+":8080/", url+":9090/")); n != 0 {
			t.Fatalf("%s: %v", callers[i].Name, answers)
		}
		loads[i] = c.startLoad(t, &callers[i], perNode, "-keepalive=false", url+":8080/")
	}
	annotate := func(ports string) {
		c.kubectl(t, "-n", namespace, "annotate", "--overwrite", "pod", "payments", "endpoint.aether.io/ports="+ports)
	}
	annotate("8080,7000")
	for i := range callers {
		eventually(t, patience, func() string {
			added, removed := c.get(t, &callers[i], url+":7000/"), c.get(t, &callers[i], url+":9090/")
			if n, _ := failed(added); n != 0 || removed.Answers["503"] != 1 {
				return fmt.Sprintf("%s: 7000 answers %v, 9090 %v", callers[i].Spec.NodeName, added.Answers, removed.Answers)
			}
			return ""
		})
	}
	c.awaitSet(t, namespace, "7000,8080")
	checked(t, "7000 was added and 9090 removed by kubectl annotate")

	annotate("8080,99999")
	event := c.awaitEvent(t, namespace, "payments", "InvalidAnnotation", "99999")
	c.awaitSet(t, namespace, "7000,8080")
	for i := range callers {
		if n, answers := failed(c.get(t, &callers[i], url+":7000/", url+":8080/")); n != 0 {
			t.Errorf("%s after the invalid change: %v", callers[i].Spec.NodeName, answers)
		}
	}
	checked(t, "an invalid value keeps the ports and is told: %s", event)
	stopLoads(t, callers, loads)
	after := c.awaitPods(t, namespace, "app=payments", 1)[0]
	if containerID(&after) != containerID(&before) {
		t.Error("the pod was restarted")
	}
}

// awaitSet waits until the one ServiceEndpoint of a namespace has these ports, healthy.
func (c *cluster) awaitSet(t *testing.T, namespace, ports string) {
	t.Helper()
	eventually(t, patience, func() string {
		all, err := c.endpoints(t.Context(), namespace)
		if err != nil {
			return err.Error()
		}
		if len(all) != 1 || all[0].Spec.Ports != ports || all[0].Spec.Health != "Healthy" || len(all[0].Spec.PortHealth) != 0 {
			return fmt.Sprintf("ServiceEndpoints %+v, want one with the ports %s", all, ports)
		}
		return ""
	})
}
