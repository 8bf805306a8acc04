package kubetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// rebooted is the node whose power is cut.
const rebooted = 2

// TestReboot: the power of node2 is cut and comes back. What was in memory is gone, the
// disk is kept, and nobody helps: every pod of the mesh is in it again. The network plugin
// comes back after the mesh and writes its configuration anew, as most do at a node's boot.
// Until then the runtime cannot carry out any DEL, so that what goes is what the registrar
// lets go of by itself.
func TestReboot(t *testing.T) {
	r := startReboot(t, "reboot")
	list := r.removeList(t)
	r.cutPower(t)
	eventually(t, patience, func() string {
		if now, err := r.attached(t.Context()); err != nil || len(now) > 0 {
			return fmt.Sprintf("still attached: %v (%v)", now, err)
		}
		left, err := r.endpoints(t.Context(), r.namespace)
		if err != nil {
			return err.Error()
		}
		// The client has none, and one of payments is on the other node.
		if len(left) != 1 {
			return fmt.Sprintf("%d ServiceEndpoints are left, want that of the other node", len(left))
		}
		return ""
	})
	checked(t, "with no network on node%d, and no DEL, its attachments %v and their ServiceEndpoints are gone", rebooted, r.old)
	list.writePlain(t)
	r.awaitHealed(t)
}

// TestRebootBeforeTheMesh: the power of node2 is cut, and when it comes back the network
// plugin is there before the mesh, with a configuration of its own: the pods start outside
// the mesh. Once its registrar runs they are in it as they are, and what was attached
// before the power was cut, of which no DEL has ever told, is not.
func TestRebootBeforeTheMesh(t *testing.T) {
	r := startReboot(t, "rebootalone")
	t.Cleanup(func() { // whatever happened, the next test has its registrars
		if _, err := r.kubectlInput(context.WithoutCancel(t.Context()), "", "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", back); err != nil {
			t.Error(err)
		}
	})
	before := r.containers(t, r.namespace)
	r.kubectl(t, "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", away)
	r.awaitPods(t, meshNamespace, registrars, 0)
	r.removeList(t).writePlain(t)
	r.cutPower(t)
	// The API server shows the state before the power cut until the kubelet speaks.
	eventually(t, patience, func() string {
		now := r.containers(t, r.namespace)
		for pod := range r.old {
			if now[pod] == before[pod] {
				return pod + " has not started again"
			}
		}
		return ""
	})
	r.awaitRest(t)
	const captures = `for n in /run/netns/*; do nsenter --net="$n" nft list tables; done | grep portolan; true`
	if out := r.inNode(t, fmt.Sprintf("node%d", rebooted), "sh", "-c", captures); out != "" {
		t.Fatalf("pods of node%d are in the mesh, of which nobody can have told: %s", rebooted, out)
	}
	running := r.containers(t, r.namespace)
	checked(t, "without the mesh %d pods of node%d have started outside of it", len(r.old), rebooted)
	r.kubectl(t, "-n", meshNamespace, "patch", "daemonset/portolan-registrar", "--patch", back)
	r.awaitPods(t, meshNamespace, registrars, nodes)
	r.awaitHealed(t)
	if now := r.containers(t, r.namespace); !equal(running, now) {
		t.Errorf("containers were %v, are %v after the registrars' return", running, now)
	}
}

// reboot is a namespace with pods of the mesh on both nodes.
type reboot struct {
	*cluster
	namespace string
	// others are the pods, each of a service of its own, that make those of the node so
	// many that nobody believes that all of them are gone, but for the reboot.
	others []string
	// old are the attachments of the node before, by pod.
	old map[string]string
}

// startReboot makes the pods and waits until they serve.
func startReboot(t *testing.T, namespace string) *reboot {
	t.Helper()
	r := &reboot{cluster: scenario(t, namespace), namespace: namespace, others: []string{"one", "two"}}
	r.apply(t, namespace, paymentsApp)
	for _, name := range r.others {
		r.apply(t, namespace, onNode(serverPod(name, "8080"), rebooted))
	}
	r.awaitRest(t)
	r.awaitServices(t)
	var err error
	if r.old, err = r.attached(t.Context()); err != nil || len(r.old) != 2+len(r.others) {
		t.Fatalf("on node%d are attached %v (%v), want a client, a server and %v", rebooted, r.old, err, r.others)
	}
	return r
}

