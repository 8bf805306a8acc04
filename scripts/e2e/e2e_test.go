package e2e

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

// readyTime bounds the time until a port that listens is healthy.
const readyTime = 20 * time.Second

// startNode starts a node that ends with the test; its logs are shown when the
// test has failed.
func startNode(t *testing.T, options node.Options) *node.Node {
	t.Helper()
	if options.Bin == "" {
		options.Bin = binDir(t)
	}
	options.Envoy = os.Getenv("ENVOY")
	options.LogDir = scratch(t)
	n, err := node.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("close the node: %v", err)
		}
		if t.Failed() {
			n.DumpLogs(os.Stderr, 40)
		}
	})
	return n
}

// binDir is the folder of the released programs.
func binDir(t *testing.T) string {
	t.Helper()
	bin, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// scratch is the test's folder. It is not on the machine's disk: it goes with the
// sandbox, however that ends.
func scratch(t *testing.T) string {
	t.Helper()
	dir := filepath.Join("/run/e2e", strings.ReplaceAll(t.Name(), "/", "-"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// binWith is a folder with the released programs, but for one that is built anew
// from its package, for example with the race detector. What was built stays in the
// folder of the released programs under a name that says how: when nothing has changed
// since, it is not linked again, which takes longest.
func binWith(t *testing.T, name, pkg string, flags ...string) string {
	t.Helper()
	dir := filepath.Join(scratch(t), "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	released := binDir(t)
	built := filepath.Join(released, "e2e", name+strings.Join(flags, ""))
	args := append(append([]string{"build", "-o", built}, flags...), pkg)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	entries, err := os.ReadDir(released)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		target := filepath.Join(released, entry.Name())
		if entry.Name() == name {
			target = built
		}
		if err := os.Symlink(target, filepath.Join(dir, entry.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// addPod adds a pod that must be taken.
func addPod(t *testing.T, n *node.Node, spec node.PodSpec) *node.Pod {
	t.Helper()
	p, err := n.AddPod(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// addClient adds a pod that serves nothing. Its service is its name.
func addClient(t *testing.T, n *node.Node, name string) *node.Pod {
	t.Helper()
	return addPod(t, n, node.PodSpec{Name: name, Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
}

// payments is a pod of the service payments with these ports annotated and
// these servers.
func payments(name, ports string, listen ...string) node.PodSpec {
	return node.PodSpec{
		Name: name,
		Annotations: map[string]string{
			"endpoint.aether.io/service": "payments",
			"endpoint.aether.io/ports":   ports,
		},
		Servers: []node.Server{{Container: "app", Listen: listen}},
	}
}

// multiPort is the pod of contract section 2: 8080 (default), 9090 and 5432=tcp.
func multiPort(name string) node.PodSpec {
	return payments(name, "8080,9090=h2,5432=tcp", "http:8080", "h2:9090", "tcp:5432")
}

// waitHealthy waits until so many pods of payments are healthy on the port.
func waitHealthy(t *testing.T, n *node.Node, port uint16, pods int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), readyTime)
	defer cancel()
	if err := n.WaitHealthy(ctx, "default/payments", port, pods); err != nil {
		t.Fatal(err)
	}
}

// waits matches what Envoy counts when something made it wait in vain: for the first answer
// about a resource, for the cluster of a request, for a client that has to speak first.
const waits = `^http\.out_http\.no_cluster$|\.init_fetch_timeout$|^listener\.out_http\.downstream_pre_cx_timeout$`

// waited returns Envoy's counts of waits that are not 0, by name.
func waited(t *testing.T, n *node.Node) map[string]int {
	t.Helper()
	stats, err := n.EnvoyAdmin(t.Context(), "/stats?filter="+url.QueryEscape(waits))
	if err != nil {
		t.Fatal(err)
	}
	if stats == "" {
		t.Fatal("Envoy has none of the statistics")
	}
	counts := map[string]int{}
	for line := range strings.Lines(stats) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), ": ")
		count, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("Envoy's statistic %q: %v", line, err)
		}
		if count != 0 {
			counts[name] = count
		}
	}
	return counts
}

// eventually polls check until it returns "", and fails with what it returned
// last when limit is over. It is for what has no event outside the mesh.
func eventually(t *testing.T, limit time.Duration, check func() string) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		last := check()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %s", limit, last)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
