package e2e

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/node"
)

const primaryList = `{"cniVersion":"1.1.0","name":"net","plugins":[{"type":"bridge"}]}
`

// The registrar installs the plugin and keeps it installed; its readiness names the file
// when the runtime would not call the plugin. Its end and restart leave everything in
// place, since nobody said that the mesh is removed (CNI-1, CNI-3, CNI-13, CNI-16). A
// person can uninstall once it is stopped.
func TestInstall(t *testing.T) {
	dir := t.TempDir()
	conf, bin := filepath.Join(dir, "net.d"), filepath.Join(dir, "cni-bin")
	list, plugin := filepath.Join(conf, "10-net.conflist"), filepath.Join(bin, "portolan")
	writeFile(t, list, primaryList)
	n := startNode(t, node.Options{RegistrarFlags: []string{"--cni-conf-dir", conf, "--cni-bin-dir", bin}})
	chained := func() bool { return strings.Contains(readFile(t, list), `{"type":"portolan"`) }
	if !chained() {
		t.Fatalf("the registrar is ready, and the list is %s", readFile(t, list))
	}
	if readFile(t, plugin) != readFile(t, n.Binary("portolan")) {
		t.Error("the plugin that is installed is not the one beside the registrar")
	}
	if value, err := n.Metric(t.Context(), "portolan_cni_chained"); err != nil || value != "1" {
		t.Errorf("portolan_cni_chained is %q, %v", value, err)
	}

	writeFile(t, list, primaryList)
	if err := os.Remove(plugin); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyTime, func() string {
		if _, err := os.Stat(plugin); err != nil || !chained() {
			return "no repair: " + readFile(t, list)
		}
		return ""
	})

	bad := filepath.Join(conf, "00-bad.conf")
	writeFile(t, bad, "")
	eventually(t, readyTime, func() string {
		if code, text := readyz(t); code != http.StatusServiceUnavailable || !strings.Contains(text, bad) {
			return "readiness says " + text
		}
		return ""
	})
	if err := os.Remove(bad); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyTime, func() string {
		if code, text := readyz(t); code != http.StatusOK {
			return text
		}
		return ""
	})

	uninstall := func(more ...string) (string, error) {
		args := append([]string{"uninstall", "--cni-conf-dir", conf, "--cni-bin-dir", bin}, more...)
		out, err := exec.CommandContext(t.Context(), n.Binary("registrar"), args...).CombinedOutput()
		return string(out), err
	}
	if out, err := uninstall(); err == nil || !strings.Contains(out, "stop it first") {
		t.Errorf("uninstalled under a registrar: %s, %v", out, err)
	}
	if err := n.Registrar.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !chained() {
		t.Error("the plugin left the chain with the registrar")
	}
	if out, err := uninstall(); err != nil || readFile(t, list) != primaryList {
		t.Errorf("uninstall: %s, %v, list %s", out, err, readFile(t, list))
	}
	if _, err := os.Stat(plugin); err != nil {
		t.Errorf("the binary must stay for DEL: %v", err)
	}
	gone := func(path string) {
		t.Helper()
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	gone("/run/portolan/netns")
	gone("/run/portolan/spool")
	const ca = "/var/lib/portolan/ca/ca.pem"
	if _, err := os.Stat(ca); err != nil {
		t.Errorf("the machine's own CA must stay: %v", err)
	}
	if out, err := uninstall("--remove-ca"); err != nil {
		t.Errorf("uninstall with the CA: %s, %v", out, err)
	}
	gone(ca)
}

// readyz asks the registrar whether it is ready.
func readyz(t *testing.T) (code int, text string) {
	t.Helper()
	resp, err := http.Get("http://127.0.0.1:15070/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
