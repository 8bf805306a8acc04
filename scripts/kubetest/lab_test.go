package kubetest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// nodes is how many the lab has; their names are node1 and node2.
const nodes = 2

// insideEnv tells a test binary that it runs in the lab's network namespace.
const insideEnv = "PORTOLAN_KUBETEST_INSIDE"

// lab is the Kubernetes of one folder, as scripts/lab/lab.sh runs it.
type lab struct {
	// dir is LAB, root the checkout.
	dir, root string
}

func TestMain(m *testing.M) {
	if os.Getenv(insideEnv) != "" {
		os.Exit(m.Run())
	}
	l, err := openLab()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubetest:", err)
		os.Exit(1)
	}
	os.Exit(l.host())
}

// openLab says where the lab is; it need not be up.
func openLab() (lab, error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return lab{}, err
	}
	dir := os.Getenv("LAB")
	if dir == "" {
		dir = "/tmp/portolan-e2e"
	}
	return lab{dir: dir, root: root}, nil
}

// host brings the lab up, runs this binary again inside it, takes the lab down and
// returns the exit code.
func (l lab) host() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	keep := os.Getenv("KEEP") != ""
	_, err := os.Stat(filepath.Join(l.dir, "pid"))
	switch up := err == nil; {
	case up && !keep:
		fmt.Fprintf(os.Stderr, "kubetest: a lab is up in %s: take it down (LAB=%[1]s scripts/lab/lab.sh down), set LAB to another folder, or set KEEP=1 to take that one\n", l.dir)
		return 1
	case !up && !errors.Is(err, fs.ErrNotExist):
		fmt.Fprintln(os.Stderr, "kubetest:", err)
		return 1
	case !up:
		err = l.begin(ctx)
	}
	if err == nil {
		err = l.inside(ctx)
	}
	if !keep {
		err = errors.Join(err, l.run(context.WithoutCancel(ctx), os.Stdout, l.script(), "down"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubetest:", err)
		return 1
	}
	return 0
}

// begin brings the lab up and installs the mesh. Each step ends by itself; an
// interrupt is obeyed between them.
func (l lab) begin(ctx context.Context) error {
	begin := time.Now()
	for _, step := range [][]string{
		{l.script(), "up", strconv.Itoa(nodes)},
		{"make", "--no-print-directory", "-C", l.root, "lab-images"},
	} {
		if err := l.run(context.WithoutCancel(ctx), os.Stdout, step...); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if err := l.install(ctx, os.Stdout); err != nil {
		l.dump(ctx, "install")
		return err
	}
	fmt.Fprintf(os.Stdout, "the mesh is up on %d nodes after %v\n", nodes, time.Since(begin).Round(time.Second))
	return nil
}

// install applies the manifests and waits until everything is ready.
func (l lab) install(ctx context.Context, out *os.File) error {
	if err := l.run(ctx, out, l.script(), "kubectl", "apply", "--server-side", "-k", filepath.Join(l.root, "scripts/lab/deploy")); err != nil {
		return err
	}
	// portolan-dataplane is updated OnDelete, so it has no rollout to wait for.
	for _, daemons := range []string{"portolan-dataplane", "portolan-registrar"} {
		ready := fmt.Sprintf("--for=jsonpath={.status.numberReady}=%d", nodes)
		if err := l.run(ctx, out, l.script(), "kubectl", "-n", meshNamespace, "wait", "--timeout=120s", ready, "daemonset/"+daemons); err != nil {
			return err
		}
	}
	return l.run(ctx, out, l.script(), "kubectl", "-n", meshNamespace, "rollout", "status", "--timeout=120s", "deployment/portolan-signer")
}

// inside runs this binary again in the control plane's network namespace.
func (l lab) inside(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, l.script(), append([]string{"wire", program}, os.Args[1:]...)...)
	cmd.Env = append(os.Environ(), "LAB="+l.dir, insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// A group of its own: a Ctrl-C reaches the tests through this process, once.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("tests: %w", err)
	}
	return nil
}

func (l lab) script() string { return filepath.Join(l.root, "scripts/lab/lab.sh") }

// run runs a command with the lab's environment, its output to out.
func (l lab) run(ctx context.Context, out *os.File, args ...string) error {
	cmd := l.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// command is a command with the lab's environment, out of reach of a Ctrl-C at the
// terminal: what it leaves running belongs to the lab.
func (l lab) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "LAB="+l.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// dump writes what is known about the mesh into a folder and names it.
func (l lab) dump(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "kubetest-"+name+"-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubetest: dump:", err)
		return
	}
	save := func(file string, args ...string) {
		out, err := l.command(ctx, append([]string{l.script()}, args...)...).CombinedOutput()
		if err != nil {
			out = fmt.Appendf(out, "\n%s: %v\n", strings.Join(args, " "), err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), out, 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "kubetest: dump:", err)
		}
	}
	save("pods.txt", "kubectl", "get", "pods", "-A", "-o", "wide", "--show-labels")
	save("endpoints.yaml", "kubectl", "get", "serviceendpoints", "-A", "-o", "yaml")
	save("events.txt", "kubectl", "get", "events", "-A", "--sort-by=.lastTimestamp")
	for _, app := range []string{"portolan-registrar", "portolan-dataplane", "portolan-signer"} {
		save(app+".log", "kubectl", "-n", meshNamespace, "logs", "--selector", "app.kubernetes.io/name="+app,
			"--all-containers", "--prefix", "--timestamps", "--tail=-1")
		save(app+".previous.log", "kubectl", "-n", meshNamespace, "logs", "--selector", "app.kubernetes.io/name="+app,
			"--all-containers", "--prefix", "--timestamps", "--tail=-1", "--previous")
	}
	for i := 1; i <= nodes; i++ {
		node := strconv.Itoa(i)
		save("status-node"+node+".txt", "node", node, filepath.Join(l.root, "bin/registrar"), "status")
		for _, path := range []string{"config_dump?include_eds", "clusters", "stats"} {
			file, _, _ := strings.Cut(path, "?")
			save("envoy-node"+node+"-"+file, "node", node, "curl", "-sS", "--unix-socket", envoySocket, "http://envoy/"+path)
		}
		save("nft-node"+node+".txt", "node", node, "nft", "list", "ruleset")
	}
	if err := os.CopyFS(filepath.Join(dir, "lab"), os.DirFS(filepath.Join(l.dir, "log"))); err != nil {
		fmt.Fprintln(os.Stderr, "kubetest: dump:", err)
	}
	fmt.Fprintln(os.Stderr, "kubetest: logs, status, configuration and events are in", dir)
}
