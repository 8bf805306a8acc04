package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// EnvoySocket is where a node's Envoy has its admin interface.
const EnvoySocket = "/run/portolan/envoy/admin.sock"

// File is a path of a node as it is reached from outside: through the node's
// process, without entering its namespaces.
func (l Lab) File(node int, path string) (string, error) {
	pid, err := os.ReadFile(filepath.Join(l.Dir, "pid", fmt.Sprintf("node%d", node)))
	if err != nil {
		return "", err
	}
	return filepath.Join("/proc", strings.TrimSpace(string(pid)), "root", path), nil
}

// Get gets a path from a unix socket of a node.
func (l Lab) Get(ctx context.Context, node int, socket, path string) ([]byte, error) {
	file, err := l.File(node, socket)
	if err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", file)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://node"+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("node%d: %w", node, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("node%d: %s: %s: %s", node, path, resp.Status, body)
	}
	return body, err
}

// Dump writes what is known about the mesh into a folder and names it; by is whose
// folder it is, name what it is about.
func (l Lab) Dump(ctx context.Context, by, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", by+"-"+name+"-")
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: dump: %v\n", by, err)
		return
	}
	save := func(file string, args ...string) {
		out, err := l.Command(ctx, append([]string{l.Script()}, args...)...).CombinedOutput()
		if err != nil {
			out = fmt.Appendf(out, "\n%s: %v\n", strings.Join(args, " "), err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), out, 0o644); err != nil {
			fmt.Fprintf(os.Stderr, "%s: dump: %v\n", by, err)
		}
	}
	save("pods.txt", "kubectl", "get", "pods", "-A", "-o", "wide", "--show-labels")
	save("endpoints.yaml", "kubectl", "get", "serviceendpoints", "-A", "-o", "yaml")
	save("events.txt", "kubectl", "get", "events", "-A", "--sort-by=.lastTimestamp")
	for _, app := range []string{"portolan-registrar", "portolan-dataplane", "portolan-signer"} {
		save(app+".log", "kubectl", "-n", MeshNamespace, "logs", "--selector", "app.kubernetes.io/name="+app,
			"--all-containers", "--prefix", "--timestamps", "--tail=-1")
		save(app+".previous.log", "kubectl", "-n", MeshNamespace, "logs", "--selector", "app.kubernetes.io/name="+app,
			"--all-containers", "--prefix", "--timestamps", "--tail=-1", "--previous")
	}
	for i := 1; i <= l.Nodes; i++ {
		node := strconv.Itoa(i)
		save("status-node"+node+".txt", "node", node, filepath.Join(l.Root, "bin/registrar"), "status")
		for _, path := range []string{"config_dump?include_eds", "clusters", "stats"} {
			file, _, _ := strings.Cut(path, "?")
			save("envoy-node"+node+"-"+file, "node", node, "curl", "-sS", "--unix-socket", EnvoySocket, "http://envoy/"+path)
		}
		save("nft-node"+node+".txt", "node", node, "nft", "list", "ruleset")
	}
	if err := os.CopyFS(filepath.Join(dir, "lab"), os.DirFS(filepath.Join(l.Dir, "log"))); err != nil {
		fmt.Fprintf(os.Stderr, "%s: dump: %v\n", by, err)
	}
	fmt.Fprintf(os.Stderr, "%s: logs, status, configuration and events are in %s\n", by, dir)
}

// Process finds the one process in a node's network that was started with these
// arguments first, such as that of a container with hostNetwork.
func (l Lab) Process(node int, args ...string) (int, error) {
	file, err := l.File(node, "")
	if err != nil {
		return 0, err
	}
	network, err := os.Stat(filepath.Join(filepath.Dir(file), "ns/net"))
	if err != nil {
		return 0, err
	}
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	want := strings.Join(args, "\x00") + "\x00"
	for _, line := range lines {
		got, err := os.ReadFile(line)
		if err != nil || !strings.HasPrefix(string(got), want) {
			continue // ended, or another one
		}
		if in, err := os.Stat(filepath.Join(filepath.Dir(line), "ns/net")); err == nil && os.SameFile(in, network) {
			return strconv.Atoi(filepath.Base(filepath.Dir(line)))
		}
	}
	return 0, fmt.Errorf("node%d runs no %s", node, strings.Join(args, " "))
}
