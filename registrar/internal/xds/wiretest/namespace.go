package wiretest

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netns"

	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// Namespace is a network namespace that is mounted at Path, what Envoy calls
// network_namespace_filepath.
type Namespace struct {
	*netnstest.Namespace
	handle netns.NsHandle
}

// newNamespace makes a network namespace that lives until the test ends.
func newNamespace(tb testing.TB) *Namespace {
	tb.Helper()
	n := &Namespace{Namespace: netnstest.New(tb)}
	var err error
	if n.handle, err = netns.GetFromPath(n.Path); err != nil {
		tb.Fatalf("open %s: %v", n.Path, err)
	}
	tb.Cleanup(func() { _ = n.handle.Close() })
	return n
}

// Listen listens on a TCP address inside the namespace until the test ends.
func (n *Namespace) Listen(tb testing.TB, address string) net.Listener {
	tb.Helper()
	return n.Namespace.Listen(tb, net.ListenConfig{}, "tcp", address)
}

// DialContext connects from inside the namespace; address is an IP and a port.
func (n *Namespace) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var c net.Conn
	err := ns.WithNetNSPath(n.Path, func(ns.NetNS) (err error) {
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
