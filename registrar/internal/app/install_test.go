package app

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

const primaryList = `{
  "cniVersion": "1.0.0",
  "name": "net",
  "plugins": [
    {"type": "bridge"}
  ]
}
`

// A person installs and uninstalls: each says what it did, the exit status says whether
// it is done, and what is left is what was there before.
func TestInstallByHand(t *testing.T) {
	dir, err := os.MkdirTemp("", "hand") //nolint:usetesting // short enough for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	conf, bin, socket := filepath.Join(dir, "net.d"), filepath.Join(dir, "bin"), filepath.Join(dir, "cni.sock")
	list, plugin := filepath.Join(conf, "10-net.conflist"), filepath.Join(dir, "portolan")
	write(t, plugin, "the plugin")
	install := []string{"install", "--cni-conf-dir", conf, "--cni-bin-dir", bin, "--cni-bin-source", plugin, "--cni-socket", socket}
	uninstall := []string{"uninstall", "--cni-conf-dir", conf, "--cni-bin-dir", bin, "--cni-socket", socket, "--netns-dir", filepath.Join(dir, "netns"), "--spool-dir", filepath.Join(dir, "spool"), "--state-dir", filepath.Join(dir, "state")}

	says(t, 1, "install the primary CNI plugin", install...)
	write(t, list, primaryList)
	says(t, 0, list+": the plugin is in the chain", install...)
	out := says(t, 0, socket+": nothing listens there yet", install...)
	if strings.Contains(out, "not as it should be") {
		t.Errorf("%s", out)
	}
	l, err := libcni.NetworkConfFromFile(list)
	if err != nil || len(l.Plugins) != 2 || l.Plugins[1].Network.Type != "portolan" || !strings.Contains(string(l.Plugins[1].Bytes), socket) {
		t.Fatalf("list %+v, %v", l, err)
	}

	server, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	says(t, 1, socket+" and would put the plugin back", uninstall...)
	_ = server.Close()
	says(t, 0, list+": entry removed", uninstall...)
	if got, err := os.ReadFile(list); err != nil || string(got) != primaryList {
		t.Errorf("left %s, %v", got, err)
	}
	if _, err := os.Stat(filepath.Join(bin, "portolan")); err != nil {
		t.Errorf("the binary must stay: %v", err)
	}
	says(t, 0, "no network configuration has the plugin", uninstall...)
	says(t, 0, filepath.Join(bin, "portolan")+": removed", append(uninstall, "--remove-binary")...)
	if left, err := os.ReadDir(bin); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if left, err := os.ReadDir(conf); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}

	write(t, list, `{"plugins":[{"type":"portolan"}`)
	says(t, 1, list, uninstall...)
	says(t, 1, "/nonexistent/net.d", append(uninstall, "--cni-conf-dir", "/nonexistent/net.d")...)
	says(t, 1, "--cni-bin-dir", "install", "--cni-bin-dir", "bin")
	says(t, 1, "portolan.list", "install", "--cni-conf-dir", conf, "--cni-bin-dir", bin, "--cni-conf-name", "portolan.list")
}

// says runs a command and returns its output, which must have the text.
func says(t *testing.T, want int, text string, args ...string) string {
	t.Helper()
	code, out, err := run(args...)
	if code != want || !strings.Contains(out+err, text) {
		t.Errorf("%v: exit status %d, %s%s, want %d and %q", args, code, out, err, want, text)
	}
	return out
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The entry names only what differs from the plugin's own defaults, and the namespace
// of the registrar itself is always bypassed (CNI-4, CNI-D11).
func TestInstallerConfiguration(t *testing.T) {
	tests := []struct {
		name       string
		install    installConfig
		socket     string
		bypass     []string
		wantSocket string
		// wantSource is the binary to install; empty is the one beside this program.
		wantSource string
	}{
		{name: "defaults", install: installConfig{Bypass: defaultBypass()}, socket: defaultCNISocket},
		{
			name: "another namespace", install: installConfig{Bypass: defaultBypass(), DaemonSet: "mesh/registrar", Source: "/x/portolan"}, socket: "/run/x.sock",
			bypass: []string{"kube-system", "mesh", "portolan-system"}, wantSocket: "/run/x.sock", wantSource: "/x/portolan",
		},
		{
			name: "the usual namespace", install: installConfig{Bypass: []string{"kube-system"}, DaemonSet: "portolan-system/r", Source: "/x/portolan"},
			socket: defaultCNISocket, wantSource: "/x/portolan",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.install.complete(nodePaths{CNISocket: tt.socket, SpoolDir: defaultSpoolDir, NetnsDir: defaultNetnsDir})
			if err != nil {
				t.Fatal(err)
			}
			e := got.Entry
			if !slices.Equal(e.BypassNamespaces, tt.bypass) || e.Socket != tt.wantSocket || e.SpoolDir != "" || e.NetnsDir != "" {
				t.Errorf("entry %+v", e)
			}
			if tt.wantSource == "" {
				self, err := os.Executable()
				if err != nil {
					t.Fatal(err)
				}
				tt.wantSource = filepath.Join(filepath.Dir(self), "portolan")
			}
			if got.Source != tt.wantSource {
				t.Errorf("source %s, want %s", got.Source, tt.wantSource)
			}
		})
	}
}

// Flags of the installer that are refused say which, and what they may be.
func TestRefusedInstallFlags(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--cni-conf-dir", "/etc/cni/net.d"}, `--cni-bin-dir "": need an absolute path`},
		{[]string{"--cni-bin-dir", "bin"}, `--cni-conf-dir ""`},
		{[]string{"--daemonset", "portolan-registrar"}, `--daemonset "portolan-registrar": need namespace/name`},
		{[]string{"--bypass-namespaces", "a,B_C"}, `"B_C" is not a DNS label`},
	} {
		says(t, 1, tt.want, append([]string{"run"}, tt.args...)...)
	}
}

// Whose pods never join by the plugin's word are not taken in late either, and their
// accounts get no certificate: all three have one list, with the mesh's own namespace.
func TestBypassIsOneList(t *testing.T) {
	want := []string{"kube-system", "mesh"}
	run := installConfig{Bypass: bypassList{"kube-system"}, DaemonSet: "mesh/registrar"}
	signer := signerConfig{Bypass: bypassList{"kube-system"}, Namespace: "mesh"}
	entry, err := run.complete(nodePaths{})
	if err != nil {
		t.Fatal(err)
	}
	for who, got := range map[string][]string{"plugin": entry.Entry.BypassNamespaces, "registrar": run.bypassed(), "signer": signer.complete().Bypass} {
		if !slices.Equal(got, want) {
			t.Errorf("the %s bypasses %q, want %q", who, got, want)
		}
	}
	says(t, 1, `--bypass-namespaces: "B_C" is not a DNS label`, "signer", "--bypass-namespaces", "a,B_C")
}
