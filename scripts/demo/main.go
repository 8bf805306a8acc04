package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// logDir is the sandbox's: it goes with it.
const logDir = "/run/demo"

// cleanUpTime bounds the deletion of what the demo made, in order. The kernel
// removes what is left then.
const cleanUpTime = 20 * time.Second

func main() {
	os.Exit(sandbox.RunForCaller(inside))
}

func inside() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	bin := flag.String("bin", "bin", "folder with the binaries that make builds")
	envoy := flag.String("envoy", "", "another Envoy, 1.40 or later (default: the one in -bin)")
	keep := flag.Bool("keep", false, "stay until Ctrl-C")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: %q: it takes no arguments\n", flag.Args())
		return 2
	}
	err := run(ctx, os.Stdout, settings{bin: *bin, envoy: *envoy, keep: *keep})
	switch {
	case err == nil:
		return 0
	case interrupted(ctx, err):
		fmt.Fprintln(os.Stderr, "demo: interrupted; everything it made is gone")
		return 130
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
}

// interrupted reports whether err only says that the user ended the demo.
func interrupted(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() != nil && !errors.Is(err, errFailed)
}

type settings struct {
	bin, envoy string
	keep       bool
}

// errFailed is returned when a check failed; the report has said which.
var errFailed = errors.New("something is not as it should be")

// run makes the node and the pods, checks and cleans up.
func run(ctx context.Context, out io.Writer, s settings) error {
	bin, err := filepath.Abs(s.bin)
	if err != nil {
		return fmt.Errorf("find %s: %w", s.bin, err)
	}
	if err := os.Mkdir(logDir, 0o755); err != nil {
		return fmt.Errorf("make the folder for logs: %w", err)
	}
	begin := time.Now()
	n, err := node.Start(ctx, node.Options{Bin: bin, Envoy: s.envoy, LogDir: logDir})
	if interrupted(ctx, err) {
		return err
	}
	if err != nil {
		return copyLogs(logDir, err)
	}
	fmt.Fprintf(out, "a node with its registrar, mesh DNS and Envoy: %s\n", since(begin))

	r := &report{out: out}
	err = show(ctx, n, r, s.keep)
	cleanUp, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	if closeErr := n.Close(cleanUp); closeErr != nil {
		err = errors.Join(err, fmt.Errorf("clean up: %w", closeErr))
	}
	if interrupted(ctx, err) {
		return err
	}
	if err != nil {
		err = copyLogs(logDir, err)
	}
	// The last line; with keep it was shown before the wait.
	if r.passed+r.failed > 0 && !s.keep {
		r.total()
	}
	return err
}

// show makes the pods, checks and, when they are to be kept, waits for Ctrl-C.
func show(ctx context.Context, n *node.Node, r *report, keep bool) error {
	begin := time.Now()
	sc, err := newScene(ctx, n)
	if err != nil {
		return err
	}
	fmt.Fprintf(r.out, "three pods by libcni, bridge and portolan, every port ready: %s\n\n", since(begin))
	r.head()
	for _, c := range sc.checks() {
		r.run(ctx, c)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if keep {
		r.total()
		if err := sc.restore(ctx); err != nil {
			return err
		}
		lookAround(r.out, sc)
		<-ctx.Done()
		fmt.Fprintln(r.out, "everything it made is gone in a moment")
	}
	if r.failed > 0 {
		return errFailed
	}
	return nil
}

// copyLogs copies the logs, if there are any, out of the sandbox's memory and
// adds to err where they are.
func copyLogs(from string, err error) error {
	if logs, readErr := os.ReadDir(from); readErr != nil || len(logs) == 0 {
		return errors.Join(err, readErr)
	}
	dir, mkErr := os.MkdirTemp("", "portolan-demo-")
	if mkErr != nil {
		return errors.Join(err, mkErr)
	}
	if cpErr := os.CopyFS(dir, os.DirFS(from)); cpErr != nil {
		return errors.Join(err, cpErr)
	}
	return fmt.Errorf("%w; the logs are in %s", err, dir)
}

func since(t time.Time) time.Duration { return time.Since(t).Round(10 * time.Millisecond) }
