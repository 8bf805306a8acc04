package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Hostname is the host name inside a sandbox.
const Hostname = "portolan-node"

// stageEnv tells a re-executed binary which stage it is. It is removed from the
// environment inside, so that a program started there can make a sandbox again.
const stageEnv = "PORTOLAN_SANDBOX_STAGE"

// initPIDEnv carries InitPID from the outer stage to the inside one.
const initPIDEnv = "PORTOLAN_SANDBOX_INIT_PID"

const (
	stageInit   = "init"
	stageInside = "inside"
)

// exitSetup is the exit code when the sandbox itself could not be made.
const exitSetup = 125

// RunForCaller is Run for a command that make waits for: whatever becomes of the
// caller, the command ends, too, and nothing stays.
func RunForCaller(inside func() int) int {
	if host, err := os.Hostname(); err == nil && host != Hostname {
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0); err != nil {
			fmt.Fprintln(os.Stderr, "sandbox: end with the caller:", err)
		}
	}
	return Run(inside)
}

// Run calls inside in a sandbox, in a process of its own, and returns the exit
// code for the calling process: what inside returned, 128 plus the signal that
// ended it, or 125, with a message on standard error, when there was no
// sandbox. It must be the first thing that main or TestMain does: the
// code before it runs once for each stage. Needs root.
//
// SIGINT, SIGTERM, SIGHUP and SIGQUIT to the calling process arrive inside. The
// processes inside are in a process group of their own: a Ctrl-C reaches them
// through the calling process, once.
func Run(inside func() int) int {
	var code int
	var err error
	switch os.Getenv(stageEnv) {
	case stageInside:
		if err := os.Unsetenv(stageEnv); err != nil {
			return fail(err)
		}
		return inside()
	case stageInit:
		code, err = runInit()
	default:
		code, err = runOuter()
	}
	if err != nil {
		return fail(err)
	}
	return code
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "sandbox:", err)
	return exitSetup
}

// InitPID is the process ID that the sandbox's process 1 has outside of it, for
// people: nsenter -t PID -m -n -p -u enters the sandbox from outside. It is ""
// outside a sandbox.
func InitPID() string { return os.Getenv(initPIDEnv) }

// runOuter starts init in new namespaces and waits for it.
func runOuter() (int, error) {
	if os.Geteuid() != 0 {
		return 0, errors.New("needs root to make namespaces: run it as root")
	}
	// The parent-death signal follows the thread that forked, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := stage(stageInit)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	read, write, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("make a pipe: %w", err)
	}
	defer write.Close()
	cmd.ExtraFiles = []*os.File{read}
	signals := catchSignals()
	defer signal.Stop(signals)
	err = cmd.Start()
	_ = read.Close()
	if err != nil {
		return 0, fmt.Errorf("start in new namespaces: %w", err)
	}
	// Only the outer stage can know the process ID that init has out here.
	if _, err := fmt.Fprintln(write, cmd.Process.Pid); err != nil {
		return 0, fmt.Errorf("tell init its process ID: %w", err)
	}
	forward(signals, cmd.Process)
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		return 0, fmt.Errorf("wait for the sandbox: %w", err)
	}
	return exitCode(cmd.ProcessState.Sys().(syscall.WaitStatus)), nil
}

// runInit is process 1: it makes the node's file system, starts the inside
// stage and reaps every child until that one ends.
func runInit() (int, error) {
	signals := catchSignals()
	var pid string
	pipe := os.NewFile(3, "the outer stage's pipe") // the first of ExtraFiles
	if _, err := fmt.Fscanln(pipe, &pid); err != nil {
		return 0, fmt.Errorf("read init's process ID: %w", err)
	}
	_ = pipe.Close()
	if err := setUp(); err != nil {
		return 0, err
	}
	cmd := stage(stageInside)
	cmd.Env = append(cmd.Env, initPIDEnv+"="+pid)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start inside: %w", err)
	}
	forward(signals, cmd.Process)
	// cmd.Wait is not used: process 1 must take every child, orphans too, and
	// the two would steal each other's.
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for process %d: %w", cmd.Process.Pid, err)
		case pid == cmd.Process.Pid:
			return exitCode(status), nil
		}
	}
}

// stage is this program again, with its arguments and streams.
func stage(name string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // lives as long as this process; signals are forwarded
	cmd.Args = os.Args
	cmd.Env = append(os.Environ(), stageEnv+"="+name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

func catchSignals() chan os.Signal {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	return signals
}

// forward sends what arrives on signals to the process. Its goroutine ends with
// the program.
func forward(signals <-chan os.Signal, to *os.Process) {
	go func() {
		for s := range signals {
			// The process may be gone; its exit code tells.
			_ = to.Signal(s)
		}
	}()
}

func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}
