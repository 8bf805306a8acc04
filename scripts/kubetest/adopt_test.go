package kubetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// primaryFile is the configuration of the lab's own network.
const primaryFile = "10-lab.conflist"

// TestInstallAndUninstall: the mesh is removed under running pods and leaves nothing
// of itself; they go on, and can be deleted. It is installed under running pods and
// takes them in as they are.
func TestInstallAndUninstall(t *testing.T) {
	const namespace = "adopted"
	c := scenario(t, namespace)
	t.Cleanup(func() { // whatever happened, the next test has its mesh
		if err := c.lab.Install(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	c.apply(t, namespace, paymentsApp)
	c.apply(t, namespace, serverPod("goner", "8080"))
	callers, servers := c.awaitPods(t, namespace, "app=client", nodes), c.awaitPods(t, namespace, "app=payments", 2)
	goner := c.awaitPods(t, namespace, "app=goner", 1)
	c.awaitServing(t, namespace, "payments", 2)
	eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, slices.Concat(callers, servers, goner)) })
	running := c.containers(t, namespace)
	// A registrar that finds pins when it starts has more mounts of them to take away
	// than one that saw them come.
	c.kubectl(t, "-n", meshNamespace, "rollout", "restart", "daemonset/portolan-registrar")
	c.kubectl(t, "-n", meshNamespace, "rollout", "status", "--timeout=120s", "daemonset/portolan-registrar")

	if err := c.lab.Uninstall(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= nodes; i++ {
		eventually(t, patience, func() string { return c.leftOver(t, i) })
	}
	if _, err := c.endpoints(t.Context(), namespace); !apierrors.IsNotFound(err) {
		t.Errorf("ServiceEndpoints are still a resource: %v", err)
	}
	if out := c.kubectl(t, "get", "certificatesigningrequests", "-o", "name"); out != "" {
		t.Errorf("certificate requests are left: %s", out)
	}
	c.kubectl(t, "-n", namespace, "delete", "--wait", "--timeout=60s", "pod", "goner")
	delete(running, "goner")
	if now := c.containers(t, namespace); !equal(running, now) {
		t.Errorf("containers were %v, are %v after the removal", running, now)
	}
	checked(t, "uninstalled: no entry in a conflist, no pin, note, mount, capture, endpoint or certificate request; %d pods run on and one could be deleted", len(running))

	// One more, which has never seen the mesh.
	c.apply(t, namespace, serverPod("newcomer", "8080"))
	newcomer := c.awaitPods(t, namespace, "app=newcomer", 1)
	running = c.containers(t, namespace)
	if err := c.lab.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.awaitServing(t, namespace, "payments", 2)
	c.awaitServing(t, namespace, "newcomer", 1)
	eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, slices.Concat(callers, servers, newcomer)) })
	const caller = "URI=spiffe://aether.internal/ns/adopted/sa/shop"
	for i := range callers {
		c.mustAnswer(t, &callers[i], "newcomer", namespace)
		tally := c.get(t, &callers[i], "-n", "40", "-keepalive=false", "http://payments.adopted.aether.internal/", "http://payments.adopted.aether.internal:9090/")
		if n, answers := failed(tally); n != 0 || len(keys(tally.Answers)) != 2*len(servers) {
			t.Errorf("%s: %v, %v", callers[i].Spec.NodeName, tally.Answers, answers)
		}
		for xfcc, n := range tally.Callers {
			if !strings.Contains(xfcc, caller) {
				t.Errorf("%s: %d requests had the caller %q, want %s", callers[i].Spec.NodeName, n, xfcc, caller)
			}
		}
	}
	if now := c.containers(t, namespace); !equal(running, now) {
		t.Errorf("containers were %v, are %v after the installation", running, now)
	}
	checked(t, "installed under %d running pods: all are in the mesh, as clients and as servers of both nodes by mTLS, in the same containers", len(running))
}

// containers are the IDs and restarts of a namespace's containers, by pod.
func (c *cluster) containers(t *testing.T, namespace string) map[string]string {
	t.Helper()
	pods, err := c.pods(t.Context(), namespace, "")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for i := range pods {
		for _, s := range pods[i].Status.ContainerStatuses {
			all[pods[i].Name] += fmt.Sprintf("%s %s restarts=%d;", s.Name, s.ContainerID, s.RestartCount)
		}
	}
	return all
}

func equal(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for key, value := range a {
		if b[key] != value {
			return false
		}
	}
	return true
}

// leftOver says what a node still has of the mesh.
func (c *cluster) leftOver(t *testing.T, node int) string {
	t.Helper()
	const script = `grep -ls portolan /etc/cni/net.d/* /etc/cni/net.d/.[!.]*
grep ' /run/portolan' /proc/self/mountinfo
find /run/portolan /var/lib/portolan/ca -type f ! -name '*.lock' 2>/dev/null
find /run/portolan/netns /run/portolan/spool 2>/dev/null
for n in /run/netns/*; do nsenter --net="$n" nft list tables 2>/dev/null | grep -i portolan; done
true`
	out, err := c.nodeCommand(t.Context(), fmt.Sprintf("node%d", node), "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("node%d: %v: %s", node, err, out)
	}
	if len(out) == 0 {
		return ""
	}
	return fmt.Sprintf("node%d still has:\n%s", node, out)
}

