package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// hungDel never answers a Del.
func hungDel() cnitest.Behaviour {
	b := meshed()
	b.Del = func(ctx context.Context, _ *cniv1.DelRequest) (*cniv1.DelResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return b
}

// CNI-24, CNI-9, I10, MESH-37: whatever CNI_NETNS means by now and whatever the
// registrar does, DEL succeeds in time with nothing on standard output, leaves
// nothing but one note when the registrar could not be told, and can be repeated.
func TestDelBroken(t *testing.T) {
	regular := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(regular, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, netns := range []string{"", "/run/netns/gone", regular} {
		for _, agent := range []string{"up", "down", "hung"} {
			t.Run(fmt.Sprintf("netns %q, registrar %s", netns, agent), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, meshed())
				pod, _ := n.mustAdd("c1", joins)
				pod.Unmount(t)
				switch agent {
				case "down":
					n.registrar.Stop()
				case "hung":
					n.registrar.Set(hungDel())
				}
				for range 2 {
					start := time.Now()
					stdout, code := n.run(env("DEL", "c1", netns), n.stdin(nil))
					if took := time.Since(start); code != 0 || stdout != "" || took > budget {
						t.Errorf("exit code %d, standard output %q, took %v", code, stdout, took)
					}
					n.wantFiles(n.netnsDir)
					if agent == "up" {
						n.wantFiles(n.spoolDir)
						continue
					}
					n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
				}
				if agent == "up" {
					return
				}
				want := &cniv1.DelRequest{Attachment: &cniv1.Attachment{ContainerId: "c1", Ifname: "eth0"}, Network: "net"}
				if d := cmp.Diff(want, n.note(n.spoolDir, "c1-eth0.deleted.json").GetDeleted(), protocmp.Transform()); d != "" {
					t.Errorf("note (-want +got):\n%s", d)
				}
			})
		}
	}
}

// CNI-22: DEL of an old sandbox that comes after ADD of the new one of the same
// pod touches nothing of the new one.
func TestDelStale(t *testing.T) {
	n := newNode(t, meshed())
	_, oldPod := n.mustAdd("c1", joins)
	newer, _ := n.mustAdd("c2", joins)
	before := newer.Exec(t, "nft", "-s", "list", "ruleset")
	if err := n.del(oldPod); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.netnsDir, "c2-eth0", "c2-eth0.attached.json")
	n.wantPinned("c2", newer)
	if got := newer.Exec(t, "nft", "-s", "list", "ruleset"); got != before {
		t.Errorf("rules of the new sandbox changed:\n%s", got)
	}
	dels := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar)
	if len(dels) != 1 || dels[0].GetAttachment().GetContainerId() != "c1" {
		t.Errorf("DEL told the registrar %v", dels)
	}
}

// CNI-D6: CNI_NETNS of a DEL may be another pod's namespace, or the node's, by
// now; only the pin says which one was ours.
func TestDelOtherNetns(t *testing.T) {
	n := newNode(t, meshed())
	pod, _ := n.mustAdd("c1", joins)
	other, _ := n.mustAdd("c2", joins)
	for _, netns := range []string{other.Path, "/proc/self/ns/net"} {
		stdout, code := n.run(env("DEL", "c1", netns), n.stdin(nil))
		if code != 0 || stdout != "" { // CNI-39: code 8 is dropped on DEL
			t.Errorf("%s: exit code %d, standard output %q", netns, code, stdout)
		}
	}
	if !other.HasTable(t, "inet portolan") {
		t.Error("the other pod's capture is gone")
	}
	if pod.HasTable(t, "inet portolan") {
		t.Error("our own capture is still there")
	}
	n.wantFiles(n.netnsDir, "c2-eth0", "c2-eth0.attached.json")
}

// CNI-27: DEL of a container that was never added, five times.
func TestDelUnknown(t *testing.T) {
	n := newNode(t, meshed())
	for range 5 {
		if stdout, code := n.run(env("DEL", "never", ""), n.stdin(nil)); code != 0 || stdout != "" {
			t.Errorf("exit code %d, standard output %q", code, stdout)
		}
	}
	n.wantNothing()
}