// awaitRest waits until all pods are Ready, and returns the clients and the others.
func (r *reboot) awaitRest(t *testing.T) (callers, servers []corev1.Pod) {
	t.Helper()
	callers, servers = r.awaitPods(t, r.namespace, "app=client", nodes), r.awaitPods(t, r.namespace, "app=payments", 2)
	for _, name := range r.others {
		servers = append(servers, r.awaitPods(t, r.namespace, "app="+name, 1)...)
	}
	return callers, servers
}

// awaitServices waits until both nodes call all pods.
func (r *reboot) awaitServices(t *testing.T) {
	t.Helper()
	r.awaitServing(t, r.namespace, "payments", 2)
	for _, name := range r.others {
		r.awaitServing(t, r.namespace, name, 1)
	}
}

// attached are the node's attachments of the namespace, by pod.
func (r *reboot) attached(ctx context.Context) (map[string]string, error) {
	s, err := r.registrarStatus(ctx, rebooted)
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for _, a := range s.Attachments {
		if a.Namespace == r.namespace {
			all[a.Pod] = a.Attachment
		}
	}
	return all, nil
}

func (r *reboot) cutPower(t *testing.T) {
	t.Helper()
	if err := r.lab.Run(t.Context(), r.lab.Script(), "reboot", fmt.Sprint(rebooted)); err != nil {
		t.Fatal(err)
	}
}

// networkList is the network configuration of the node, which was taken away.
type networkList struct{ path, original string }

// removeList takes the node's network configuration away; the next test has it again.
func (r *reboot) removeList(t *testing.T) networkList {
	t.Helper()
	l := networkList{path: filepath.Join(r.lab.Dir, fmt.Sprintf("node%d/etc/cni/net.d", rebooted), primaryFile)}
	original, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	l.original = string(original)
	if err := os.Remove(l.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := os.Stat(l.path); err != nil {
			l.writePlain(t)
		}
	})
	return l
}

// writePlain writes it as the network plugin does that knows nothing of the mesh.
func (l networkList) writePlain(t *testing.T) {
	t.Helper()
	replaceFile(t, l.path, withoutEntry(t, l.original))
}

// awaitHealed waits until the pods of the node are attached anew and no others are, and
// all pods are called from both nodes by mTLS.
func (r *reboot) awaitHealed(t *testing.T) {
	t.Helper()
	eventually(t, patience, func() string {
		s, err := r.registrarStatus(t.Context(), rebooted)
		if err != nil {
			return err.Error()
		}
		if !s.Ready {
			return "the registrar is not ready: " + s.Missing
		}
		now, err := r.attached(t.Context())
		if err != nil {
			return err.Error()
		}
		again := 0
		for pod, attachment := range now {
			if was, known := r.old[pod]; known && attachment != was {
				again++
			}
		}
		if again != len(r.old) {
			return fmt.Sprintf("%d of %v are attached again", again, r.old)
		}
		return ""
	})
	callers, servers := r.awaitRest(t)
	r.awaitServices(t)
	eventually(t, patience, func() string { return r.ghosts(t.Context(), r.namespace, slices.Concat(callers, servers)) })
	caller := "URI=spiffe://aether.internal/ns/" + r.namespace + "/sa/shop"
	payments := "http://payments." + r.namespace + ".aether.internal"
	for i := range callers {
		tally := r.get(t, &callers[i], "-n", "40", "-keepalive=false", payments+"/", payments+":9090/")
		if n, answers := failed(tally); n != 0 || len(keys(tally.Answers)) != 4 {
			t.Errorf("%s: %v, %v, want both ports of both servers", callers[i].Spec.NodeName, tally.Answers, answers)
		}
		for xfcc, n := range tally.Callers {
			if !strings.Contains(xfcc, caller) {
				t.Errorf("%s: %d requests had the caller %q, want %s", callers[i].Spec.NodeName, n, xfcc, caller)
			}
		}
	}
	checked(t, "node%d came back by itself: %d pods are attached anew and no other is, both servers serve both nodes by mTLS", rebooted, len(r.old))
}
