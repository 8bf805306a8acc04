package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// anywhere is the environment of a command that is about no container (CNI-32).
func anywhere(command string) map[string]string {
	return map[string]string{"CNI_COMMAND": command, "CNI_PATH": "/opt/cni/bin"}
}

func keys(ids ...string) []map[string]string {
	list := []map[string]string{}
	for _, id := range ids {
		list = append(list, map[string]string{"containerID": id, "ifname": "eth0"})
	}
	return list
}

// CNI-30: with c1 alive and c2 whose namespace the runtime removed, GC does
// nothing without a list, whatever its form, and removes c2 alone with one,
// whatever its key. It tells the registrar exactly the list.
func TestGC(t *testing.T) {
	const key, oldKey = "cni.dev/valid-attachments", "cni.dev/attachments"
	for _, tc := range []struct {
		name  string
		more  map[string]any
		told  bool
		valid int
	}{
		{"no key", nil, false, 0},
		{"null", map[string]any{key: nil}, false, 0},
		{"empty", map[string]any{key: keys()}, true, 0},
		{"c1", map[string]any{key: keys("c1")}, true, 1},
		{"c1, old key", map[string]any{oldKey: keys("c1")}, true, 1},
		{"c1, both keys", map[string]any{key: keys("c1"), oldKey: keys("c1")}, true, 1},
		{"c1 and c2", map[string]any{key: keys("c1", "c2")}, true, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, meshed())
			n.mustAdd("c1", joins)
			gone, _ := n.mustAdd("c2", joins)
			gone.Unmount(t)
			stdout, code := n.run(anywhere("GC"), n.stdin(tc.more))
			if code != 0 || stdout != "" {
				t.Errorf("exit code %d, standard output %q", code, stdout)
			}
			want := []string{"c1-eth0", "c1-eth0.attached.json"}
			if !tc.told || tc.valid == 2 {
				want = append(want, "c2-eth0", "c2-eth0.attached.json")
			}
			n.wantFiles(n.netnsDir, want...)
			n.wantFiles(n.spoolDir)
			got := cnitest.RequestsOf[*cniv1.GCRequest](n.registrar)
			if (len(got) == 1) != tc.told || tc.told && (len(got[0].GetValid()) != tc.valid || got[0].GetNetwork() != "net") {
				t.Errorf("the registrar was told %v", got)
			}
		})
	}
}

// C19: GC touches only its own network, and of that only what the runtime has
// forgotten: an attachment whose namespace is there, or whose runtime path leads
// to it, stays although no list names it.
func TestGCScope(t *testing.T) {
	n := newNode(t, meshed())
	gone, _ := n.mustAdd("c1", joins)
	gone.Unmount(t)
	reused, _ := n.mustAdd("c2", joins) // the runtime's path leads to another namespace
	reused.Unmount(t)
	other := nettest.New(t)
	if err := os.Symlink(other.Path, reused.Path); err != nil {
		t.Fatal(err)
	}
	stdin := n.stdin(map[string]any{"name": "another", "cni.dev/valid-attachments": keys()})
	if _, code := n.run(anywhere("GC"), stdin); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.wantFiles(n.netnsDir, "c1-eth0", "c1-eth0.attached.json", "c2-eth0", "c2-eth0.attached.json")
	if _, code := n.run(anywhere("GC"), n.stdin(map[string]any{"cni.dev/valid-attachments": keys()})); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.wantFiles(n.netnsDir)
}

// Notes of pods that started unmeshed go with their namespaces too.
func TestGCUnmeshedNotes(t *testing.T) {
	n := newNodeWithout(t)
	n.mustAdd("c1", plain)
	gone, _ := n.mustAdd("c2", plain)
	gone.Unmount(t)
	n.registrar = cnitest.StartAt(t, n.socket, meshed())
	if _, code := n.run(anywhere("GC"), n.stdin(map[string]any{"cni.dev/valid-attachments": keys()})); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.wantFiles(n.spoolDir, "c1-eth0.unmeshed.json")
}

// C19: GC goes on after an error and reports it at the end; what the registrar
// could not be told is left as notes. A bad list removes nothing.
func TestGCErrors(t *testing.T) {
	b := meshed()
	b.GC = func(context.Context, *cniv1.GCRequest) (*cniv1.GCResponse, error) {
		return nil, status.Error(codes.Unavailable, "not synced yet")
	}
	n := newNode(t, b)
	gone, _ := n.mustAdd("c1", joins)
	gone.Unmount(t)
	for _, bad := range []any{map[string]any{}, "x", keys("../c1"), keys("c1", "")} {
		stdout, code := n.run(anywhere("GC"), n.stdin(map[string]any{"cni.dev/valid-attachments": bad}))
		if code != 1 {
			t.Errorf("%v: exit code %d", bad, code)
		}
		wantDocument(t, stdout, 7, "attachments")
	}
	n.wantFiles(n.netnsDir, "c1-eth0", "c1-eth0.attached.json")
	stdout, code := n.run(anywhere("GC"), n.stdin(map[string]any{"cni.dev/valid-attachments": keys()}))
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
	wantDocument(t, stdout, 11, "not synced yet")
	n.wantFiles(n.netnsDir)
	n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
}