// CNI-34, C14, C16, C17: DEL needs no prevResult, no annotations, no arguments
// and no valid field of its own.
func TestDelNeedsLittle(t *testing.T) {
	for name, tc := range map[string]struct {
		more map[string]any
		args string
	}{
		"no prevResult":             {nil, ""},
		"empty prevResult":          {map[string]any{"prevResult": map[string]any{}}, ""},
		"old prevResult":            {map[string]any{"prevResult": map[string]any{"cniVersion": "0.3.1", "ips": []any{}}}, ""},
		"damaged prevResult":        {map[string]any{"prevResult": "x"}, ""},
		"bad fields":                {map[string]any{"timeoutSeconds": "x", "bypassNamespaces": 5, "runtimeConfig": []any{}}, ""},
		"bad arguments":             {nil, "junk"},
		"bypassed since":            {map[string]any{"bypassNamespaces": []string{"shop"}}, "K8S_POD_NAMESPACE=shop"},
		"annotated since":           {map[string]any{"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": out}}, ""},
		"attachments of another GC": {map[string]any{"cni.dev/valid-attachments": 1}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, meshed())
			n.mustAdd("c1", joins)
			e := env("DEL", "c1", "")
			e["CNI_ARGS"] = tc.args
			if stdout, code := n.run(e, n.stdin(tc.more)); code != 0 || stdout != "" {
				t.Errorf("exit code %d, standard output %q", code, stdout)
			}
			n.wantNothing()
			if got := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar); len(got) != 1 {
				t.Errorf("the registrar was told %d times, want once", len(got))
			}
		})
	}
}

// CNI-D11: a pod that is passed through costs nobody a call, on DEL either, and
// leaves no note when the registrar is away.
func TestDelPassedThrough(t *testing.T) {
	n := newNodeWithout(t)
	for _, args := range []string{"K8S_POD_NAMESPACE=kube-system", "K8S_POD_NAMESPACE=portolan-system"} {
		e := env("DEL", "c1", "")
		e["CNI_ARGS"] = args
		if stdout, code := n.run(e, n.stdin(nil)); code != 0 || stdout != "" {
			t.Errorf("exit code %d, standard output %q", code, stdout)
		}
	}
	n.wantNothing()
}

// CNI-D1: when not even a note can be written, DEL succeeds all the same, and the
// attached note stays without its pin: the registrar finds the ghost by it.
func TestDelWithoutSpool(t *testing.T) {
	n := newNode(t, meshed())
	pod, _ := n.mustAdd("c1", joins)
	n.registrar.Stop()
	if err := os.WriteFile(n.spoolDir, nil, 0o600); err != nil { // a file where the folder belongs
		t.Fatal(err)
	}
	stdout, code := n.run(env("DEL", "c1", pod.Path), n.stdin(nil))
	if code != 0 || stdout != "" {
		t.Errorf("exit code %d, standard output %q", code, stdout)
	}
	n.wantFiles(n.netnsDir, "c1-eth0.attached.json")
	if !strings.Contains(n.stderr.String(), "the registrar cannot be told") {
		t.Errorf("standard error says nothing: %s", n.stderr.String())
	}
	if err := os.Remove(n.spoolDir); err != nil {
		t.Fatal(err)
	}
	if _, code := n.run(env("DEL", "c1", ""), n.stdin(nil)); code != 0 {
		t.Errorf("the next DEL: exit code %d", code)
	}
	n.wantFiles(n.netnsDir)
	n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
}

// Whatever the registrar answers, DEL succeeds; an answer that is no success
// leaves a note.
func TestDelRegistrarErrors(t *testing.T) {
	for _, code := range []codes.Code{codes.Internal, codes.PermissionDenied, codes.InvalidArgument, codes.Unavailable, codes.Unimplemented} {
		t.Run(code.String(), func(t *testing.T) {
			b := meshed()
			b.Del = func(context.Context, *cniv1.DelRequest) (*cniv1.DelResponse, error) {
				return nil, status.Error(code, "no")
			}
			n := newNode(t, b)
			_, rt := n.mustAdd("c1", joins)
			if err := n.del(rt); err != nil {
				t.Error(err)
			}
			n.wantFiles(n.netnsDir)
			n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
		})
	}
}

// A capture that the registrar removed is not removed twice; one that it did not know
// of, or could not remove, is.
func TestDelCaptureRemoved(t *testing.T) {
	for _, removed := range []bool{true, false} {
		t.Run(fmt.Sprintf("removed=%v", removed), func(t *testing.T) {
			b := meshed()
			b.Del = func(context.Context, *cniv1.DelRequest) (*cniv1.DelResponse, error) {
				return &cniv1.DelResponse{CaptureRemoved: removed}, nil
			}
			n := newNode(t, b)
			pod, rt := n.mustAdd("c1", joins)
			if err := n.del(rt); err != nil {
				t.Error(err)
			}
			// This registrar says so without doing it: what is left shows who was at work.
			if pod.HasTable(t, "inet portolan") != removed {
				t.Errorf("the table is there: %v", !removed)
			}
			n.wantNothing()
		})
	}
}

// A pod that started unmeshed takes its note with it.
func TestDelRemovesUnmeshedNote(t *testing.T) {
	n := newNodeWithout(t)
	_, rt := n.mustAdd("c1", plain)
	n.wantFiles(n.spoolDir, "c1-eth0.unmeshed.json")
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
}

