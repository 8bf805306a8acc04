package pin_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

// unprepared is a folder of pins that is taken down with the test.
func unprepared(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "netns")
	t.Cleanup(func() {
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
			continue
		}
	})
	return dir
}

// folder is a prepared folder of pins.
func folder(t *testing.T) string {
	t.Helper()
	dir := unprepared(t)
	if err := pin.Prepare(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t *testing.T, path string) *pin.Namespace {
	t.Helper()
	n, err := pin.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return n
}

// MESH-35: a pin outlives the runtime's path, pinning again changes nothing, another
// namespace takes the place, and unpinning twice is success.
func TestPin(t *testing.T) {
	dir := folder(t)
	first, second := nettest.New(t), nettest.New(t)
	a, b := open(t, first.Path), open(t, second.Path)
	if a.ID == b.ID {
		t.Fatal("two namespaces have one ID")
	}
	var mounted uint64
	for range 3 {
		path, err := pin.Pin(dir, "c1-eth0", a)
		if err != nil || path != filepath.Join(dir, "c1-eth0") {
			t.Fatalf("Pin = %q, %v", path, err)
		}
		// Envoy opens the path at any time: it must not be gone in between.
		if id := mountID(t, path); mounted != 0 && id != mounted {
			t.Error("the pin was mounted anew")
		} else {
			mounted = id
		}
	}
	first.Unmount(t)
	if id, err := pin.Identify(filepath.Join(dir, "c1-eth0")); err != nil || id != a.ID {
		t.Errorf("the pin leads to %v, %v, want %v", id, err, a.ID)
	}
	if got := mounts(t, filepath.Join(dir, "c1-eth0")); got != 1 {
		t.Errorf("%d mounts on the pin, want 1", got)
	}
	path, err := pin.Pin(dir, "c1-eth0", b)
	if err != nil {
		t.Fatal(err)
	}
	if id, err := pin.Identify(path); err != nil || id != b.ID {
		t.Errorf("after another namespace: the pin leads to %v, %v, want %v", id, err, b.ID)
	}
	for range 2 {
		if err := pin.Unpin(dir, "c1-eth0"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) || mounts(t, path) != 0 {
		t.Errorf("the pin is still there: %v", err)
	}
	if err := pin.Unpin(filepath.Join(dir, "none"), "c1-eth0"); err != nil {
		t.Errorf("Unpin in a folder that is not there: %v", err)
	}
}

// mountID returns the kernel's number of the mount at path, which is never given
// twice (from Linux 6.8 on; before, it may be).
func mountID(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID_UNIQUE, &st); err != nil {
		t.Fatal(err)
	}
	return st.Mnt_id
}

func mounts(t *testing.T, path string) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), " "+path+" ")
}

// A stale file or stacked mounts where the pin belongs are cleared.
func TestPinOverLeftovers(t *testing.T) {
	dir := folder(t)
	n := open(t, nettest.New(t).Path)
	path := filepath.Join(dir, "c1-eth0")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := pin.Pin(dir, "c1-eth0", n); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := unix.Mount("/proc/self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pin.Pin(dir, "c1-eth0", n); err != nil {
		t.Fatal(err)
	}
	if id, err := pin.Identify(path); err != nil || id != n.ID || mounts(t, path) != 1 {
		t.Errorf("pin = %v, %v with %d mounts", id, err, mounts(t, path))
	}
	if err := pin.Unpin(dir, "c1-eth0"); err != nil {
		t.Error(err)
	}
	// What is in the way and not ours to remove is named.
	if err := os.MkdirAll(filepath.Join(dir, "c2-eth0", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := pin.Pin(dir, "c2-eth0", n); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "c2-eth0")) {
		t.Errorf("Pin over a folder = %v", err)
	}
}

// CNI-64: a process in a mount namespace of its own, made after the folder was
// prepared, sees pins that are made later, and sees them go.
func TestPinIsSeenElsewhere(t *testing.T) {
	dir := folder(t)
	n := open(t, nettest.New(t).Path)
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `mount --make-rslave / && echo ready && read x && stat -c %i "$0/c1-eth0"; read x; test -e "$0/c1-eth0" || echo gone`, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	say := func() {
		if _, err := in.Write([]byte("\n")); err != nil {
			t.Error(err)
		}
	}
	hear := func(want string) {
		t.Helper()
		var got string
		if _, err := fmt.Fscanln(out, &got); err != nil || got != want {
			t.Errorf("the other process says %q, %v, want %q", got, err, want)
		}
	}
	hear("ready")
	if _, err := pin.Pin(dir, "c1-eth0", n); err != nil {
		t.Fatal(err)
	}
	say()
	hear(fmt.Sprint(n.ID.Ino))
	if err := pin.Unpin(dir, "c1-eth0"); err != nil {
		t.Fatal(err)
	}
	say()
	hear("gone")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// C6: plugins that run side by side make the folder one shared mount, not a stack
// of them.
func TestPinParallel(t *testing.T) {
	n := open(t, nettest.New(t).Path)
	for range 20 {
		dir := unprepared(t)
		var all sync.WaitGroup
		start := make(chan struct{})
		errs := make([]error, 16)
		for i := range errs {
			all.Go(func() {
				<-start
				name := fmt.Sprintf("c%d-eth0", i)
				prepared := pin.Prepare(dir)
				_, err := pin.Pin(dir, name, n)
				errs[i] = errors.Join(prepared, err, pin.Unpin(dir, name))
			})
		}
		close(start)
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if got := mounts(t, dir); got != 1 {
			t.Fatalf("%d mounts on the folder, want 1", got)
		}
	}
}

// C6: a plugin waits for the other one that is making the folder a mount.
func TestPrepareWaitsForLock(t *testing.T) {
	dir := unprepared(t)
	lock, err := os.Open(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- pin.Prepare(dir) }()
	for waiting := false; !waiting; {
		select {
		case err := <-done:
			t.Fatalf("Prepare did not wait: %v", err)
		default:
		}
		locks, err := os.ReadFile("/proc/locks")
		if err != nil {
			t.Fatal(err)
		}
		waiting = strings.Contains(string(locks), "-> FLOCK")
	}
	if got := mounts(t, dir); got != 0 {
		t.Errorf("%d mounts on the folder while another plugin has the lock", got)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode() != fs.ModeDir|0o711 {
		t.Errorf("folder = %v, %v, want drwx--x--x: Envoy passes through, and lists nothing", info.Mode(), err)
	}
	if err := pin.Prepare("/proc/none"); err == nil || !strings.Contains(err.Error(), "/proc/none") {
		t.Errorf("Prepare of an impossible folder = %v", err)
	}
}

// Only a network namespace is taken for one.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, fifo, dir, "/proc/self/ns/mnt", "/dev/null"} {
		if _, err := pin.Open(path); !errors.Is(err, pin.ErrNotNamespace) || !strings.Contains(err.Error(), path) {
			t.Errorf("Open(%s) = %v, want ErrNotNamespace with the path", path, err)
		}
	}
	if _, err := pin.Open(filepath.Join(dir, "gone")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open of nothing = %v", err)
	}
	own, err := pin.Own()
	if err != nil {
		t.Fatal(err)
	}
	if id, err := pin.Identify("/proc/self/ns/net"); err != nil || id != own {
		t.Errorf("Own = %v, /proc/self/ns/net = %v, %v", own, id, err)
	}
}
