package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// CNI-38, CNI-40, I12: something prints, or panics, at each step of ADD: standard
// output is exactly one document, and what a panic began is undone.
func TestStdoutPurity(t *testing.T) {
	for _, point := range []string{"pinned", "decided", "proven", "print"} {
		t.Run(point, func(t *testing.T) {
			n := newNode(t, meshed())
			n.path = bin.failpoints
			pod := nettest.New(t)
			e := env("ADD", "c1", pod.Path)
			e["PORTOLAN_FAILPOINT"] = point + "=print"
			stdout, code := n.run(e, n.addStdin(joins))
			if code != 0 || !json.Valid([]byte(stdout)) || strings.Contains(stdout, "stray") {
				t.Errorf("exit code %d, standard output %q", code, stdout)
			}
			if !strings.Contains(n.stderr.String(), "a stray line on standard output") {
				t.Errorf("the line is lost: %s", n.stderr.String())
			}
			if point == "print" { // outside any command: nothing to undo with
				return
			}
			e["CNI_CONTAINERID"], e["PORTOLAN_FAILPOINT"] = "c2", point+"=panic"
			other := nettest.New(t)
			e["CNI_NETNS"] = other.Path
			stdout, code = n.run(e, n.addStdin(joins))
			if code != 1 {
				t.Errorf("exit code %d", code)
			}
			wantDocument(t, stdout, types.ErrInternal, "portolan panicked: failpoint "+point)
			if !strings.Contains(n.stderr.String(), "goroutine ") {
				t.Error("no stack on standard error")
			}
			n.wantFiles(n.netnsDir, "c1-eth0", "c1-eth0.attached.json")
			if other.HasTable(t, "inet portolan") {
				t.Error("the capture is still there")
			}
		})
	}
}

// Without a command the plugin says what it is, which release and which versions of
// the specification it speaks, on standard error, and an error
// document carries the configuration's version.
func TestDocuments(t *testing.T) {
	n := newNode(t, meshed())
	stdout, code := n.run(map[string]string{}, "")
	if code != 0 || stdout != "" || !strings.Contains(n.stderr.String(), "CNI plugin portolan "+testRelease+":") ||
		!strings.Contains(n.stderr.String(), "1.1.0") {
		t.Errorf("without a command: exit code %d, %q, %q", code, stdout, n.stderr.String())
	}
	n.version = "0.4.0"
	stdout, _ = n.run(env("ADD", "c1", nettest.New(t).Path), n.stdin(nil))
	var doc document
	if err := json.Unmarshal([]byte(stdout), &doc); err != nil || doc.CNIVersion != "0.4.0" {
		t.Errorf("document %s: %v", stdout, err)
	}
}

