// Package plugintest runs the real plugin by what the installer installed.
package plugintest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/portolan-mesh/portolan/registrar/internal/installer"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// binEnv tells the stages of the sandbox where the first one put what it built.
const binEnv = "PORTOLAN_TEST_BIN"

// The binaries are built once, outside the sandbox, where go may have to fetch
// modules; the tests run inside, so that pins are gone with it.
func TestMain(m *testing.M) {
	dir, inside := os.LookupEnv(binEnv)
	if !inside {
		var err error
		if dir, err = build(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code := sandbox.Run(m.Run)
	if !inside {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

func build() (string, error) {
	dir, err := os.MkdirTemp("", "portolan-bin")
	if err != nil {
		return "", err
	}
	for _, pkg := range []string{"plugins/portolan", "plugins/portolan/testdata/primary"} {
		cmd := exec.Command("go", "build", "-tags=grpcnotrace", "-o", dir+"/", "./"+pkg)
		cmd.Dir, cmd.Env = filepath.Join("..", "..", "..", ".."), append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
	}
	return dir, os.Setenv(binEnv, dir)
}

const result = `{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.0.0.2/24"}]}`

// node is a node without a registrar, whose primary's list has our entry.
type node struct {
	t    *testing.T
	dir  string
	conf string
	bin  string
	cfg  installer.Config
}

func newNode(t *testing.T, file string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "inst") //nolint:usetesting // short enough for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{t: t, dir: dir, conf: filepath.Join(dir, "net.d"), bin: filepath.Join(dir, "bin")}
	primary := fmt.Sprintf(`"type":"primary","log":%q,"result":%s`, filepath.Join(dir, "primary.log"), result)
	text := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"net",%s}`, primary)
	if strings.HasSuffix(file, ".conflist") {
		text = fmt.Sprintf(`{"cniVersion":"1.0.0","name":"net","plugins":[{%s}]}`, primary)
	}
	if err := errors.Join(os.Mkdir(n.conf, 0o750), os.WriteFile(filepath.Join(n.conf, file), []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	n.cfg = installer.Config{
		ConfDir: n.conf, BinDir: n.bin, Source: filepath.Join(os.Getenv(binEnv), "portolan"), OwnedName: "00-portolan.conflist",
		Entry: installer.Entry{
			Socket: filepath.Join(dir, "cni.sock"), SpoolDir: filepath.Join(dir, "spool"), NetnsDir: filepath.Join(dir, "netns"),
			BypassNamespaces: []string{"kube-system", "mesh-system"},
		},
		Poll: time.Minute, Now: time.Now, Log: slog.New(slog.DiscardHandler),
	}
	i, err := installer.New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if s := i.Install(t.Context()); !s.Chained {
		t.Fatalf("not installed: %+v", s)
	}
	return n
}

// list is what the runtime loads.
func (n *node) list() *libcni.NetworkConfigList {
	n.t.Helper()
	paths, err := libcni.ConfFiles(n.conf, []string{".conf", ".conflist", ".json"})
	if err != nil || len(paths) == 0 {
		n.t.Fatalf("files %v, %v", paths, err)
	}
	l, err := libcni.NetworkConfFromFile(paths[0])
	if err != nil {
		n.t.Fatal(err)
	}
	return l
}

func (n *node) runtime() *libcni.CNIConfig {
	return libcni.NewCNIConfigWithCacheDir([]string{n.bin, os.Getenv(binEnv)}, filepath.Join(n.dir, "cache"), &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}})
}

func pod(netns *netnstest.Namespace, namespace string, annotations map[string]string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: "c1", NetNS: netns.Path, IfName: "eth0",
		Args:           [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", namespace}, {"K8S_POD_NAME", "web-0"}},
		CapabilityArgs: map[string]any{"io.kubernetes.cri.pod-annotations": annotations},
	}
}

// What the installer writes is what the plugin needs, in the primary's own list and in
// an owned one: a pod of the mesh's namespace starts without a registrar (CNI-4), one
// that asks for the mesh waits with a message that says whom to look after (CNI-19),
// and after uninstalling DEL by the old list still succeeds, without a word (CNI-9).
func TestInstalledPlugin(t *testing.T) {
	for _, file := range []string{"10-net.conflist", "10-net.conf"} {
		t.Run(file, func(t *testing.T) {
			n, netns, meshed := newNode(t, file), netnstest.New(t), map[string]string{"endpoint.aether.io/ports": "8080"}
			list := n.list()
			got, err := n.runtime().AddNetworkList(t.Context(), list, pod(netns, "mesh-system", meshed))
			if err != nil {
				t.Fatalf("a pod of the mesh's own namespace: %v", err)
			}
			if text, err := json.Marshal(got); err != nil || !sameJSON(t, text, []byte(result)) {
				t.Errorf("result %s, want the primary's", text)
			}
			_, err = n.runtime().AddNetworkList(t.Context(), list, pod(netns, "shop", meshed))
			var failure *types.Error
			if !errors.As(err, &failure) || failure.Code != types.ErrTryAgainLater {
				t.Fatalf("a pod of the mesh: %v, want code %d", err, types.ErrTryAgainLater)
			}
			for _, want := range []string{n.cfg.Entry.Socket, "DaemonSet portolan-registrar"} {
				if !strings.Contains(failure.Msg, want) {
					t.Errorf("%q does not name %q", failure.Msg, want)
				}
			}
			changes, err := installer.Uninstall(t.Context(), n.conf)
			if err != nil || len(changes) != 1 {
				t.Fatalf("uninstalled %v, %v", changes, err)
			}
			if err := n.runtime().DelNetworkList(t.Context(), list, pod(netns, "shop", meshed)); err != nil {
				t.Errorf("DEL by the list of before: %v", err)
			}
			n.delAlone(list.Plugins[len(list.Plugins)-1].Bytes)
		})
	}
}

// delAlone calls the plugin as a runtime that kept its configuration does.
func (n *node) delAlone(conf []byte) {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), filepath.Join(n.bin, "portolan"))
	cmd.Env = []string{"CNI_COMMAND=DEL", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_NETNS=", "CNI_PATH=" + n.bin}
	cmd.Stdin = bytes.NewReader(bytes.Replace(conf, []byte("{"), []byte(`{"cniVersion":"1.0.0","name":"net",`), 1))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if out, err := cmd.Output(); err != nil || len(out) > 0 {
		n.t.Errorf("DEL alone: %v, standard output %q, standard error %s", err, out, &stderr)
	}
}

func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var va, vb any
	if err := errors.Join(json.Unmarshal(a, &va), json.Unmarshal(b, &vb)); err != nil {
		t.Fatal(err)
	}
	ta, errA := json.Marshal(va)
	tb, errB := json.Marshal(vb)
	return errA == nil && errB == nil && bytes.Equal(ta, tb)
}