// rewriting is how long the primary writes its file again, every rewriteEvery.
const (
	rewriting    = 30 * time.Second
	rewriteEvery = time.Second
)

// TestRewritingPrimary: a network plugin that keeps writing its configuration back
// does not get rid of the mesh's entry, and is not fought with.
func TestRewritingPrimary(t *testing.T) {
	const namespace, node = "rewriting", 1
	c := scenario(t, namespace)
	c.apply(t, namespace, clients)
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	dir := filepath.Join(c.lab.Dir, fmt.Sprintf("node%d", node), "etc/cni/net.d")
	own, err := os.ReadFile(filepath.Join(c.lab.Dir, fmt.Sprintf("node%d", nodes), "etc/cni/net.d", primaryFile))
	if err != nil {
		t.Fatal(err)
	}
	original := withoutEntry(t, strings.ReplaceAll(string(own), fmt.Sprintf("10.201.%d.", nodes), fmt.Sprintf("10.201.%d.", node)))
	before := c.confWrites(t, node)
	missing, looks := 0, 0
	rewrites, begin := 0, time.Now()
	// Looked at just before the next rewrite: it had all the time there is.
	eventually(t, rewriting+patience, func() string {
		since := time.Since(begin)
		if since >= time.Duration(rewrites)*rewriteEvery && since < rewriting {
			if rewrites > 0 {
				looks++
				if !chained(t, dir) {
					missing++
				}
			}
			replaceFile(t, filepath.Join(dir, primaryFile), original)
			if rewrites++; rewrites == 10 {
				c.apply(t, namespace, onNode(serverPod("during", "8080"), node))
			}
		}
		if since < rewriting {
			return "the primary still writes"
		}
		return ""
	})
	c.awaitPods(t, namespace, "app=during", 1)
	c.awaitServing(t, namespace, "during", 1)
	for i := range callers {
		c.mustAnswer(t, &callers[i], "during", namespace)
	}
	eventually(t, patience, func() string {
		if !chained(t, dir) {
			return "the entry is not in the chain"
		}
		return ""
	})
	// 600 rewrites cost 4 writes where they were counted (registrar/DESIGN.md).
	const most = 10
	writes := c.confWrites(t, node) - before
	if writes > most {
		t.Errorf("%d rewrites cost %v writes, want at most %d", rewrites, writes, most)
	}
	if missing*3 > looks {
		t.Errorf("the entry was missing at %d of %d looks", missing, looks)
	}
	checked(t, "%d rewrites of %s cost %v writes; the entry was missing at %d of %d looks, and a pod that came meanwhile is in the mesh", rewrites, primaryFile, writes, missing, looks)
}

// onNode binds a manifest's pod to a node.
func onNode(manifest string, node int) string {
	return strings.Replace(manifest, "spec:\n  serviceAccountName", fmt.Sprintf("spec:\n  nodeSelector: {kubernetes.io/hostname: node%d}\n  serviceAccountName", node), 1)
}

// withoutEntry is a configuration of the lab without the mesh's entry, which is the
// last one, on a line of its own.
func withoutEntry(t *testing.T, conf string) string {
	t.Helper()
	before, _, found := strings.Cut(conf, ",\n{\"type\":\"portolan\"")
	if !found {
		t.Fatalf("no entry of the mesh in %s", conf)
	}
	return before + "]}\n"
}

// replaceFile writes a file as most network plugins do: beside it, then over it.
func replaceFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// chained reports whether the list that the runtime loads, the first by name, has the
// mesh's entry.
func chained(t *testing.T, dir string) bool {
	t.Helper()
	lists, err := filepath.Glob(filepath.Join(dir, "*.conflist"))
	if err != nil || len(lists) == 0 {
		return false
	}
	text, err := os.ReadFile(slices.Min(lists))
	return err == nil && strings.Contains(string(text), `"portolan"`)
}

// confWrites is how often a node's registrar has written a configuration.
func (c *cluster) confWrites(t *testing.T, node int) float64 {
	t.Helper()
	const metric = "portolan_cni_conf_writes_total"
	sum, found := c.counted(t, node, metric)
	if !found {
		t.Fatalf("no metric %s", metric)
	}
	return sum
}

// counted is a metric of a node's registrar, over all labels.
func (c *cluster) counted(t *testing.T, node int, metric string) (sum float64, found bool) {
	t.Helper()
	for line := range strings.Lines(c.inNode(t, fmt.Sprintf("node%d", node), "curl", "-sS", "http://127.0.0.1:15070/metrics")) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.HasPrefix(name, metric) {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum, found = sum+n, true
		}
	}
	return sum, found
}
