package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

func (n *node) check(rt *libcni.RuntimeConf) error {
	return n.runtime().CheckNetworkList(context.Background(), n.list(), rt)
}

// C18, CNI-57: CHECK finds a missing table, a missing rule and a missing pin
// (code 100), and a registrar that does not know the pod (code 101).
func TestCheck(t *testing.T) {
	notFound := func() cnitest.Behaviour {
		b := meshed()
		b.Check = func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
			return nil, status.Error(codes.NotFound, "c1 on eth0 is not attached")
		}
		return b
	}
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		disturb     func(n *node, pod *nettest.Namespace)
		code        uint
		text        string
	}{
		{"as it should be", joins, func(*node, *nettest.Namespace) {}, 0, ""},
		{"a foreign table", joins, func(n *node, pod *nettest.Namespace) { pod.Exec(n.t, "nft", "add table inet x") }, 0, ""},
		{"flushed", joins, func(n *node, pod *nettest.Namespace) { pod.Exec(n.t, "nft", "flush ruleset") }, 100, "table inet portolan is missing"},
		{"a rule flushed", joins, func(n *node, pod *nettest.Namespace) { pod.Exec(n.t, "nft", "flush chain inet portolan output") }, 100, "rule 1 of chain output"},
		{"an element gone", joins, func(n *node, pod *nettest.Namespace) { pod.Exec(n.t, "nft", "flush set inet portolan tcp_ports4") }, 100, "element 198.18.0.10:5432 of set tcp_ports4 is missing"},
		{"not pinned", joins, func(n *node, _ *nettest.Namespace) {
			if err := pin.Unpin(n.netnsDir, "c1-eth0"); err != nil {
				n.t.Error(err)
			}
		}, 100, "c1-eth0 is missing or leads elsewhere"},
		{"not registered", joins, func(n *node, _ *nettest.Namespace) { n.registrar.Set(notFound()) }, 101, "c1 on eth0 is not attached"},
		{"not registered, opted in by its namespace", plain, func(n *node, _ *nettest.Namespace) { n.registrar.Set(notFound()) }, 101, "is not attached"},
		{"registrar away", joins, func(n *node, _ *nettest.Namespace) { n.registrar.Stop() }, 11, "nothing listens at"},
		{"out of the mesh since", joins, func(n *node, _ *nettest.Namespace) { n.registrar.Set(cnitest.Behaviour{}) }, 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, meshed())
			pod, rt := n.mustAdd("c1", tc.annotations)
			tc.disturb(n, pod)
			err := n.check(rt)
			if tc.code == 0 {
				if err != nil {
					t.Errorf("CHECK = %v", err)
				}
				return
			}
			wantCode(t, err, tc.code, tc.text)
			if tc.code == 100 && strings.Contains(err.Error(), "/proc/self") {
				t.Errorf("the message names a path of the plugin: %v", err)
			}
		})
	}
}

// CHECK leaves alone what ADD let start unmeshed, also without a registrar, and
// finds a pod that asks for the mesh and is not in it.
func TestCheckUnmeshed(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations map[string]string
		up          bool
		fine        bool
	}{
		"says nothing, registrar away": {plain, false, true},
		"unknown, registrar away":      {nil, false, true},
		"says nothing":                 {plain, true, true},
		"stays out":                    {out, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeWithout(t)
			if tc.up {
				n.registrar = cnitest.StartAt(t, n.socket, cnitest.Behaviour{Check: func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
					return nil, status.Error(codes.NotFound, "not attached")
				}})
			}
			_, rt := n.mustAdd("c1", tc.annotations)
			if err := n.check(rt); (err == nil) != tc.fine {
				t.Errorf("CHECK = %v", err)
			}
		})
	}
	n := newNode(t, cnitest.Behaviour{Check: func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
		return nil, status.Error(codes.NotFound, "not attached")
	}})
	stdout, code := n.run(env("CHECK", "c1", nettest.New(t).Path), n.addStdin(joins))
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
	wantDocument(t, stdout, 101, "not attached")
}

// lateCapture is a namespace whose TCP ports the registrar sets after the first
// look at it.
type lateCapture struct {
	netnsCapture
	looks int
	late  func() error
}

func (l *lateCapture) Verify(netns string, cfg capture.Config) error {
	l.looks++
	err := l.netnsCapture.Verify(netns, cfg)
	if l.looks == 1 && l.late != nil {
		err = errors.Join(err, l.late())
	}
	return err
}

// C18: right after a change the TCP ports may still be on their way; ports that
// never come are found all the same.
func TestCheckConverges(t *testing.T) {
	want := decision().GetCapture()
	want.TcpPorts = append(want.TcpPorts, &cniv1.AddressPort{Address: "198.18.0.11", Port: 6379})
	cfg, err := capture.FromProto(want)
	if err != nil {
		t.Fatal(err)
	}
	b := meshed()
	b.Check = func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
		return &cniv1.CheckResponse{Meshed: true, Capture: want}, nil
	}
	n := newNode(t, b)
	pod, _ := n.mustAdd("c1", joins)
	args := &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: pod.Path, StdinData: []byte(n.addStdin(joins))}
	never := &lateCapture{}
	wantCode(t, (&plugin{log: slog.New(slog.DiscardHandler), capture: never, now: time.Now}).check(args), 100, "element 198.18.0.11:6379")
	if never.looks < 2 {
		t.Errorf("looked %d times", never.looks)
	}
	late := &lateCapture{late: func() error { return capture.SetTCPPorts(pod.Path, cfg.TCPPorts) }}
	if err := (&plugin{log: slog.New(slog.DiscardHandler), capture: late, now: time.Now}).check(args); err != nil || late.looks != 2 {
		t.Errorf("CHECK = %v after %d looks, want nil after 2", err, late.looks)
	}
}

// C18, C13: CHECK needs prevResult and the pod's namespace, and prints nothing
// on success (C4).
func TestCheckRefuses(t *testing.T) {
	n := newNode(t, meshed())
	pod, _ := n.mustAdd("c1", joins)
	for _, tc := range []struct {
		name, netns, stdin string
		code               uint
		text               string
	}{
		{"no prevResult", pod.Path, n.stdin(nil), types.ErrInvalidNetworkConfig, "no prevResult"},
		{"no namespace", "/run/netns/gone", n.addStdin(joins), types.ErrInvalidEnvironmentVariables, "is no network namespace"},
		{"own namespace", "/proc/self/ns/net", n.addStdin(joins), types.ErrInvalidNetNS, "own network namespace"},
		{"own field", pod.Path, n.stdin(map[string]any{"prevResult": json.RawMessage(n.result), "socket": "x"}), types.ErrInvalidNetworkConfig, "socket"},
	} {
		stdout, code := n.run(env("CHECK", "c1", tc.netns), tc.stdin)
		if code != 1 {
			t.Errorf("%s: exit code %d", tc.name, code)
		}
		wantDocument(t, stdout, tc.code, tc.text)
	}
	start := time.Now()
	if stdout, code := n.run(env("CHECK", "c1", pod.Path), n.addStdin(joins)); code != 0 || stdout != "" || time.Since(start) > budget {
		t.Errorf("exit code %d, standard output %q", code, stdout)
	}
}