// C20, through libcni: it deletes what it has cached beyond the list, and then
// sends the list under both keys.
func TestGCThroughLibcni(t *testing.T) {
	n := newNode(t, meshed())
	n.mustAdd("c1", joins)
	_, _ = n.mustAdd("c2", joins)
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "c1", IfName: "eth0"}}}
	if err := n.runtime().GCNetworkList(t.Context(), n.list(), args); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.netnsDir, "c1-eth0", "c1-eth0.attached.json")
	if got := cnitest.RequestsOf[*cniv1.GCRequest](n.registrar); len(got) != 1 || len(got[0].GetValid()) != 1 {
		t.Errorf("the registrar was told %v", got)
	}
}

// CNI-32, C21, C22: STATUS and VERSION, like GC, need no container; STATUS says
// what the registrar says, in time, and prints nothing when that is good.
func TestStatus(t *testing.T) {
	answer := func(r *cniv1.StatusResponse, err error) func(*node) {
		return func(n *node) {
			n.registrar = cnitest.StartAt(n.t, n.socket, cnitest.Behaviour{Status: func(context.Context) (*cniv1.StatusResponse, error) { return r, err }})
		}
	}
	hungStatus := func(n *node) {
		n.registrar = cnitest.StartAt(n.t, n.socket, cnitest.Behaviour{Status: func(ctx context.Context) (*cniv1.StatusResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}})
	}
	for _, tc := range []struct {
		name    string
		prepare func(*node)
		code    uint
		text    string
	}{
		{"ready", answer(&cniv1.StatusResponse{Ready: true}, nil), 0, ""},
		{"not ready", answer(&cniv1.StatusResponse{Reason: "kernel lacks nft redirect"}, nil), 50, "registrar is not ready: kernel lacks nft redirect"},
		{"running pods affected", answer(&cniv1.StatusResponse{Reason: "Envoy is away", Limited: true}, nil), 51, "running pods are affected: Envoy is away"},
		{"error", answer(nil, status.Error(codes.Internal, "x")), 50, " failed: check the log"},
		{"away", func(*node) {}, 50, "nothing listens at"},
		{"hung call (CNI-33)", hungStatus, 50, "did not answer in time"},
		{"hung socket (CNI-33)", func(n *node) { n.hang() }, 50, "did not answer in time"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNodeWithout(t)
			tc.prepare(n)
			if stdout, code := n.run(anywhere("STATUS"), n.stdin(nil)); code != 0 || stdout != "" {
				t.Errorf("without reportStatus (CNI-D12): exit code %d, standard output %q", code, stdout)
			}
			n.conf["reportStatus"] = true
			start := time.Now()
			stdout, code := n.run(anywhere("STATUS"), n.stdin(nil))
			if took := time.Since(start); took > 2*time.Second {
				t.Errorf("took %v", took)
			}
			n.wantNothing()
			if tc.code == 0 {
				if code != 0 || stdout != "" {
					t.Errorf("exit code %d, standard output %q", code, stdout)
				}
				return
			}
			wantDocument(t, stdout, tc.code, tc.text)
			err := n.runtime().GetStatusNetworkList(t.Context(), n.list())
			if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != tc.code {
				t.Errorf("libcni: %v", err)
			}
		})
	}
}

// CNI-21: a socket that may not be reached is named with its path, the kernel's
// word and what to look at.
func TestStatusPermission(t *testing.T) {
	n := newNode(t, meshed())
	cmd := exec.CommandContext(t.Context(), filepath.Join(n.path, "portolan"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	cmd.Env = []string{"CNI_COMMAND=STATUS", "CNI_PATH=/opt/cni/bin"}
	cmd.Stdin = strings.NewReader(n.stdin(map[string]any{"reportStatus": true}))
	stdout, err := cmd.Output()
	if _, ok := errors.AsType[*exec.ExitError](err); !ok {
		t.Fatalf("%v: %s", err, stdout)
	}
	wantDocument(t, string(stdout), 50, "registrar socket "+n.socket+": permission denied: run the plugin as root and check SELinux or AppArmor labels")
}

// C22: GC and STATUS exist from 1.1.0 on, CHECK from 0.4.0 on.
func TestCommandsByVersion(t *testing.T) {
	n := newNode(t, meshed())
	pod := nettest.New(t)
	for _, tc := range []struct{ command, version string }{{"GC", "1.0.0"}, {"STATUS", "1.0.0"}, {"CHECK", "0.3.1"}} {
		n.version = tc.version
		e := env(tc.command, "c1", pod.Path)
		stdout, code := n.run(e, n.addStdin(joins))
		if code != 1 {
			t.Errorf("%s at %s: exit code %d", tc.command, tc.version, code)
		}
		wantDocument(t, stdout, 1, "config version does not allow "+tc.command)
	}
	for _, command := range []string{"GC", "STATUS"} { // CNI-32
		n.version = "1.1.0"
		if stdout, code := n.run(anywhere(command), n.stdin(nil)); code != 0 || stdout != "" {
			t.Errorf("%s: exit code %d, standard output %q", command, code, stdout)
		}
	}
	stdout, code := n.run(map[string]string{"CNI_COMMAND": "VERSION"}, "")
	if code != 0 || !strings.Contains(stdout, `"supportedVersions":["0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]`) {
		t.Errorf("VERSION: exit code %d, %s", code, stdout)
	}
}
