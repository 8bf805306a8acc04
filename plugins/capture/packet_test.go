package capture_test

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// serveMesh puts a server on each mesh port of the pod, on both loopbacks.
func serveMesh(t *testing.T, pod *nettest.Namespace) {
	t.Helper()
	for suffix, loopback := range map[string]string{"4": "127.0.0.1", "6": "[::1]"} {
		pod.Serve(t, "tcp"+suffix, loopback+":15001", "http")
		pod.Serve(t, "tcp"+suffix, loopback+":15002", "tcp")
		pod.Serve(t, "tcp"+suffix, loopback+":15053", "mesh dns")
		pod.Serve(t, "udp"+suffix, loopback+":15053", "mesh dns")
	}
}

// Dataplane decision 8, MESH-39: what goes to the mesh goes to the right port in
// both families, with and without a default route, and nothing else is touched.
func TestPackets(t *testing.T) {
	const refused = "connection refused"
	for _, routed := range []bool{true, false} {
		name := map[bool]string{true: "default route", false: "no default route"}[routed]
		t.Run(name, func(t *testing.T) {
			pod, world := pod(t, routed)
			serveMesh(t, pod)
			pod.Serve(t, "tcp4", "127.0.0.1:5432", "own loopback")
			pod.Serve(t, "udp4", "127.0.0.1:53", "own loopback")
			pod.Serve(t, "tcp4", "10.0.0.2:8080", "own address")
			pod.Serve(t, "tcp6", "[::1]:5432", "own loopback")
			world.Serve(t, "tcp4", "10.0.0.1:5432", "world")
			world.Serve(t, "tcp6", "[fd00::1]:5432", "world")
			world.Serve(t, "tcp4", "10.0.0.1:15001", "world")
			world.Serve(t, "udp4", "10.0.0.53:53", "world")
			apply(t, pod, dual())
			for _, tc := range []struct{ name, network, addr, want string }{
				{"raw TCP port", "tcp4", "198.18.0.10:5432", "tcp"},
				{"raw TCP port, IPv6", "tcp6", "[fd70:6f72:746f::10]:5432", "tcp"},
				{"another port of the same VIP", "tcp4", "198.18.0.10:5433", "http"},
				{"another port of the same VIP, IPv6", "tcp6", "[fd70:6f72:746f::10]:5433", "http"},
				{"the same port of another VIP", "tcp4", "198.18.0.11:5432", "http"},
				{"the same port of another VIP, IPv6", "tcp6", "[fd70:6f72:746f::11]:5432", "http"},
				{"last VIP", "tcp4", "198.19.255.255:80", "http"},
				{"a mesh port of a VIP", "tcp4", "198.18.0.10:15002", "http"},
				{"DNS port of a VIP", "tcp4", "198.18.0.10:53", "http"},
				{"loopback", "tcp4", "127.0.0.1:5432", "own loopback"},
				{"loopback, IPv6", "tcp6", "[::1]:5432", "own loopback"},
				{"loopback DNS", "udp4", "127.0.0.1:53", "own loopback"},
				{"own address (CNI-61)", "tcp4", "10.0.0.2:8080", "own address"},
				{"outside the mesh", "tcp4", "10.0.0.1:5432", "world"},
				{"outside the mesh, IPv6", "tcp6", "[fd00::1]:5432", "world"},
				{"outside the mesh, a mesh port", "tcp4", "10.0.0.1:15001", "world"},
				{"outside the mesh, closed port", "tcp4", "10.0.0.1:1", refused},
				{"DNS while nobody serves it", "udp4", "10.0.0.53:53", "world"},
			} {
				if got := pod.Get(t, tc.network, tc.addr); got != tc.want {
					t.Errorf("%s: %s %s reached %q, want %q", tc.name, tc.network, tc.addr, got, tc.want)
				}
			}
			if err := capture.Verify(pod.Path, dual()); err != nil {
				t.Error(err)
			}
			// Into the pod: what comes from outside is not captured (CNI-59).
			if got := world.Get(t, "tcp4", "10.0.0.2:8080"); got != "own address" {
				t.Errorf("from outside the pod: reached %q", got)
			}
		})
	}
}

