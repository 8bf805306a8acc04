package node

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

// newTestNode is a node without mesh processes, whose chain is bridge and
// plugins.
func newTestNode(t *testing.T, bin string, plugins ...map[string]any) *Node {
	t.Helper()
	root, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	for _, need := range []string{"podserver", "cni/bridge", "cni/host-local"} {
		if _, err := os.Stat(filepath.Join(root, need)); err != nil {
			t.Fatalf("%v: run `make build tools`", err)
		}
		link := filepath.Join(bin, need)
		if err := errors.Join(os.MkdirAll(filepath.Dir(link), 0o755), os.Symlink(filepath.Join(root, need), link)); err != nil {
			t.Fatal(err)
		}
	}
	n := &Node{options: Options{Bin: bin, LogDir: t.TempDir(), CNIVersion: "1.1.0"}}
	n.Registrar, n.DNS, n.Envoy = n.newProcess("run", nil, nil), n.newProcess("dns", nil, nil), n.newProcess("envoy", nil, nil)
	if n.chain, err = newChainOf(n.options, append([]map[string]any{BridgeConf()}, plugins...)...); err != nil {
		t.Fatal(err)
	}
	if n.Outside, err = startOutside(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			n.DumpLogs(os.Stderr, 30)
		}
	})
	return n
}

