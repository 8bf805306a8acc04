package kubetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestReboot: the power of node2 is cut and comes back. What was in memory is gone, the
// disk is kept, and nobody helps: every pod of the mesh is in it again.
func TestReboot(t *testing.T) {
	const namespace, rebooted = "reboot", 2
	c := scenario(t, namespace)
	c.apply(t, namespace, paymentsApp)
	callers, servers := c.awaitPods(t, namespace, "app=client", nodes), c.awaitPods(t, namespace, "app=payments", 2)
	c.awaitServing(t, namespace, "payments", 2)
	old := map[string]string{}
	s, err := c.registrarStatus(t.Context(), rebooted)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range s.Attachments {
		if a.Namespace == namespace {
			old[a.Pod] = a.Attachment
		}
	}
	if len(old) != 2 {
		t.Fatalf("on node%d are attached %v, want a client and a server", rebooted, old)
	}
	if err = c.lab.Run(t.Context(), c.lab.Script(), "reboot", fmt.Sprint(rebooted)); err != nil {
		t.Fatal(err)
	}
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
	callers, servers = c.awaitPods(t, namespace, "app=client", nodes), c.awaitPods(t, namespace, "app=payments", 2)
	c.awaitServing(t, namespace, "payments", 2)
	eventually(t, patience, func() string { return c.ghosts(t.Context(), namespace, slices.Concat(callers, servers)) })
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