// UDP to a service address is not meshed and not sent to a mesh port.
func TestPacketsUDPToVIP(t *testing.T) {
	pod, world := pod(t, true)
	serveMesh(t, pod)
	pod.Serve(t, "udp4", "127.0.0.1:15001", "http")
	pod.Serve(t, "udp4", "127.0.0.1:15002", "tcp")
	world.Serve(t, "udp4", "0.0.0.0:5432", "world")
	apply(t, pod, dual())
	conn, err := pod.Dial(t, nettest.Dialer{}, "udp4", "198.18.0.10:5432")
	if err != nil {
		t.Fatal(err)
	}
	if got := nettest.Ask(t, conn, 200*time.Millisecond); got == "http" || got == "tcp" {
		t.Errorf("UDP to a VIP reached %q", got)
	}
}

// Contract 1: excluded ports and ranges are never captured, not even inside the
// VIP range, and 53 among the ports leaves DNS alone.
func TestPacketsExcluded(t *testing.T) {
	pod, world := pod(t, true)
	serveMesh(t, pod)
	world.SetUp(t, "lo", "198.18.5.5/32", "198.18.0.10/32", "fd70:6f72:746f::5/128")
	world.Serve(t, "tcp4", "198.18.5.5:5432", "world")
	world.Serve(t, "tcp4", "198.18.0.10:22", "world")
	world.Serve(t, "tcp6", "[fd70:6f72:746f::5]:80", "world")
	world.Serve(t, "udp4", "10.0.0.53:53", "world")
	world.Serve(t, "udp4", "10.0.0.54:53", "world")
	cfg := dual()
	cfg.TCPPorts = append(cfg.TCPPorts, netip.MustParseAddrPort("198.18.5.5:5432"))
	cfg.ExcludePorts = []uint16{22}
	cfg.ExcludeRanges = []netip.Prefix{
		netip.MustParsePrefix("198.18.5.0/24"), netip.MustParsePrefix("fd70:6f72:746f::/124"),
		netip.MustParsePrefix("10.0.0.54/32"),
	}
	apply(t, pod, cfg)
	keepAlive(t, pod)
	check := func(cases map[string]string) {
		t.Helper()
		for addr, want := range cases {
			network := "tcp4"
			switch addr[0] {
			case '1':
				if addr[:2] == "10" {
					network = "udp4"
				}
			case '[':
				network = "tcp6"
			}
			if got := pod.Get(t, network, addr); got != want {
				t.Errorf("%s reached %q, want %q", addr, got, want)
			}
		}
	}
	check(map[string]string{
		"198.18.5.5:5432": "world", "198.18.0.10:22": "world", "[fd70:6f72:746f::5]:80": "world", "10.0.0.54:53": "world",
		"198.18.0.10:5432": "tcp", "198.18.6.5:5432": "http", "[fd70:6f72:746f::15]:80": "http", "10.0.0.53:53": "mesh dns",
	})
	cfg.ExcludePorts = []uint16{22, 53}
	apply(t, pod, cfg)
	check(map[string]string{"10.0.0.53:53": "world", "198.18.0.10:5432": "tcp"})
}

// CNI-52: a namespace with IPv6 disabled is captured like any other; one whose
// IPv6 works against what the registrar believed is refused, not let past.
func TestPacketsIPv6Disabled(t *testing.T) {
	pod, _ := pod(t, false)
	for _, dev := range []string{"all", "eth0", "lo"} {
		pod.Exec(t, "sysctl", "-qw", "net.ipv6.conf."+dev+".disable_ipv6=1")
	}
	pod.Serve(t, "tcp4", "127.0.0.1:15001", "http")
	for _, v6 := range []bool{true, false} {
		cfg := dual()
		cfg.IPv6 = v6
		apply(t, pod, cfg)
		if err := capture.Verify(pod.Path, cfg); err != nil {
			t.Error(err)
		}
		if got := pod.Get(t, "tcp4", "198.18.0.10:80"); got != "http" {
			t.Errorf("IPv4 with IPv6 disabled (IPv6: %t): reached %q", v6, got)
		}
	}
}

