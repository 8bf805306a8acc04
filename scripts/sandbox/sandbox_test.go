package sandbox

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// roleEnv makes this test binary play a program that uses a sandbox.
const roleEnv = "PORTOLAN_SANDBOX_TEST_ROLE"

// marker is in the command line of every process that a role starts.
const marker = "portolan-sandbox-test-marker"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(m.Run())
	case "probe":
		os.Exit(Run(probe))
	case "linger":
		os.Exit(Run(linger))
	default:
		code, err := strconv.Atoi(role)
		if err != nil {
			panic(err)
		}
		os.Exit(Run(func() int { return code }))
	}
}

// play starts this binary in a role.
func play(t *testing.T, role string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return cmd
}

// probe prints what a program sees inside.
func probe() int {
	script := `
		hostname
		echo pid1 $(tr '\0' ' ' < /proc/1/cmdline | grep -c -- "$0")
		ls /run /var/lib/portolan /var/lib/cni
		grep -c . /etc/resolv.conf
		echo links $(ip -o link | wc -l) $(ip -o link show dev lo up | wc -l)
		touch /run/netns/a && mount --bind /proc/self/ns/net /run/netns/a
		unshare --mount --propagation slave sh -c 'sleep 0.01; test -e /run/netns/a && echo slave'
		grep -E ' /run/(netns|portolan/netns) .* shared:' /proc/self/mountinfo | wc -l
		test -e /var/lib/dpkg/status && echo dpkg
		echo stage $` + stageEnv + `
		echo init $` + initPIDEnv
	cmd := exec.Command("sh", "-c", script, os.Args[0])
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if cmd.Run() != nil {
		return 1
	}
	return 0
}

// linger leaves things that outlive it: a process, an orphan, a network namespace with a
// mount that holds it, a link.
func linger() int {
	script := `
		set -e
		ip link add dummy-br type bridge
		unshare --net sh -c 'touch /run/netns/held && mount --bind /proc/self/ns/net /run/netns/held'
		setsid sleep 1000 ` + marker + ` 2>/dev/null & 
		(setsid sh -c 'while :; do sleep 1; done' ` + marker + ` &)
		echo ready
		exec sh -c 'while :; do sleep 1; done' ` + marker
	cmd := exec.Command("sh", "-c", script)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	_ = cmd.Run()
	return 0
}

// Inside, a program has a node's directories, network and process tree, and
// the machine's disk is not written to.
func TestInside(t *testing.T) {
	cmd := play(t, "probe")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("probe: %v\n%s", err, out)
	}
	match := regexp.MustCompile(`(?m)^init (\d+)$`).FindSubmatch(out)
	if match == nil {
		t.Fatalf("no process ID of init in\n%s", out)
	}
	if pid, err := strconv.Atoi(string(match[1])); err != nil || pid == cmd.Process.Pid || pid == 1 {
		t.Errorf("init's process ID is %s, want one of this process ID namespace, other than its parent's %d", match[1], cmd.Process.Pid)
	}
	want := strings.Join([]string{
		Hostname, "pid1 1",
		"/run:", "netns", "portolan", "resolv.conf", "", "/var/lib/cni:", "", "/var/lib/portolan:",
		"0", "links 1 1", "slave", "2", "dpkg", "stage", string(match[0]), "",
	}, "\n")
	if got := string(out); got != want {
		t.Errorf("probe printed\n%s\nwant\n%s", got, want)
	}
	if _, err := os.Stat("/var/lib/portolan"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("/var/lib/portolan is on the machine's disk: %v", err)
	}
}

// The exit code of the function inside is the program's.
func TestExitCode(t *testing.T) {
	for _, code := range []int{0, 7} {
		cmd := play(t, strconv.Itoa(code))
		if out, err := cmd.CombinedOutput(); cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != code {
			t.Errorf("exit %v, want %d: %v\n%s", cmd.ProcessState, code, err, out)
		}
	}
}

// However a program in a sandbox ends, no process, mount, network namespace or
// link of it is left: also when the outer process is killed with SIGKILL.
func TestNothingIsLeft(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			before := machine(t)
			cmd := play(t, "linger", marker)
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
				t.Fatalf("read %q, %v: %s", line, err, &stderr)
			}
			if len(markedProcesses(t)) < 4 {
				t.Fatalf("only %v run: the test would prove nothing", markedProcesses(t))
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			deadline := time.Now().Add(10 * time.Second)
			for len(markedProcesses(t)) > 0 && time.Now().Before(deadline) {
				time.Sleep(10 * time.Millisecond) // the kernel has no event for the end of another's grandchild
			}
			if left := markedProcesses(t); len(left) > 0 {
				t.Errorf("processes left: %v", left)
			}
			if after := machine(t); after != before {
				t.Errorf("the machine before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// machine lists what a sandbox could leave: mounts, named network namespaces and links.
func machine(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	links, err := exec.CommandContext(t.Context(), "ip", "-o", "link").CombinedOutput()
	if err != nil {
		t.Fatalf("ip link: %v: %s", err, links)
	}
	names, err := filepath.Glob("/run/netns/held")
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "portolan") || strings.Contains(line, "/run/netns/held") {
			count++
		}
	}
	return strings.Join([]string{strconv.Itoa(count), strconv.FormatBool(bytes.Contains(links, []byte("dummy-br"))), strings.Join(names, " ")}, "\n")
}

// markedProcesses lists the processes whose command line has the marker.
func markedProcesses(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		// A process may end between the two calls.
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(marker)) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// A folder is shadowed without a change to it: names are empty, every other
// entry is still there.
func TestShadow(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"own/old", "other/file"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("other", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "plain"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	// The mounts stay in a mount namespace of this thread, which ends with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	if err := shadow(dir, []string{"own", "new"}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"own": true, "own/old": false, "new": true, "other/file": true, "link/file": true, "plain": true} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("%s exists: %v, want %v", name, err == nil, want)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "own/new"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "own/new")); err == nil {
		t.Error("a file written into the shadow is on the disk")
	}
	if _, err := os.Stat(filepath.Join(dir, "own/old")); err != nil {
		t.Error(err)
	}
}
