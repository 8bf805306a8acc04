package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// MeshNamespace is where the manifests install the mesh.
const MeshNamespace = "portolan-system"

// insideEnv tells a program that it runs in the lab's network namespace.
const insideEnv = "PORTOLAN_LAB_INSIDE"

// Lab is the Kubernetes of one folder, as lab.sh runs it.
type Lab struct {
	// Dir is LAB, Root the checkout.
	Dir, Root string
	// Nodes is how many it has; their names are node1, node2 and so on.
	Nodes int
	// Log takes what the commands print.
	Log *os.File
}

// Open says where the lab is: in LAB, or in dir. It need not be up.
func Open(root, dir string, nodes int, log *os.File) (Lab, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return Lab{}, err
	}
	if other := os.Getenv("LAB"); other != "" {
		dir = other
	}
	return Lab{Dir: dir, Root: root, Nodes: nodes, Log: log}, nil
}

// Inside reports that this process is the one that Host has started in the lab.
func Inside() bool { return os.Getenv(insideEnv) != "" }

// Host brings the lab up with the mesh's images, calls begin, runs this program
// again with its arguments in the control plane's network namespace, and takes the
// lab down, however that ends. With keep it leaves the lab up and takes one that is
// up as it is.
func (l Lab) Host(ctx context.Context, keep bool, begin func(context.Context) error) error {
	_, err := os.Stat(filepath.Join(l.Dir, "pid"))
	switch up := err == nil; {
	case up && !keep:
		return fmt.Errorf("a lab is up in %s: take it down (LAB=%[1]s scripts/lab/lab.sh down), set LAB to another folder, or set KEEP=1 to take that one", l.Dir)
	case !up && !errors.Is(err, fs.ErrNotExist):
		return err
	case up:
		err = nil
	default:
		if err = l.up(ctx); err == nil {
			err = begin(ctx)
		}
	}
	if err == nil {
		err = l.inside(ctx)
	}
	if !keep {
		err = errors.Join(err, l.Run(context.WithoutCancel(ctx), l.Script(), "down"))
	}
	return err
}

// up brings the lab up with the images. Each step ends by itself; an interrupt is
// obeyed between them.
func (l Lab) up(ctx context.Context) error {
	for _, step := range [][]string{
		{l.Script(), "up", strconv.Itoa(l.Nodes)},
		{"make", "--no-print-directory", "-C", l.Root, "lab-images"},
	} {
		if err := l.Run(context.WithoutCancel(ctx), step...); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// inside runs this program again in the control plane's network namespace.
func (l Lab) inside(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, l.Script(), append([]string{"wire", program}, os.Args[1:]...)...)
	cmd.Env = append(os.Environ(), "LAB="+l.Dir, insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// A group of its own: a Ctrl-C reaches the program through this process, once.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("in the lab: %w", err)
	}
	return nil
}

// Install applies the manifests and waits until everything is ready.
func (l Lab) Install(ctx context.Context) error {
	if err := l.Run(ctx, l.Script(), "kubectl", "apply", "--server-side", "-k", l.manifests()); err != nil {
		return err
	}
	// portolan-dataplane is updated OnDelete, so it has no rollout to wait for.
	for _, daemons := range []string{"portolan-dataplane", "portolan-registrar"} {
		ready := fmt.Sprintf("--for=jsonpath={.status.numberReady}=%d", l.Nodes)
		if err := l.Run(ctx, l.Script(), "kubectl", "-n", MeshNamespace, "wait", "--timeout=120s", ready, "daemonset/"+daemons); err != nil {
			return err
		}
	}
	return l.Run(ctx, l.Script(), "kubectl", "-n", MeshNamespace, "rollout", "status", "--timeout=120s", "deployment/portolan-signer")
}

// Uninstall deletes what Install applied, and waits until it is gone.
func (l Lab) Uninstall(ctx context.Context) error {
	return l.Run(ctx, l.Script(), "kubectl", "delete", "--wait", "-k", l.manifests())
}

// manifests is the folder of the mesh's manifests for the lab.
func (l Lab) manifests() string { return filepath.Join(l.Root, "scripts/lab/deploy") }

// Script is the path of lab.sh.
func (l Lab) Script() string { return filepath.Join(l.Root, "scripts/lab/lab.sh") }

// Run runs a command with the lab's environment, its output to Log.
func (l Lab) Run(ctx context.Context, args ...string) error {
	cmd := l.Command(ctx, args...)
	cmd.Stdout, cmd.Stderr = l.Log, l.Log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// Command is a command with the lab's environment, out of reach of a Ctrl-C at the
// terminal: what it leaves running belongs to the lab.
func (l Lab) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "LAB="+l.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}
