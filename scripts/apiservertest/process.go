package apiservertest

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// process is one running program.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed after err is set
	err   error
}

// start starts a program that dies with this one, at the latest when the test
// ends. Its log goes on in the file.
func start(tb testing.TB, logFile, name string, args ...string) *process {
	tb.Helper()
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		tb.Fatal(err)
	}
	defer log.Close()                  // the program has its own descriptor
	cmd := exec.Command(name, args...) //nolint:noctx // ends with the test
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &process{cmd: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The parent-death signal follows the thread that forked, so this thread
		// does nothing else until the program has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		tb.Fatalf("start %s: %v", args[0], err)
	}
	tb.Cleanup(func() { p.kill(tb) })
	return p
}

// kill ends the process and waits for its end.
func (p *process) kill(tb testing.TB) {
	tb.Helper()
	p.signal(tb, syscall.SIGKILL)
	<-p.ended
}

// signal sends a signal; a process that has ended is no error.
func (p *process) signal(tb testing.TB, signal syscall.Signal) {
	tb.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		tb.Fatalf("signal %s: %v", p.cmd.Path, err)
	}
}

// tail is the last lines of a file.
func tail(file string, lines int) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