// CNI-65: after DEL, and after the runtime removed its path, nothing keeps the
// namespace: its interface goes, and the other end with it.
func TestDelReleasesNetns(t *testing.T) {
	n := newNode(t, meshed())
	pod, world := nettest.New(t), nettest.New(t)
	netnstest.Connect(t, "eth0",
		netnstest.End{In: pod.Namespace, Addrs: []string{"10.0.0.2/24"}},
		netnstest.End{In: world.Namespace, Addrs: []string{"10.0.0.1/24"}})
	rt := sandboxOf("c1", pod.Path, joins)
	if _, err := n.add(rt); err != nil {
		t.Fatal(err)
	}
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	links := func() string { return world.Exec(t, "ip", "-o", "link", "show", "type", "veth") }
	if links() == "" {
		t.Fatal("no interface before")
	}
	pod.Unmount(t)
	for deadline := time.Now().Add(10 * time.Second); links() != ""; time.Sleep(20 * time.Millisecond) { // the kernel does it in its own time
		if time.Now().After(deadline) {
			t.Fatalf("the namespace lives on: %s", links())
		}
	}
}

// CNI-48: the plugin is killed at each step of ADD; the DEL that the runtime
// sends leaves nothing, and the plugin before us is deleted.
func TestKilledInAdd(t *testing.T) {
	for _, point := range []string{"noted", "pinned", "decided", "proven", "print"} {
		t.Run(point, func(t *testing.T) {
			n := newNode(t, meshed())
			n.path = bin.failpoints
			pod := nettest.New(t)
			rt := sandboxOf("c1", pod.Path, joins)
			t.Setenv("PORTOLAN_FAILPOINT", point+"=kill")
			if _, err := n.add(rt); err == nil || !strings.Contains(err.Error(), "killed") {
				t.Fatalf("ADD = %v, want a killed plugin", err)
			}
			t.Setenv("PORTOLAN_FAILPOINT", "")
			left := []string{"c1-eth0", "c1-eth0.attached.json"}
			if point == "noted" {
				left = left[1:]
			}
			n.wantFiles(n.netnsDir, left...)
			if err := n.del(rt); err != nil {
				t.Fatal(err)
			}
			n.wantNothing(pod)
			if got := n.primaryLog(); got != "ADD c1\nDEL c1\n" {
				t.Errorf("the plugin before us was asked:\n%s", got)
			}
			if got := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar); len(got) != 1 {
				t.Errorf("the registrar was told %d times, want once", len(got))
			}
		})
	}
}

// A runtime's own timeout kills the plugin while the registrar holds the call
// (libcni ends a context with SIGKILL): the registrar sees it, DEL cleans up.
func TestCancelledInAdd(t *testing.T) {
	held, ended := make(chan struct{}), make(chan struct{})
	b := meshed()
	b.Add = func(ctx context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
		if err := send(decision()); err != nil {
			return err
		}
		close(held)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	}
	n := newNode(t, b)
	pod := nettest.New(t)
	rt := sandboxOf("c1", pod.Path, joins)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-held
		cancel()
	}()
	if _, err := n.runtime().AddNetworkList(ctx, n.list(), rt); err == nil {
		t.Fatal("ADD succeeded")
	}
	<-ended
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	n.wantNothing(pod)
}

// CNI-54, C6: fifty pods at once, each process on its own, and their DELs.
func TestParallelPods(t *testing.T) {
	n := newNode(t, meshed())
	stdin := n.addStdin(joins)
	type result struct {
		out  string
		code int
	}
	pods := make([]*nettest.Namespace, 50)
	for i := range pods {
		pods[i] = nettest.New(t)
	}
	for _, command := range []string{"ADD", "DEL"} {
		results := make(chan result, len(pods))
		for i, pod := range pods {
			go func() {
				own := *n // a buffer of its own for standard error
				out, code := own.run(env(command, fmt.Sprintf("c%d", i), pod.Path), stdin)
				results <- result{out, code}
			}()
		}
		for range pods {
			if r := <-results; r.code != 0 || command == "ADD" && !json.Valid([]byte(r.out)) {
				t.Errorf("%s: exit code %d: %s", command, r.code, r.out)
			}
		}
		if command == "ADD" {
			if got := len(n.files(n.netnsDir)); got != 100 {
				t.Errorf("%d files beside the pins, want 100", got)
			}
		}
	}
	n.wantNothing(pods...)
	if text, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Count(string(text), " "+n.netnsDir+" ") != 1 {
		t.Errorf("the folder of pins is mounted %d times, %v", strings.Count(string(text), " "+n.netnsDir+" "), err)
	}
}

// CNI-67: a held lock of iptables does not matter: no iptables is run.
func TestXtablesLock(t *testing.T) {
	lock, err := os.Create("/run/xtables.lock")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, meshed())
	start := time.Now()
	_, rt := n.mustAdd("c1", joins)
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > budget {
		t.Errorf("took %v", took)
	}
}
