// Package programtest runs the real servers that tests need, on addresses of their
// own. Only tests and the packages that start such a server import it.
package programtest

import (
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// Program is one running program. Its methods but Ended are for the goroutine of the
// test.
type Program struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed after err is set
	err   error
}

// Start starts a program that dies with this one, at the latest when the test
// ends. Its log goes on in the file.
func Start(tb testing.TB, logFile, name string, args ...string) *Program {
	tb.Helper()
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		tb.Fatal(err)
	}
	defer log.Close()                  // the program has its own descriptor
	cmd := exec.Command(name, args...) //nolint:noctx // ends with the test
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &Program{cmd: cmd, ended: make(chan struct{})}
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
		tb.Fatalf("start %s: %v", name, err)
	}
	tb.Cleanup(func() { p.Kill(tb) })
	return p
}

// Kill ends the process and waits for its end.
func (p *Program) Kill(tb testing.TB) {
	tb.Helper()
	p.Signal(tb, syscall.SIGKILL)
	<-p.ended
}

// Signal sends a signal; a process that has ended is no error.
func (p *Program) Signal(tb testing.TB, signal syscall.Signal) {
	tb.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		tb.Fatalf("signal %s: %v", p.cmd.Path, err)
	}
}

// Tail is the last lines of a file.
func Tail(file string, lines int) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Ended is closed when the program has ended; Err then says how.
func (p *Program) Ended() <-chan struct{} { return p.ended }

// Err is how the program ended. It is for the time after Ended.
func (p *Program) Err() error { return p.err }

// Binary returns the path of a program that scripts/lab/build.sh has built: what the
// environment variable says, or bin/lab/NAME. A test without it fails.
func Binary(tb testing.TB, variable, name string) string {
	tb.Helper()
	path := os.Getenv(variable)
	if path == "" {
		path = filepath.Join(moduleRoot(tb), "bin", "lab", name)
	}
	if _, err := os.Stat(path); err != nil {
		tb.Fatalf("no %s to test with: %v: run make test-kubernetes, which builds it, or set %s", name, err, variable)
	}
	return path
}

// moduleRoot is the folder of go.mod at or above the package under test, where go
// test runs its binary.
func moduleRoot(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
		if d == filepath.Dir(d) {
			tb.Fatalf("no go.mod above %s", dir)
		}
	}
}

// FreeAddress draws an address of 127.0.0.0/8 of which nobody uses the ports. A
// port that is drawn for one listener can be taken by somebody's outgoing
// connection before it listens; of a whole address of one's own it cannot.
func FreeAddress(tb testing.TB, ports ...uint16) netip.Addr {
	tb.Helper()
	for range 100 {
		raw := [4]byte{127}
		_, _ = rand.Read(raw[1:]) // never fails
		addr := netip.AddrFrom4(raw)
		if raw[3] != 0 && raw[3] != 255 && isFree(addr, ports) {
			return addr
		}
	}
	tb.Fatal("no free address in 127.0.0.0/8: is lo up?")
	return netip.Addr{}
}

func isFree(addr netip.Addr, ports []uint16) bool {
	for _, port := range ports {
		l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, port)))
		if err != nil {
			return false
		}
		_ = l.Close()
	}
	return true
}
