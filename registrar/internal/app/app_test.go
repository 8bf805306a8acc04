package app

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func run(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = Main(args, &out, &err)
	return code, out.String(), err.String()
}

// Every flag that is refused says which, what was given and what it may be, and
// nothing is started.
func TestRefusedFlags(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want []string
	}{
		{"no command's argument", []string{"run", "now"}, []string{"now"}},
		{"unknown command", []string{"start"}, []string{"start"}},
		{"unknown flag", []string{"run", "--vip"}, []string{"--vip"}},
		{"log level", []string{"run", "--log-level", "loud"}, []string{"--log-level", "loud", "debug, info, warn or error"}},
		{"backend", []string{"run", "--registry", "etcd"}, []string{"--registry", "etcd", "embedded or kubernetes"}},
		{"kubernetes outside of a pod", []string{"run", "--registry", "kubernetes"}, []string{"--registry=kubernetes", "--kubeconfig"}},
		{"kubeconfig", []string{"run", "--registry", "kubernetes", "--kubeconfig", "/nonexistent/config"}, []string{"--kubeconfig", "/nonexistent/config"}},
		{"mesh domain", []string{"run", "--mesh-domain", "Aether_Internal"}, []string{"--mesh-domain", "Aether_Internal"}},
		{"flat namespace", []string{"run", "--flat-namespaces", "default,Bad_NS"}, []string{"--flat-namespaces", "Bad_NS"}},
		{"vip range", []string{"run", "--vip-range", "198.18.0.0"}, []string{"--vip-range", "198.18.0.0", "198.18.0.0/15"}},
		{"vip range of the other family", []string{"run", "--vip-range", "fd00::/64"}, []string{"--vip-range", "fd00::/64"}},
		{"vip range6", []string{"run", "--vip-range6", "198.18.0.0/15"}, []string{"--vip-range6", "198.18.0.0/15"}},
		{"relative path", []string{"run", "--state-dir", "state"}, []string{"--state-dir", "state", "absolute"}},
		{"relative socket", []string{"run", "--cni-socket", "cni.sock"}, []string{"--cni-socket", "cni.sock", "absolute"}},
		{"metrics for everybody", []string{"run", "--http-address", "0.0.0.0:15070"}, []string{"--http-address", "0.0.0.0:15070", "loopback"}},
		{"sweep interval", []string{"run", "--sweep-interval", "0s"}, []string{"--sweep-interval", "above 0"}},
		{"certificate life", []string{"run", "--svid-lifetime", "25h"}, []string{"--svid-lifetime", "25h", "24h"}},
		{"drain wait", []string{"run", "--drain-wait", "-1s"}, []string{"--drain-wait", "-1s"}},
		{"unknown names", []string{"run", "--unknown-names", "0"}, []string{"--unknown-names", "at least 1"}},
		{"retention", []string{"run", "--service-retention", "0s"}, []string{"--service-retention", "above 0"}},
		{"vip range too small", []string{"run", "--vip-range", "10.0.0.1/31", "--state-dir", "/nonexistent/state"}, []string{"10.0.0.1/31", "8 to 30"}},
		{"two at once", []string{"run", "--registry", "etcd", "--vip-range", "x"}, []string{"--registry", "--vip-range"}},
		{"bootstrap", []string{"bootstrap", "--mesh-domain", "-"}, []string{"--mesh-domain"}},
		{"bootstrap socket", []string{"bootstrap", "--xds-socket", "/" + strings.Repeat("x", 200)}, []string{"xxx", "107"}},
		{"status output", []string{"status", "-o", "yaml"}, []string{"yaml", "text or json"}},
		{"status without a registrar", []string{"status", "--admin-socket", "/nonexistent/admin.sock"}, []string{"/nonexistent/admin.sock", "registrar run"}},
		{"dns log level", []string{"dns", "--log-level", "loud"}, []string{"--log-level", "loud"}},
		{"install path", []string{"install", "--cni-conf-dir", "/nonexistent/net.d", "--cni-bin-dir", "/nonexistent/bin", "--netns-dir", "netns"}, []string{"--netns-dir", "netns", "absolute"}},
		{"uninstall path", []string{"uninstall", "--cni-conf-dir", "/nonexistent/net.d", "--state-dir", "state"}, []string{"--state-dir", "state", "absolute"}},
		{"uninstall folder", []string{"uninstall", "--cni-conf-dir", "net.d"}, []string{"--cni-conf-dir", "net.d", "absolute"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			code, out, text := run(tt.args...)
			if code != 1 || out != "" {
				t.Errorf("exit status %d, stdout %q, want 1 and nothing", code, out)
			}
			for _, w := range tt.want {
				if !strings.Contains(text, w) {
					t.Errorf("%q does not say %q", text, w)
				}
			}
		})
	}
}

// Each of several errors has a line that says whose it is.
func TestErrorLines(t *testing.T) {
	_, _, text := run("uninstall", "--cni-conf-dir", "net.d", "--state-dir", "state")
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "registrar: --cni-conf-dir") || !strings.HasPrefix(lines[1], "registrar: --state-dir") {
		t.Errorf("it prints %q", lines)
	}
}

// bootstrap prints a configuration that names what it was told, the same each time.
func TestBootstrap(t *testing.T) {
	args := []string{"bootstrap", "--node-name", "node7", "--xds-socket", "/x/xds.sock", "--admin-path", "/x/admin.sock", "--zone", "z1"}
	code, out, text := run(args...)
	if code != 0 || text != "" {
		t.Fatalf("exit status %d: %s", code, text)
	}
	for _, want := range []string{"node7", "/x/xds.sock", "/x/admin.sock", "z1", "DELTA_GRPC"} {
		if !strings.Contains(out, want) {
			t.Errorf("bootstrap lacks %q", want)
		}
	}
	if _, again, _ := run(args...); again != out {
		t.Error("a second run prints something else")
	}
}

// version prints the version and nothing else.
func TestVersion(t *testing.T) {
	if code, out, _ := run("version"); code != 0 || out != Version+"\n" {
		t.Errorf("exit status %d, %q", code, out)
	}
}

// The resolvers for names outside the mesh: from the flag as given, else from the
// host; a host without resolv.conf has none, and that is no error.
func TestResolvers(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver 10.0.0.53\nnameserver fd00::53\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		flag []string
		conf string
		want []string
		bad  string
	}{
		{"host", nil, conf, []string{"10.0.0.53:53", "[fd00::53]:53"}, ""},
		{"no resolv.conf", nil, conf + ".none", nil, ""},
		{"flag wins", []string{"10.1.1.1"}, conf, []string{"10.1.1.1:53"}, ""},
		{"with port", []string{"10.1.1.1:5353", "[fd00::1]:54", "fd00::2", "[fd00::3]"}, conf, []string{"10.1.1.1:5353", "[fd00::1]:54", "[fd00::2]:53", "[fd00::3]:53"}, ""},
		{"name", []string{"dns.example"}, conf, nil, "dns.example"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := resolvers(tt.flag, tt.conf)
			if tt.bad != "" {
				if err == nil || !strings.Contains(err.Error(), tt.bad) {
					t.Errorf("error %v, want one naming %s", err, tt.bad)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var want []netip.AddrPort
			for _, w := range tt.want {
				want = append(want, netip.MustParseAddrPort(w))
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}
