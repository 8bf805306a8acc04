package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

// budget is what every command must keep to (contract 5), with room for a busy
// machine.
const budget = 5*time.Second + time.Second

// The annotations of the pods in the tests.
var (
	joins = map[string]string{"aether.io/managed": "true"}
	out   = map[string]string{"aether.io/managed": "false"}
	plain = map[string]string{"kubernetes.io/config.source": "api"}
)

// node is one node: a chain of primary and portolan, a runtime, and a registrar.
type node struct {
	t         *testing.T
	registrar *cnitest.Registrar // nil without one

	path     string // of the plugins
	version  string
	conf     map[string]any // of portolan
	result   string         // of primary
	log      string         // of primary
	cache    string
	socket   string
	spoolDir string
	netnsDir string
	stderr   bytes.Buffer
}

// newNode makes a node whose registrar answers with b.
func newNode(t *testing.T, b cnitest.Behaviour) *node {
	t.Helper()
	n := newNodeWithout(t)
	n.registrar = cnitest.StartAt(t, n.socket, b)
	return n
}

// newNodeWithout makes a node without a registrar.
func newNodeWithout(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") //nolint:usetesting // short enough for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	n := &node{
		t: t, path: bin.dir, version: "1.1.0", log: filepath.Join(dir, "primary.log"), cache: filepath.Join(dir, "cache"),
		socket: filepath.Join(dir, "cni.sock"), spoolDir: filepath.Join(dir, "spool"), netnsDir: filepath.Join(dir, "netns"),
		result: `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.0.0.2/24"}],"dns":{"nameservers":["10.96.0.10"]}}`,
	}
	n.conf = map[string]any{
		"type": "portolan", "socket": n.socket, "spoolDir": n.spoolDir, "netnsDir": n.netnsDir,
		"capabilities": map[string]bool{"io.kubernetes.cri.pod-annotations": true},
	}
	t.Cleanup(func() {
		for _, f := range n.files(n.netnsDir) {
			_ = unix.Unmount(filepath.Join(n.netnsDir, f), unix.MNT_DETACH)
		}
		_ = unix.Unmount(n.netnsDir, unix.MNT_DETACH)
		_ = os.RemoveAll(dir)
	})
	return n
}

// list is the conflist.
func (n *node) list() *libcni.NetworkConfigList {
	n.t.Helper()
	text, err := json.Marshal(map[string]any{
		"cniVersion": n.version, "name": "net",
		"plugins": []any{map[string]any{"type": "primary", "log": n.log, "result": json.RawMessage(n.result)}, n.conf},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

func (n *node) runtime() *libcni.CNIConfig {
	return libcni.NewCNIConfigWithCacheDir([]string{n.path}, n.cache, &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &n.stderr}})
}

// sandbox is one pod's sandbox as the runtime describes it.
func sandboxOf(id, netns string, annotations map[string]string) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{
		ContainerID: id, NetNS: netns, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web-0"}, {"K8S_POD_UID", "uid-0"}},
	}
	if annotations != nil {
		rt.CapabilityArgs = map[string]any{"io.kubernetes.cri.pod-annotations": annotations}
	}
	return rt
}

func (n *node) add(rt *libcni.RuntimeConf) (types.Result, error) {
	return n.runtime().AddNetworkList(context.Background(), n.list(), rt)
}

func (n *node) del(rt *libcni.RuntimeConf) error {
	return n.runtime().DelNetworkList(context.Background(), n.list(), rt)
}

// mustAdd adds a pod in a namespace of its own and returns both.
func (n *node) mustAdd(id string, annotations map[string]string) (*nettest.Namespace, *libcni.RuntimeConf) {
	n.t.Helper()
	pod := nettest.New(n.t)
	rt := sandboxOf(id, pod.Path, annotations)
	if _, err := n.add(rt); err != nil {
		n.t.Fatalf("ADD: %v\n%s", err, n.stderr.String())
	}
	return pod, rt
}

// run runs portolan alone, as a runtime does, and returns what it printed and
// its exit code. The environment is exactly env.
func (n *node) run(env map[string]string, stdin string) (stdout string, code int) {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), filepath.Join(n.path, "portolan"))
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &n.stderr
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return out.String(), exit.ExitCode()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return out.String(), 0
}

// env is the environment of a command for one container.
func env(command, id, netns string) map[string]string {
	return map[string]string{
		"CNI_COMMAND": command, "CNI_CONTAINERID": id, "CNI_NETNS": netns, "CNI_IFNAME": "eth0", "CNI_PATH": "/opt/cni/bin",
	}
}