func TestPacketsIPv6Unexpected(t *testing.T) {
	pod, world := pod(t, true)
	pod.Serve(t, "tcp4", "127.0.0.1:15001", "http") // no listener on ::1
	world.SetUp(t, "lo", "fd70:6f72:746f::10/128")
	world.Serve(t, "tcp6", "[fd70:6f72:746f::10]:80", "world")
	if got := pod.Get(t, "tcp6", "[fd70:6f72:746f::10]:80"); got != "world" {
		t.Fatalf("before: reached %q", got)
	}
	cfg := dual()
	cfg.IPv6 = false
	apply(t, pod, cfg)
	if got := pod.Get(t, "tcp6", "[fd70:6f72:746f::10]:80"); got != "connection refused" {
		t.Errorf("IPv6 without a listener: reached %q, want it refused", got)
	}
}

// The route of the VIP range is ours only where no route led out before, and
// Remove takes it away with the table.
func TestRoutes(t *testing.T) {
	pod, _ := pod(t, false)
	const show = "proto 112"
	before := pod.Exec(t, "ip", "route", "show") + pod.Exec(t, "ip", "-6", "route", "show")
	for range 2 {
		apply(t, pod, dual())
		if got := pod.Exec(t, "ip", "route", "show", "proto", "112"); got != "198.18.0.0/15 dev eth0 scope link \n" {
			t.Errorf("IPv4 route = %q", got)
		}
		if got := pod.Exec(t, "ip", "-6", "route", "show", "proto", "112"); got != "fd70:6f72:746f::/64 dev eth0 metric 1024 pref medium\n" {
			t.Errorf("IPv6 route = %q", got)
		}
	}
	if err := capture.Remove(pod.Path); err != nil {
		t.Fatal(err)
	}
	if got := pod.Exec(t, "ip", "route", "show") + pod.Exec(t, "ip", "-6", "route", "show"); got != before {
		t.Errorf("routes after Remove:\n%s\nwant\n%s", got, before)
	}
	pod.Exec(t, "ip", "route", "add", "198.18.0.0/16", "via", "10.0.0.1")
	apply(t, pod, dual())
	if got := pod.Exec(t, "ip", "route", "show", "proto", "112"); got == "" {
		t.Errorf("a route of half the range was taken for all of it (%s)", show)
	}
	if err := capture.Remove(pod.Path); err != nil {
		t.Fatal(err)
	}
	pod.Route(t, "eth0", "10.0.0.1")
	pod.Route(t, "eth0", "fd00::1")
	apply(t, pod, dual())
	if got := pod.Exec(t, "ip", "route", "show", "proto", "112") + pod.Exec(t, "ip", "-6", "route", "show", "proto", "112"); got != "" {
		t.Errorf("a route was added beside a default route: %q", got)
	}
}

// keepAlive plays a mesh-DNS process that lives until the test ends. It refreshes
// often, so that a slow machine does not let the redirection expire; pause stops
// that, and returns when no refresh is under way.
func keepAlive(t *testing.T, pod *nettest.Namespace) (alive *capture.Alive, pause func()) {
	t.Helper()
	alive, err := capture.OpenAlive(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = alive.Close() })
	if err := alive.Refresh(); err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(capture.AliveTimeout / 5)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if err := alive.Refresh(); err != nil {
					t.Errorf("Refresh: %v", err)
				}
			}
		}
	}()
	pause = sync.OnceFunc(func() {
		close(stop)
		<-stopped
	})
	t.Cleanup(pause)
	return alive, pause
}

// resolver is one socket of a client that asks a DNS server outside.
func resolver(t *testing.T, pod *nettest.Namespace, d nettest.Dialer, network, addr string) net.Conn {
	t.Helper()
	conn, err := pod.Dial(t, d, network, addr)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}
