package wiretest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that is pinned at a path.
type Namespace struct {
	// Path is the pin, what Envoy calls network_namespace_filepath.
	Path   string
	handle netns.NsHandle
}

// newNamespace makes a network namespace pinned in the test's temporary directory.
func newNamespace(tb testing.TB, name string) *Namespace {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Fatal("this test makes network namespaces: run it as root")
	}
	path := filepath.Join(tb.TempDir(), name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		// The thread is in the new namespace for good: it ends with this goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("unshare: %w", err)
			return
		}
		source := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		done <- unix.Mount(source, path, "", unix.MS_BIND, "")
	}()
	if err := <-done; err != nil {
		tb.Fatalf("namespace %s: %v", name, err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			tb.Errorf("unpin %s: %v", path, err)
		}
	})
	handle, err := netns.GetFromPath(path)
	if err != nil {
		tb.Fatalf("open %s: %v", path, err)
	}
	tb.Cleanup(func() { _ = handle.Close() })
	return &Namespace{Path: path, handle: handle}
}

// Do runs f on a thread that is inside the namespace. Sockets that f makes stay
// there for good.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("own namespace: %w", err)
			return
		}
		defer func() { _ = home.Close() }()
		if err := netns.Set(n.handle); err != nil {
			done <- fmt.Errorf("enter %s: %w", n.Path, err)
			return
		}
		result := f()
		if netns.Set(home) == nil {
			// Only a thread that is home again may serve others.
			runtime.UnlockOSThread()
		}
		done <- result
	}()
	return <-done
}

// Listen listens on a TCP address inside the namespace until the test ends.
func (n *Namespace) Listen(tb testing.TB, address string) net.Listener {
	tb.Helper()
	var l net.Listener
	err := n.Do(func() (err error) {
		var config net.ListenConfig
		l, err = config.Listen(context.Background(), "tcp", address)
		return err
	})
	if err != nil {
		tb.Fatalf("listen on %s in %s: %v", address, n.Path, err)
	}
	tb.Cleanup(func() { _ = l.Close() })
	return l
}

// DialContext connects from inside the namespace; address is an IP and a port.
func (n *Namespace) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var c net.Conn
	err := n.Do(func() (err error) {
		var d net.Dialer
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Spawn starts cmd inside the namespace and returns a channel that gets the error
// of its end. The process dies with the test process, however that ends.
func (n *Namespace) Spawn(cmd *exec.Cmd) (<-chan error, error) {
	started, ended := make(chan error, 1), make(chan error, 1)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	// The signal comes when the thread that started the process ends; so this thread
	// serves nothing else and waits.
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	go func() {
		runtime.LockOSThread()
		err := netns.Set(n.handle)
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	return ended, <-started
}

// Run runs a program inside the namespace and returns what it printed.
func (n *Namespace) Run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var out limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	ended, err := n.Spawn(cmd)
	if err != nil {
		return "", fmt.Errorf("start %s: %w", name, err)
	}
	err = <-ended
	return out.String(), err
}