// CNI-49, CNI-50: an empty root without any program, an empty PATH, a namespace
// without route and resolver, and a resolver configuration that hangs.
func TestScratchRoot(t *testing.T) {
	n := newNode(t, meshed())
	root := t.TempDir()
	for _, dir := range []string{"proc", "etc", filepath.Dir(n.socket), "netns"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	pod := nettest.New(t)
	netns := filepath.Join(root, "netns", "pod")
	if err := errors.Join(
		os.WriteFile(netns, nil, 0o600),
		os.WriteFile(filepath.Join(root, "etc/nsswitch.conf"), []byte("passwd: hang\nhosts: hang\n"), 0o600),
		os.WriteFile(filepath.Join(root, "etc/resolv.conf"), []byte("nameserver 203.0.113.1\n"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(filepath.Join(bin.dir, "portolan"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "portolan"), binary, 0o700); err != nil {
		t.Fatal(err)
	}
	mount := func(source, target, kind string, flags uintptr) {
		t.Helper()
		if err := unix.Mount(source, target, kind, flags, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
	}
	mount("proc", filepath.Join(root, "proc"), "proc", 0)
	mount(filepath.Dir(n.socket), filepath.Join(root, filepath.Dir(n.socket)), "", unix.MS_BIND)
	mount(pod.Path, netns, "", unix.MS_BIND)
	for _, command := range []string{"ADD", "CHECK", "DEL"} {
		cmd := exec.CommandContext(t.Context(), "/portolan")
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		cmd.Dir = "/"
		cmd.Env = []string{"PATH="}
		for k, v := range env(command, "c1", "/netns/pod") {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		cmd.Stdin = strings.NewReader(n.addStdin(joins))
		start := time.Now()
		stdout, err := cmd.Output()
		if err != nil || time.Since(start) > budget {
			t.Fatalf("%s: %v after %v: %s", command, err, time.Since(start), stdout)
		}
		if got := pod.HasTable(t, "inet portolan"); got != (command != "DEL") {
			t.Errorf("after %s: captured %t", command, got)
		}
	}
}

// CNI-64: the runtime's path may be a process's entry in /proc; the pin outlives
// the process.
func TestProcNetns(t *testing.T) {
	n := newNode(t, meshed())
	pause := exec.CommandContext(t.Context(), "sleep", "600")
	pause.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := pause.Start(); err != nil {
		t.Fatal(err)
	}
	rt := sandboxOf("c1", fmt.Sprintf("/proc/%d/ns/net", pause.Process.Pid), joins)
	_, err := n.add(rt)
	if e := errors.Join(err, pause.Process.Kill()); e != nil {
		t.Fatal(e)
	}
	_ = pause.Wait()
	pinned := nettest.At(filepath.Join(n.netnsDir, "c1-eth0"))
	if !pinned.HasTable(t, "inet portolan") {
		t.Error("the pinned namespace is not captured")
	}
	if err := n.del(rt); err != nil {
		t.Error(err)
	}
	n.wantNothing()
}

// CNI-63: the pod's namespace belongs to a user namespace of its own.
func TestUserNamespace(t *testing.T) {
	n := newNode(t, meshed())
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	pause := exec.CommandContext(t.Context(), "sleep", "600")
	pause.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL,
	}
	if err := pause.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = pause.Process.Kill()
		_ = pause.Wait()
	})
	rt := sandboxOf("c1", fmt.Sprintf("/proc/%d/ns/net", pause.Process.Pid), joins)
	if _, err := n.add(rt); err != nil {
		t.Fatalf("%v\n%s", err, n.stderr.String())
	}
	if err := errors.Join(n.check(rt), n.del(rt)); err != nil {
		t.Error(err)
	}
	n.wantNothing(nettest.At(rt.NetNS))
}

// CNI-72: whoever reads standard error takes nothing: neither the commands nor
// the logger wait for it.
func TestLogsNeverBlock(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(read.Close(), write.Close()) }()
	fd := int(write.Fd()) // makes it blocking, each time
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	for err == nil { // fill the pipe
		_, err = unix.Write(fd, make([]byte, 1024))
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	n := newNodeWithout(t)
	cmd := exec.CommandContext(t.Context(), filepath.Join(bin.dir, "portolan"))
	for k, v := range env("ADD", "c1", nettest.New(t).Path) {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Stdin, cmd.Stderr = strings.NewReader(n.addStdin(plain)), write
	start := time.Now()
	stdout, err := cmd.Output()
	if err != nil || !json.Valid(stdout) || time.Since(start) > budget {
		t.Errorf("ADD: %v after %v: %s", err, time.Since(start), stdout)
	}

	start = time.Now()
	s := newSink(write)
	for range 1 << 10 {
		if _, err := s.Write(make([]byte, 1<<10)); err != nil {
			t.Fatal(err)
		}
	}
	s.close(logBudget)
	_, _ = s.Write([]byte("after the end"))
	if took := time.Since(start); took > 10*logBudget || s.dropped.Load() == 0 {
		t.Errorf("1 MiB of logs took %v, %d lines dropped", took, s.dropped.Load())
	}
}

// What a reader takes arrives whole and in order.
func TestSink(t *testing.T) {
	var got bytes.Buffer
	s := newSink(&got)
	log := slog.New(slog.NewTextHandler(s, nil))
	log.Info("first")
	log.Info("second")
	s.close(time.Minute)
	if lines := strings.Split(got.String(), "\n"); len(lines) != 3 || !strings.Contains(lines[0], "msg=first") || !strings.Contains(lines[1], "msg=second") {
		t.Errorf("logged %q", got.String())
	}
}

// I11, CNI-5, CNI-D3: the plugin links no Kubernetes client, no Envoy type and
// nothing of the registrar, and the released binary is static.
func TestDependencies(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{.ImportPath}}", ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(text))
	if !slices.Contains(deps, "github.com/portolan-mesh/portolan/plugins/capture") {
		t.Fatalf("a strange list: %v", deps)
	}
	for _, dep := range deps {
		for _, banned := range []string{"k8s.io/", "sigs.k8s.io/", "github.com/envoyproxy/", "github.com/portolan-mesh/portolan/registrar", "github.com/portolan-mesh/portolan/scripts"} {
			if strings.HasPrefix(dep+"/", banned) {
				t.Errorf("the plugin links %s", dep)
			}
		}
	}
	static, err := exec.CommandContext(t.Context(), "go", "version", "-m", filepath.Join(bin.dir, "portolan")).Output()
	if err != nil || !strings.Contains(string(static), "CGO_ENABLED=0") {
		t.Errorf("not built without cgo: %v", err)
	}
	info, err := os.Stat(filepath.Join(bin.dir, "portolan"))
	if err != nil {
		t.Fatal(err)
	}
	if const12 := int64(12 << 20); info.Size() > const12 {
		t.Errorf("the binary has %d bytes: it is started for every pod, keep it under %d", info.Size(), const12)
	}
}

// brokenCapture is a kernel on which the capture does not work.
type brokenCapture struct {
	netnsCapture
	start func() error
}

func (b brokenCapture) Start(string, capture.Config) error { return b.start() }

// CNI-51, CNI-D10: a capture that cannot be programmed fails the ADD with its
// code and undoes the registration; a panic on the way is no exception.
func TestCaptureFails(t *testing.T) {
	for _, tc := range []struct {
		name  string
		start func() error
		code  uint
		text  string
	}{
		{"feature", func() error {
			return fmt.Errorf("apply: %w", &capture.FeatureError{Feature: "nft redirect", Err: unix.ENOENT})
		}, 104, "kernel lacks nft redirect"},
		{"other", func() error { return errors.New("apply capture in /x: no") }, 5, "apply capture in /x: no"},
		{"panic", func() error { panic("oh") }, 999, "portolan panicked: oh"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, meshed())
			pod := nettest.New(t)
			p := &plugin{log: slog.New(slog.DiscardHandler), capture: brokenCapture{start: tc.start}, now: time.Now}
			err := p.add(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: pod.Path, StdinData: []byte(n.addStdin(plain))})
			wantCode(t, err, tc.code, tc.text)
			n.wantNothing(pod)
			if got := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar); len(got) != 1 || p.result != nil {
				t.Errorf("the registrar was told to forget %d times, result %s", len(got), p.result)
			}
		})
	}
}
