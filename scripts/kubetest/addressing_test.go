package kubetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// paymentsApp are the Deployment payments, two containers each with a port, spread
// over the nodes, and a client on each node under an account of its own.
const paymentsApp = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: payments}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: payments}
spec:
  replicas: 2
  selector: {matchLabels: {app: payments}}
  template:
    metadata:
      labels: {app: payments}
      annotations: {endpoint.aether.io/ports: "8080,9090=h2"}
    spec:
      serviceAccountName: payments
      terminationGracePeriodSeconds: 2
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: payments}}}
      containers:
      - name: api
        image: portolan/podserver:lab
        command: [/usr/local/bin/podserver, serve, --name=$(POD), --container=api, "http:8080"]
        env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
      - name: grpc
        image: portolan/podserver:lab
        command: [/usr/local/bin/podserver, serve, --name=$(POD), --container=grpc, "h2:9090"]
        env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
---
` + clients

// clients are a pod on each node that serves nothing, app=client, of the account shop.
const clients = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: shop}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata:
      labels: {app: client}
      annotations: {endpoint.aether.io/ports: "none"}
    spec:
      serviceAccountName: shop
      terminationGracePeriodSeconds: 1
      containers:
      - name: client
        image: portolan/podserver:lab
        command: [/usr/local/bin/podserver, serve, "http:7000"]
`

// TestAddressing is the addressing table of contract 2 between pods that the
// kubelet runs.
func TestAddressing(t *testing.T) {
	const flat = corev1.NamespaceDefault
	c := newCluster(t)
	t.Cleanup(func() {
		_, err := c.kubectlInput(context.WithoutCancel(t.Context()), paymentsApp, "-n", flat, "delete", "--ignore-not-found", "-f", "-")
		if err != nil {
			t.Error(err)
		}
	})
	c.dumpOnFailure(t)
	c.apply(t, flat, paymentsApp)
	servers, callers := c.awaitPods(t, flat, "app=payments", 2), c.awaitPods(t, flat, "app=client", nodes)
	c.awaitServing(t, flat, "payments", len(servers))

	const caller = "URI=spiffe://aether.internal/ns/default/sa/shop"
	for i := 1; i <= nodes; i++ {
		here := fmt.Sprintf("node%d", i)
		client, near := on(t, callers, here), on(t, servers, here)
		for _, row := range []struct {
			args []string
			port int
		}{
			{[]string{"http://payments.aether.internal/"}, 8080},
			{[]string{"http://payments.aether.internal:8080/"}, 8080},
			{[]string{"-h2", "http://payments.aether.internal:8080/"}, 8080},
			{[]string{"http://payments.aether.internal:9090/"}, 9090},
			{[]string{"-h2", "http://payments.aether.internal:9090/"}, 9090},
			{[]string{"http://payments.default.aether.internal:9090/"}, 9090},
			{[]string{"http://payments.default.aether.internal/"}, 8080},
			{[]string{"http://PAYMENTS.aether.internal.:9090/"}, 9090},
		} {
			tally := c.get(t, client, append([]string{"-n", "20", "-c", "4"}, row.args...)...)
			want := make([]string, len(servers))
			for i := range servers {
				want[i] = fmt.Sprintf("200 %s:%d", servers[i].Name, row.port)
			}
			if got := keys(tally.Answers); !slices.Equal(got, want) {
				t.Errorf("%s: %v got %v, want %v", here, row.args, tally.Answers, want)
			}
			for xfcc, n := range tally.Callers {
				if !strings.Contains(xfcc, caller) {
					t.Errorf("%s: %v: %d requests had the caller %q, want %s", here, row.args, n, xfcc, caller)
				}
			}
			if len(tally.Callers) == 0 {
				t.Errorf("%s: %v: no caller is named", here, row.args)
			}
		}
		for _, row := range []struct {
			answer string
			args   []string
		}{
			{"503", []string{"http://payments.aether.internal:7777/"}},
			{"503", []string{"-dial", "payments.aether.internal:8080", "-authority", "ghost.aether.internal", "http://payments.aether.internal/"}},
			{"404", []string{"-dial", "payments.aether.internal:8080", "-authority", "evil.com", "http://payments.aether.internal/"}},
			{"404", []string{"-dial", "payments.aether.internal:8080", "-authority", "payments.aether.internal:08080", "http://payments.aether.internal/"}},
		} {
			tally := c.get(t, client, append([]string{"-n", "2"}, row.args...)...)
			if tally.Answers[row.answer] != 2 {
				t.Errorf("%s: %v got %v, want %s each time", here, row.args, tally.Answers, row.answer)
			}
		}
		var dns answer.DNS
		if c.podserver(t, client, &dns, "lookup", "ghost.aether.internal"); dns.Rcode != "NXDOMAIN" {
			t.Errorf("%s: ghost.aether.internal: %+v, want NXDOMAIN", here, dns)
		}
		var rpc answer.GRPC
		c.podserver(t, client, &rpc, "grpc", "payments.aether.internal:9090")
		if rpc.Code != "OK" || rpc.Container != "grpc" || rpc.Port != 9090 || !strings.Contains(rpc.XFCC, caller) {
			t.Errorf("%s: gRPC got %+v, want container grpc, port 9090 and %s", here, rpc, caller)
		}
		checked(t, "from %s every spelling reaches exactly its port on both pods (%s on the same node), XFCC has %s, unserved ports and unknown names are refused", here, near.Name, caller)
	}

	table := c.kubectl(t, "-n", flat, "get", "sep")
	for i := range servers {
		line := ""
		for l := range strings.Lines(table) {
			if strings.HasPrefix(l, servers[i].Name) {
				line = l
			}
		}
		if got := strings.Fields(line); len(got) < 5 || !slices.Equal(got[1:5], []string{"payments", "8080,9090=h2", servers[i].Spec.NodeName, "Healthy"}) {
			t.Errorf("kubectl get sep has %q for %s, want service, ports, node and health", line, servers[i].Name)
		}
	}
	endpoints, err := c.endpoints(t.Context(), flat)
	if err != nil || len(endpoints) != len(servers) {
		t.Errorf("%d ServiceEndpoints, want one for each of the %d pods that serve: %v", len(endpoints), len(servers), err)
	}
	checked(t, "kubectl get sep shows it:\n%s", table)
}

// keys are the keys of a tally, sorted.
func keys(counts map[string]int) []string {
	all := make([]string, 0, len(counts))
	for key := range counts {
		all = append(all, key)
	}
	slices.Sort(all)
	return all
}

// awaitServing waits until every node's registrar has exactly so many pods of a service
// as healthy on all of its ports.
func (c *cluster) awaitServing(t *testing.T, namespace, service string, pods int) {
	t.Helper()
	eventually(t, patience, func() string { return c.unhealthyAnywhere(t.Context(), namespace+"/"+service, pods) })
}
