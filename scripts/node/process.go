package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is one program of the node or of a pod. It may be started again after
// it ended; its log goes on in the same file. Safe for concurrent use.
type Process struct {
	// Name is also the name of the log file.
	Name string
	// LogPath is where standard output and standard error go.
	LogPath string

	argv []string
	env  []string // nil: the harness's own

	mu  sync.Mutex
	run *processRun // guarded by mu; the latest one, nil before the first start
}

// processRun is one life of a process.
type processRun struct {
	cmd  *exec.Cmd
	done chan struct{} // closed after err is set
	err  error
}

// Start starts the program. It is an error when it runs already.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run != nil && !p.run.ended() {
		return fmt.Errorf("start %s: it runs already", p.Name)
	}
	log, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", p.Name, err)
	}
	defer log.Close()                             // the program has its own descriptor
	cmd := exec.Command(p.argv[0], p.argv[1:]...) //nolint:noctx // lives until Stop or Kill
	cmd.Env = p.env
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	run := &processRun{cmd: cmd, done: make(chan struct{})}
	p.run = run
	go func() {
		run.err = cmd.Wait()
		close(run.done)
	}()
	return nil
}

func (r *processRun) ended() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// current is the latest life, nil before the first.
func (p *Process) current() *processRun {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// Running reports whether the program runs.
func (p *Process) Running() bool {
	run := p.current()
	return run != nil && !run.ended()
}

// Pid is the process ID inside the sandbox, 0 when the program does not run.
func (p *Process) Pid() int {
	if run := p.current(); run != nil && !run.ended() {
		return run.cmd.Process.Pid
	}
	return 0
}

// Signal sends a signal to the program. A program that has ended is no error.
func (p *Process) Signal(signal syscall.Signal) error { return p.kill(p.Pid(), signal) }

func (p *Process) kill(pid int, signal syscall.Signal) error {
	if pid == 0 {
		return nil
	}
	if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	return nil
}

// Stop ends the program by SIGTERM and waits for its end; when ctx ends first,
// by SIGKILL, which is an error. A program that does not run is no error.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	run := p.current()
	if run == nil {
		return nil
	}
	select {
	case <-run.done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("stop %s: it did not end by SIGTERM: %w", p.Name, ctx.Err()), p.Kill())
	}
}

// Kill ends the program and everything it started by SIGKILL and waits for its end.
func (p *Process) Kill() error {
	if err := p.kill(-p.Pid(), syscall.SIGKILL); err != nil {
		return err
	}
	if run := p.current(); run != nil {
		<-run.done
	}
	return nil
}

// Log is all that the program has written.
func (p *Process) Log() string {
	content, err := os.ReadFile(p.LogPath)
	if err != nil {
		return err.Error()
	}
	return string(content)
}

// LogTail is the last lines that the program has written.
func (p *Process) LogTail(lines int) string {
	all := strings.Split(strings.TrimRight(p.Log(), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// pollInterval is how often a condition without an event is looked at.
const pollInterval = 20 * time.Millisecond

// wait polls check until it succeeds. It gives up when ctx ends, with check's
// last error, and at once when one of the processes that it depends on ends.
func wait(ctx context.Context, what string, check func(context.Context) error, needs ...*Process) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		for _, p := range needs {
			if run := p.current(); run == nil || run.ended() {
				return fmt.Errorf("wait for %s: %s does not run; its log ends with:\n%s", what, p.Name, p.LogTail(20))
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w (last: %w)", what, context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// output runs a program to its end and returns its standard output; the error
// has the program's name, exit status and standard error.
func output(ctx context.Context, argv ...string) (string, error) {
	stdout, stderr, err := capture(ctx, nil, argv)
	if err != nil {
		return stdout, fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, stderr)
	}
	return stdout, nil
}

// capture runs a program to its end; env nil is the harness's own environment.
func capture(ctx context.Context, env, argv []string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = env
	// A grandchild that holds the pipes must not hold the caller.
	cmd.WaitDelay = 10 * time.Second // a program that was forked beside it may hold them for a moment, too
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.String(), strings.TrimSpace(errOut.String()), err
}
