package kubetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestReboot: the power of node2 is cut and comes back. What was in memory is gone, the
// disk is kept, and nobody helps: every pod of the mesh is in it again. The network plugin
// comes back after the mesh and writes its configuration anew, as most do at a node's boot.
// Until then the runtime cannot carry out any DEL, so that what goes is what the registrar
// lets go of by itself; and pods that start before it is in the chain again are taken in.
func TestReboot(t *testing.T) {
	const namespace, rebooted = "reboot", 2
	c := scenario(t, namespace)
	c.apply(t, namespace, paymentsApp)
	// So many on the node that nobody believes that all of them are gone, but for the reboot.
	others := []string{"one", "two"}
	for _, name := range others {
		c.apply(t, namespace, onNode(serverPod(name, "8080"), rebooted))
	}
	c.awaitPods(t, namespace, "app=client", nodes)
	c.awaitServing(t, namespace, "payments", 2)
	for _, name := range others {
		c.awaitServing(t, namespace, name, 1)
	}
	old := c.attached(t, rebooted, namespace)
	if len(old) != 2+len(others) {
		t.Fatalf("on node%d are attached %v, want a client, a server and %v", rebooted, old, others)
	}
	objects := c.endpointUIDs(t, namespace)
	conf := filepath.Join(c.lab.Dir, fmt.Sprintf("node%d/etc/cni/net.d", rebooted), primaryFile)
	original, err := os.ReadFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(conf); err != nil {
		t.Fatal(err)
	}
	restore := sync.OnceFunc(func() { replaceFile(t, conf, withoutEntry(t, string(original))) })
	t.Cleanup(restore) // whatever happened, the next test has its network
	if err = c.lab.Run(t.Context(), c.lab.Script(), "reboot", fmt.Sprint(rebooted)); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, func() string {
		s, err := c.registrarStatus(t.Context(), rebooted)
		if err != nil {
			return err.Error()
		}
		for _, a := range s.Attachments {
			if a.Namespace == namespace {
				return "still attached: " + a.Attachment
			}
		}
		now, err := c.endpoints(t.Context(), namespace)
		if err != nil {
			return err.Error()
		}
		if len(now) != len(objects)-1-len(others) {
			return fmt.Sprintf("%d ServiceEndpoints are left of %d", len(now), len(objects))
		}
		return ""
	})
	checked(t, "with no network on node%d, and no DEL, its attachments %v and their ServiceEndpoints are gone", rebooted, old)
	restore()
	// The API server shows the state before the power cut until the kubelet speaks.
	eventually(t, patience, func() string {
		s, err := c.registrarStatus(t.Context(), rebooted)
		if err != nil {
			return err.Error()
		}
		if !s.Ready {
			return "the registrar is not ready: " + s.Missing
		}
		again := 0
		for _, a := range s.Attachments {
			if was, known := old[a.Pod]; known && a.Namespace == namespace && a.Attachment != was {
				again++
			}
		}
		if again != len(old) {
			return fmt.Sprintf("%d of %v are attached again", again, old)
		}
		return ""
	})
	callers, servers := c.awaitPods(t, namespace, "app=client", nodes), c.awaitPods(t, namespace, "app=payments", 2)
	c.awaitServing(t, namespace, "payments", 2)
	all := slices.Concat(callers, servers)
	for _, name := range others {
		all = append(all, c.awaitPods(t, namespace, "app="+name, 1)...)
		c.awaitServing(t, namespace, name, 1)
	}
	eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, all) })
	const caller = "URI=spiffe://aether.internal/ns/reboot/sa/shop"
	for i := range callers {
		tally := c.get(t, &callers[i], "-n", "40", "-keepalive=false", "http://payments.reboot.aether.internal/", "http://payments.reboot.aether.internal:9090/")
		if n, answers := failed(tally); n != 0 || len(keys(tally.Answers)) != 2*len(servers) {
			t.Errorf("%s: %v, %v", callers[i].Spec.NodeName, tally.Answers, answers)
		}
		for xfcc, n := range tally.Callers {
			if !strings.Contains(xfcc, caller) {
				t.Errorf("%s: %d requests had the caller %q, want %s", callers[i].Spec.NodeName, n, xfcc, caller)
			}
		}
	}
	checked(t, "node%d came back by itself: %d pods are attached anew and no other is, both servers serve both nodes by mTLS", rebooted, len(old))
}

// attached are a node's attachments of a namespace, by pod.
func (c *cluster) attached(t *testing.T, node int, namespace string) map[string]string {
	t.Helper()
	s, err := c.registrarStatus(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, a := range s.Attachments {
		if a.Namespace == namespace {
			all[a.Pod] = a.Attachment
		}
	}
	return all
}