// stdin is portolan's configuration with more fields.
func (n *node) stdin(more map[string]any) string {
	n.t.Helper()
	conf := map[string]any{"cniVersion": n.version, "name": "net"}
	maps.Copy(conf, n.conf)
	maps.Copy(conf, more)
	text, err := json.Marshal(conf)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(text)
}

// addStdin is the configuration of an ADD of a pod with annotations.
func (n *node) addStdin(annotations map[string]string) string {
	more := map[string]any{"prevResult": json.RawMessage(n.result)}
	if annotations != nil {
		more["runtimeConfig"] = map[string]any{"io.kubernetes.cri.pod-annotations": annotations}
	}
	return n.stdin(more)
}

// files lists the names in a folder of ours; none when it is not there.
func (n *node) files(dir string) []string {
	n.t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantFiles compares the names in a folder.
func (n *node) wantFiles(dir string, want ...string) {
	n.t.Helper()
	if got := n.files(dir); fmt.Sprint(got) != fmt.Sprint(append([]string{}, want...)) {
		n.t.Errorf("files in %s = %v, want %v", filepath.Base(dir), got, want)
	}
}

// wantNothing checks that no trace of any pod is left.
func (n *node) wantNothing(pods ...*nettest.Namespace) {
	n.t.Helper()
	n.wantFiles(n.netnsDir)
	n.wantFiles(n.spoolDir)
	for _, p := range pods {
		if p.HasTable(n.t, "inet portolan") {
			n.t.Error("the capture is still there")
		}
	}
}

// primaryLog is what the plugin before us was asked.
func (n *node) primaryLog() string {
	n.t.Helper()
	text, err := os.ReadFile(n.log)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	return string(text)
}

// wantPinned checks that the pod's pin leads to its namespace.
func (n *node) wantPinned(id string, pod *nettest.Namespace) {
	n.t.Helper()
	want, err := pin.Identify(pod.Path)
	if err != nil {
		n.t.Fatal(err)
	}
	if got, err := pin.Identify(filepath.Join(n.netnsDir, id+"-eth0")); err != nil || got != want {
		n.t.Errorf("pin of %s = %v, %v, want %v", id, got, err, want)
	}
}

// note reads one note.
func (n *node) note(dir, name string) *cniv1.Note {
	n.t.Helper()
	note, err := spool.Read(dir, name)
	if err != nil {
		n.t.Fatal(err)
	}
	return note
}

// hung answers nothing on a socket that can be opened.
func (n *node) hang() {
	n.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", n.socket)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = l.Close() })
}

// wantCode checks a CNI error of libcni.
func wantCode(t *testing.T, err error, code uint, text string) {
	t.Helper()
	e, ok := errors.AsType[*types.Error](err)
	if !ok || e.Code != code || !strings.Contains(e.Msg, text) {
		t.Errorf("error = %#v (%v), want code %d with %q", e, err, code, text)
	}
}

// document is the error document on standard output.
type document struct {
	CNIVersion string `json:"cniVersion"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// wantDocument checks that stdout is exactly one error document (I12).
func wantDocument(t *testing.T, stdout string, code uint, text string) {
	t.Helper()
	var doc document
	dec := json.NewDecoder(strings.NewReader(stdout))
	if err := dec.Decode(&doc); err != nil {
		t.Fatalf("standard output %q: %v", stdout, err)
	}
	if dec.More() {
		t.Errorf("more than one document: %s", stdout)
	}
	if doc.Code != code || !strings.Contains(doc.Msg, text) || len(doc.Msg) > 200 {
		t.Errorf("document = %+v, want code %d with %q in 200 bytes", doc, code, text)
	}
}

// meshed answers that every pod is in the mesh, proven at once.
func meshed() cnitest.Behaviour {
	return cnitest.Behaviour{
		Add: func(_ context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
			return send(decision())
		},
		Check: func(context.Context, *cniv1.CheckRequest) (*cniv1.CheckResponse, error) {
			return &cniv1.CheckResponse{Meshed: true, Capture: decision().GetCapture()}, nil
		},
	}
}

// decision is the answer about a pod of the mesh.
func decision() *cniv1.AddResponse {
	return &cniv1.AddResponse{Meshed: true, Reason: "annotations", Capture: &cniv1.Capture{
		VipRanges: []string{"198.18.0.0/15", "fd70:6f72:746f::/64"},
		TcpPorts:  []*cniv1.AddressPort{{Address: "198.18.0.10", Port: 5432}},
		Dns:       true, Ipv6: true,
	}}
}

// fails answers every Add with err.
func fails(err error) cnitest.Behaviour {
	return cnitest.Behaviour{Add: func(context.Context, *cniv1.AddRequest, func(*cniv1.AddResponse) error) error { return err }}
}
