package capture_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// dnsWorld is a pod with a mesh-DNS server and two resolvers outside.
func dnsWorld(t *testing.T) *nettest.Namespace {
	t.Helper()
	pod, world := pod(t, true)
	serveMesh(t, pod)
	for _, network := range []string{"udp", "tcp"} {
		world.Serve(t, network+"4", "10.0.0.53:53", "first")
		world.Serve(t, network+"4", "10.0.0.54:53", "second")
		world.Serve(t, network+"6", "[fd00::53]:53", "first")
	}
	apply(t, pod, dual())
	return pod
}

// Dataplane decision 9: DNS goes to the mesh while alive is refreshed. When that
// ends, new sockets and sockets that are held open reach their own resolver, in
// both families, and come back when the server does.
func TestAlive(t *testing.T) {
	pod := dnsWorld(t)
	alive, pause := keepAlive(t, pod)
	held4 := resolver(t, pod, nettest.Dialer{}, "udp4", "10.0.0.53:53")
	held6 := resolver(t, pod, nettest.Dialer{}, "udp6", "[fd00::53]:53")
	check := func(step, want string) {
		t.Helper()
		for name, got := range map[string]string{
			"held socket":       nettest.Ask(t, held4, nettest.Timeout),
			"held socket, IPv6": nettest.Ask(t, held6, nettest.Timeout),
			"new socket":        pod.Get(t, "udp4", "10.0.0.53:53"),
			"new socket, IPv6":  pod.Get(t, "udp6", "[fd00::53]:53"),
			"TCP":               pod.Get(t, "tcp4", "10.0.0.53:53"),
			"TCP, IPv6":         pod.Get(t, "tcp6", "[fd00::53]:53"),
		} {
			if got != want {
				t.Errorf("%s: %s was answered by %q, want %q", step, name, got, want)
			}
		}
	}
	check("alive", "mesh dns")
	pause()
	if err := alive.Withdraw(); err != nil {
		t.Fatal(err)
	}
	check("withdrawn", "first")
	for range 2 { // withdrawing again, and refreshing again, is fine
		if err := errors.Join(alive.Withdraw(), alive.Refresh(), alive.Refresh()); err != nil {
			t.Fatal(err)
		}
	}
	keepAlive(t, pod)
	check("alive again", "mesh dns")
	// A repair does not end the redirection.
	apply(t, pod, dual())
	check("applied again", "mesh dns")
}

// Contract 0 and 5: with the mesh-DNS process dead, which withdraws nothing, held
// and new sockets fall through within 5 s; a refresh in between starts the time
// again.
func TestAliveExpires(t *testing.T) {
	pod := dnsWorld(t)
	alive, pause := keepAlive(t, pod)
	pause()
	held := resolver(t, pod, nettest.Dialer{}, "udp4", "10.0.0.53:53")
	time.Sleep(capture.AliveTimeout / 2) // the kernel's clock is the thing under test
	if err := errors.Join(alive.Refresh(), alive.Close()); err != nil {
		t.Fatal(err)
	}
	refreshed := time.Now()
	if got := nettest.Ask(t, held, nettest.Timeout); got != "mesh dns" {
		t.Fatalf("answered by %q before", got)
	}
	for nettest.Ask(t, held, nettest.Timeout) == "mesh dns" {
		if time.Since(refreshed) > capture.AliveTimeout+time.Second {
			t.Fatal("a held socket still asks the dead server")
		}
		time.Sleep(50 * time.Millisecond)
	}
	if took := time.Since(refreshed); took < capture.AliveTimeout-time.Second {
		t.Errorf("the redirection ended after %v: the refresh did not start its time again", took)
	}
	if got := nettest.Ask(t, held, nettest.Timeout); got != "first" {
		t.Errorf("held socket: answered by %q", got)
	}
	if got := pod.Get(t, "udp4", "10.0.0.53:53"); got != "first" {
		t.Errorf("new socket: answered by %q", got)
	}
}

// CNI-60: the mesh's own sockets are not redirected, and two clients with one
// source port that ask two resolvers are both answered.
func TestAliveMarkAndPorts(t *testing.T) {
	pod := dnsWorld(t)
	keepAlive(t, pod)
	marked := nettest.Dialer{Mark: capture.Mark}
	for network, addr := range map[string]string{"udp4": "10.0.0.53:53", "udp6": "[fd00::53]:53", "tcp4": "10.0.0.53:53"} {
		if got := nettest.Ask(t, resolver(t, pod, marked, network, addr), nettest.Timeout); got != "first" {
			t.Errorf("marked %s socket: answered by %q", network, got)
		}
	}
	local := nettest.Dialer{Local: netip.MustParseAddrPort("10.0.0.2:5353"), Reuse: true}
	first := resolver(t, pod, local, "udp4", "10.0.0.53:53")
	second := resolver(t, pod, local, "udp4", "10.0.0.54:53")
	for range 3 {
		if a, b := nettest.Ask(t, first, nettest.Timeout), nettest.Ask(t, second, nettest.Timeout); a != "mesh dns" || b != "mesh dns" {
			t.Fatalf("one source port, two resolvers: answered by %q and %q", a, b)
		}
	}
}

// CNI-61: DNS servers on the pod's own addresses are never captured, alive or not.
func TestAliveOwnServers(t *testing.T) {
	pod := dnsWorld(t)
	own := map[string]string{"udp4": "127.0.0.1:53", "udp6": "[::1]:53", "tcp4": "10.0.0.2:53"}
	for network, addr := range own {
		pod.Serve(t, network, addr, "own")
	}
	pod.Serve(t, "udp4", "10.0.0.2:53", "own")
	alive, pause := keepAlive(t, pod)
	for _, step := range []string{"alive", "withdrawn"} {
		for network, addr := range own {
			if got := pod.Get(t, network, addr); got != "own" {
				t.Errorf("%s: %s %s was answered by %q", step, network, addr, got)
			}
		}
		if got := pod.Get(t, "udp4", "10.0.0.2:53"); got != "own" {
			t.Errorf("%s: own address was answered by %q", step, got)
		}
		pause()
		if err := alive.Withdraw(); err != nil {
			t.Fatal(err)
		}
	}
}

// Without our table, or without captured DNS, Refresh says so and Withdraw has
// nothing to do; after a repair the same Alive goes on.
func TestAliveNoTable(t *testing.T) {
	n := nettest.New(t)
	alive, err := capture.OpenAlive(n.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = alive.Close() })
	noDNS := dual()
	noDNS.DNS = false
	for _, prepare := range []func() error{
		func() error { return nil },
		func() error { return capture.Apply(n.Path, noDNS) },
		func() error { return capture.Remove(n.Path) },
	} {
		if err := prepare(); err != nil {
			t.Fatal(err)
		}
		if err := alive.Refresh(); !errors.Is(err, capture.ErrNoTable) || !strings.Contains(err.Error(), n.Path) {
			t.Errorf("Refresh = %v, want ErrNoTable with the path", err)
		}
		if err := alive.Withdraw(); err != nil {
			t.Errorf("Withdraw = %v", err)
		}
	}
	apply(t, n, dual())
	if err := alive.Refresh(); err != nil {
		t.Errorf("Refresh after a repair: %v", err)
	}
	if !strings.Contains(list(t, n), "elements = { 53 expires ") {
		t.Errorf("no element after Refresh:\n%s", list(t, n))
	}
	if _, err := capture.OpenAlive("/run/netns/gone"); err == nil || !strings.Contains(err.Error(), "/run/netns/gone") {
		t.Errorf("OpenAlive of a path that is gone = %v", err)
	}
}