// A pod is attached by the real chain: it has addresses of both families, a
// resolver of its own, reaches other pods and the world, and its containers
// share its ports. Nothing of it is left after Delete.
func TestPod(t *testing.T) {
	n := newTestNode(t, t.TempDir())
	ctx := t.Context()
	server, err := n.AddPod(ctx, PodSpec{Name: "server", Servers: []Server{
		{Container: "web", Listen: []string{"http:8080"}},
		{Container: "late", Listen: []string{"h2:9090,bind=127.0.0.1", "tcp:5432,delay=1h"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	client, err := n.AddPod(ctx, PodSpec{Name: "client", ResolvConf: "nameserver " + ResolverIP + "\noptions ndots:1\n"})
	if err != nil {
		t.Fatal(err)
	}
	if len(client.Result.IPs) != 2 || !client.IP().Is4() {
		t.Errorf("addresses are %v, want one of each family, IPv4 first", client.Result.IPs)
	}

	tests := []struct {
		name string
		pod  *Pod
		args []string
		want string
	}{
		{name: "to another pod", pod: client, args: []string{"get", "http://" + server.IP().String() + ":8080/"}, want: `"200 server:8080":1`},
		{name: "to another container", pod: server, args: []string{"grpc", "127.0.0.1:9090"}, want: `"pod":"server","container":"late","port":9090`},
		{name: "to a port on loopback of another pod", pod: client, args: []string{"get", "-h2", "http://" + server.IP().String() + ":9090/"}, want: "connection refused"},
		{name: "to a server that is late", pod: server, args: []string{"get", "http://127.0.0.1:5432/"}, want: "connection refused"},
		{name: "to the world by name", pod: client, args: []string{"lookup", OutsideName}, want: `"addresses":["` + WebIP + `"],"ttl":77`},
		{name: "to the world by IPv6 name", pod: client, args: []string{"lookup", "-type", "AAAA", OutsideName}, want: `"addresses":["` + WebIP6 + `"]`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			out, err := tt.pod.Podserver(ctx, tt.args...)
			if err != nil || !strings.Contains(out, tt.want) {
				t.Errorf("podserver %v printed %s (%v), want %s", tt.args, out, err, tt.want)
			}
		})
	}
	if out, err := client.Exec(ctx, "curl", "-sS", "http://"+OutsideName+"/"); err != nil || !strings.Contains(out, `"outside":"`+OutsideName+`"`) {
		t.Errorf("curl printed %s (%v)", out, err)
	}
	if out, err := client.Exec(ctx, "cat", "/etc/resolv.conf"); err != nil || out != client.Spec.ResolvConf {
		t.Errorf("resolv.conf is %q (%v), want %q", out, err, client.Spec.ResolvConf)
	}
	if out, err := client.Exec(ctx, "sh", "-c", "exit 3"); exitStatus(err) != 3 {
		t.Errorf("exec of a failing command: %q, %v; want exit status 3", out, err)
	}

	for _, p := range []*Pod{server, client} {
		if err := p.Delete(ctx); err != nil {
			t.Error(err)
		}
	}
	left, err := names(netnsDir)
	if err != nil || len(left) != 0 {
		t.Errorf("network namespaces left: %v (%v)", left, err)
	}
	if out, err := output(ctx, "ip", "-o", "link", "show", "type", "veth"); err != nil || out != "" {
		t.Errorf("links left: %s (%v)", out, err)
	}
	leases, err := filepath.Glob(filepath.Join(cniStateDir, "networks", NetworkName, "1*"))
	if err != nil || len(leases) != 0 {
		t.Errorf("addresses left: %v (%v)", leases, err)
	}
}

func exitStatus(err error) int {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	return -1
}

// When a plugin of the chain refuses a pod, AddPod returns its CNI error, runs
// DEL and leaves no network namespace: a runtime does the same.
func TestPodRefused(t *testing.T) {
	bin := t.TempDir()
	calls := filepath.Join(bin, "calls")
	refuse := `#!/bin/sh
echo "$CNI_COMMAND $CNI_IFNAME" >> ` + calls + `
cat > ` + bin + `/stdin-$CNI_COMMAND
[ $CNI_COMMAND = ADD ] || { echo a line for people >&2; exit 0; }
echo '{"cniVersion":"1.1.0","code":102,"msg":"no","details":"because"}'
exit 1
`
	if err := os.WriteFile(filepath.Join(bin, "refuse"), []byte(refuse), 0o755); err != nil {
		t.Fatal(err)
	}
	n := newTestNode(t, bin, map[string]any{"type": "refuse", "capabilities": map[string]bool{annotationsCapability: true}})
	_, err := n.AddPod(t.Context(), PodSpec{Name: "bad", Annotations: map[string]string{"a": "b"}})
	if code, text := CNIError(err); code != 102 || text != "no; because" {
		t.Errorf("AddPod: %v, want CNI error 102", err)
	}
	got, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("ADD eth0\nDEL eth0\n", string(got)); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	var logs bytes.Buffer
	if n.DumpLogs(&logs, 10); !strings.Contains(logs.String(), "a line for people") {
		t.Errorf("the plugin's log is not in\n%s", &logs)
	}
	stdin, err := os.ReadFile(filepath.Join(bin, "stdin-ADD"))
	if err != nil || !strings.Contains(string(stdin), `"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"a":"b"}}`) {
		t.Errorf("the plugin read %s (%v), want the annotations", stdin, err)
	}
	left, err := names(netnsDir)
	if err != nil || len(left) != 0 || len(n.Pods()) != 0 {
		t.Errorf("left: %v, %v (%v)", left, n.Pods(), err)
	}
}

// Vanish leaves what a crash leaves: the chain's state is there, the network
// namespace is not, and a DEL afterwards succeeds.
func TestPodVanish(t *testing.T) {
	n := newTestNode(t, t.TempDir())
	p, err := n.AddPod(t.Context(), PodSpec{Name: "crash", Servers: []Server{{Listen: []string{"http:8080"}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Vanish(); err != nil {
		t.Fatal(err)
	}
	if len(n.Pods()) != 0 || p.Servers()[0].Running() {
		t.Error("the pod is still there")
	}
	if err := p.Del(t.Context()); err != nil {
		t.Error(err)
	}
}

// A process can be stopped, killed and started again, and keeps one log; ending
// it twice is no error.
func TestProcess(t *testing.T) {
	n := &Node{options: Options{LogDir: t.TempDir()}}
	p := n.newProcess("p", []string{"sh", "-c", `trap 'echo bye; exit 0' TERM; echo "hi $GREETING"; while :; do sleep 0.01; done`}, []string{"GREETING=you"})
	if p.Running() || p.Pid() != 0 {
		t.Error("runs before it was started")
	}
	for range 2 {
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(); err == nil || !strings.Contains(err.Error(), "runs already") {
			t.Errorf("second start: %v", err)
		}
		awaitLog(t, p, "hi you")
		if err := p.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if err := errors.Join(p.Stop(t.Context()), p.Kill()); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff("hi you\nbye\nhi you\nbye\n", p.Log()); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if got := p.LogTail(2); got != "hi you\nbye" {
		t.Errorf("tail %q", got)
	}
}

// A process that does not obey SIGTERM is killed when the caller's time is over,
// and everything it started with it.
func TestProcessStubborn(t *testing.T) {
	n := &Node{options: Options{LogDir: t.TempDir()}}
	p := n.newProcess("p", []string{"sh", "-c", `trap '' TERM; echo hi; sleep 1000 & wait; wait`}, nil)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	awaitLog(t, p, "hi")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err == nil || !strings.Contains(err.Error(), "did not end by SIGTERM") {
		t.Errorf("stop: %v", err)
	}
	if p.Running() {
		t.Error("still runs")
	}
}

func awaitLog(t *testing.T, p *Process, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := wait(ctx, text, func(context.Context) error {
		if !strings.HasSuffix(strings.TrimSpace(p.Log()), text) {
			return errors.New(p.Log())
		}
		return nil
	}, p); err != nil {
		t.Fatal(err)
	}
}

// A wait ends at once, with the log, when a process that it depends on ends; and
// with the last reason when the time is over.
func TestWait(t *testing.T) {
	n := &Node{options: Options{LogDir: t.TempDir()}}
	p := n.newProcess("p", []string{"sh", "-c", "echo cannot bind; exit 1"}, nil)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	err := wait(t.Context(), "p", func(context.Context) error { return errors.New("not yet") }, p)
	if err == nil || !strings.Contains(err.Error(), "p does not run; its log ends with:\ncannot bind") {
		t.Errorf("wait: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err = wait(ctx, "p", func(context.Context) error { return errors.New("not yet") })
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "wait for p: context deadline exceeded (last: not yet)") {
		t.Errorf("wait: %v", err)
	}
}

// The resolver of the world knows one name, denies all others with an SOA, and
// remembers what it was asked.
func TestOutside(t *testing.T) {
	n := newTestNode(t, t.TempDir())
	if err := os.WriteFile(sandbox.ResolvConf, []byte("nameserver "+ResolverIP+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"udp", "tcp"} {
		out, err := output(t.Context(), n.Binary("podserver"), "lookup", "-network", network, "Ghost.Aether.Internal")
		if err != nil || !strings.Contains(out, `"rcode":"NXDOMAIN","addresses":[],"ttl":77`) {
			t.Errorf("lookup over %s printed %s (%v)", network, out, err)
		}
	}
	if diff := cmp.Diff([]string{"ghost.aether.internal", "ghost.aether.internal"}, n.Outside.Queries()); diff != "" {
		t.Errorf("queries (-want +got):\n%s", diff)
	}
	n.Outside.ForgetQueries()
	if got := n.Outside.Queries(); len(got) != 0 {
		t.Errorf("queries %v after they were forgotten", got)
	}
	for _, host := range []string{WebIP, "[" + WebIP6 + "]"} {
		if body, err := get(t.Context(), http.DefaultClient, "http://"+host+"/"); err != nil || !strings.Contains(body, "outside") {
			t.Errorf("get %s: %q, %v", host, body, err)
		}
	}
}

// A node is refused where it could not work: outside a sandbox, or when
// binaries are missing, which are named with the remedy.
func TestStartRefused(t *testing.T) {
	_, err := Start(t.Context(), Options{Bin: "/nonexistent", LogDir: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/registrar") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("Start: %v", err)
	}
}
