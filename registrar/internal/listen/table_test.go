package listen_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// For a listener on each kind of address Listens says what a connection to
// 127.0.0.1 finds, and a port that only others reach is reported with its
// addresses (contract 4.3).
func TestListens(t *testing.T) {
	tests := []struct {
		name       string
		addr       string
		o          listenOptions
		want       bool
		only       string
		everywhere bool
	}{
		{name: "127.0.0.1", addr: "127.0.0.1:9090", want: true},
		{name: "0.0.0.0", addr: "0.0.0.0:9090", want: true, everywhere: true},
		{name: "dual-stack ::", addr: "[::]:9090", want: true, everywhere: true},
		{name: "IPv6-only ::", addr: "[::]:9090", o: listenOptions{v6only: true}, only: "[::]"},
		{name: "::1", addr: "[::1]:9090", only: "[::1]"},
		{name: "IPv4-mapped 127.0.0.1", addr: "[::ffff:127.0.0.1]:9090", want: true},
		{name: "IPv4-mapped 0.0.0.0", addr: "[::ffff:0.0.0.0]:9090", want: true, everywhere: true},
		{name: "another loopback address", addr: "127.0.0.2:9090", only: "[127.0.0.2]"},
		{name: "the pod's IPv4 address", addr: podAddress + ":9090", only: "[10.77.0.2]"},
		{name: "the pod's IPv6 address", addr: "[fd00:77::2]:9090", only: "[fd00:77::2]"},
		{name: "0.0.0.0 on eth0", addr: "0.0.0.0:9090", o: listenOptions{device: "eth0"}, only: "[0.0.0.0]"},
		{name: "0.0.0.0 on lo", addr: "0.0.0.0:9090", o: listenOptions{device: "lo"}, want: true},
		{name: ":: on eth0", addr: "[::]:9090", o: listenOptions{device: "eth0"}, only: "[::]"},
	}
	pod := newPod(t)
	table := openTable(t, pod.Path)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := listenAt(t, pod, tt.addr, tt.o)
			s := read(t, table)
			if got := s.Listens(9090); got != tt.want {
				t.Errorf("Listens %v, want %v", got, tt.want)
			}
			if got := reaches(t, pod, 9090); got != tt.want {
				t.Errorf("a connection to 127.0.0.1:9090 succeeds: %v; the test's expectation is wrong", got)
			}
			only := ""
			if a := s.OnlyOn(9090); a != nil {
				only = fmt.Sprint(a)
			}
			if only != tt.only {
				t.Errorf("OnlyOn %q, want %q", only, tt.only)
			}
			if got := s.Everywhere(9090); got != tt.everywhere {
				t.Errorf("Everywhere %v, want %v", got, tt.everywhere)
			}
			found, err := table.Lookup([]uint16{9090, 9091})
			if err != nil {
				t.Fatal(err)
			}
			if got := found.Listens(9090); got != tt.want || found.OnlyOn(9090) != nil || found.Listens(9091) {
				t.Errorf("looked up: Listens %v, OnlyOn %v; want %v", got, found.OnlyOn(9090), tt.want)
			}
			if got := found.Everywhere(9090); got != tt.everywhere {
				t.Errorf("looked up: Everywhere %v, want %v", got, tt.everywhere)
			}
			if s.Listens(9091) || s.Listens(9089) || s.OnlyOn(9091) != nil {
				t.Error("another port listens")
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if s := read(t, table); s.Len() != 0 || s.Listens(9090) || s.OnlyOn(9090) != nil {
				t.Error("still there after the listener was closed")
			}
		})
	}
}

// Several listeners of one port are taken together: one that is reached is enough,
// and the others are reported only without it.
func TestListensSeveral(t *testing.T) {
	pod := newPod(t)
	table := openTable(t, pod.Path)
	listenAt(t, pod, "[::1]:9090", listenOptions{})
	listenAt(t, pod, podAddress+":9090", listenOptions{})
	s := read(t, table)
	want := []netip.Addr{netip.MustParseAddr(podAddress), netip.MustParseAddr("::1")}
	if diff := cmp.Diff(want, s.OnlyOn(9090), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); s.Listens(9090) || diff != "" {
		t.Errorf("Listens %v, OnlyOn %s", s.Listens(9090), diff)
	}
	listenAt(t, pod, "127.0.0.1:9090", listenOptions{})
	if s := read(t, table); !s.Listens(9090) || s.OnlyOn(9090) != nil {
		t.Errorf("Listens %v, OnlyOn %v", s.Listens(9090), s.OnlyOn(9090))
	}
}

// The mesh's own listeners are found by their exact addresses (contract 4.2), and
// a server with one socket per worker counts once.
func TestBound(t *testing.T) {
	pod := newPod(t)
	table := openTable(t, pod.Path)
	for range 4 {
		listenAt(t, pod, "[::]:15008", listenOptions{reuse: true})
		listenAt(t, pod, "127.0.0.1:15001", listenOptions{reuse: true})
		listenAt(t, pod, "[::1]:15001", listenOptions{reuse: true})
	}
	listenAt(t, pod, "0.0.0.0:15002", listenOptions{})
	listenAt(t, pod, "127.0.0.1:15003", listenOptions{device: "lo"})
	s := read(t, table)
	for addr, want := range map[string]bool{
		"[::]:15008":               true,
		"0.0.0.0:15008":            false,
		"127.0.0.1:15001":          true,
		"[::ffff:127.0.0.1]:15001": true,
		"[::1]:15001":              true,
		"127.0.0.1:15002":          false, // an app's wildcard is not the mesh's listener
		"0.0.0.0:15002":            true,
		"127.0.0.1:15003":          false, // bound to an interface
		"127.0.0.1:15004":          false,
	} {
		if got := s.Bound(netip.MustParseAddrPort(addr)); got != want {
			t.Errorf("Bound(%s) = %v, want %v", addr, got, want)
		}
	}
	if got := s.Len(); got != 5 {
		t.Errorf("%d different listeners, want 5", got)
	}
	if !s.Everywhere(15008) || s.Everywhere(15001) {
		t.Error("15008 must listen everywhere and 15001 not")
	}
	found, err := table.Lookup([]uint16{15008, 15001, 15002, 15003, 15004})
	if err != nil {
		t.Fatal(err)
	}
	if !found.Everywhere(15008) || !found.Bound(netip.MustParseAddrPort("127.0.0.1:15001")) || found.Bound(netip.MustParseAddrPort("127.0.0.1:15002")) || found.Len() != 4 {
		t.Errorf("looked up %d listeners", found.Len())
	}
}

// Sockets in other states are no listeners: bound but not listening, connected,
// half-closed, in TIME_WAIT.
func TestOtherStates(t *testing.T) {
	pod := newPod(t)
	table := openTable(t, pod.Path)
	var fd int
	pod.Do(t, func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet4{Port: 9001, Addr: [4]byte{127, 0, 0, 1}})
	})
	t.Cleanup(func() { _ = unix.Close(fd) })

	l := listenAt(t, pod, "127.0.0.1:9002", listenOptions{})
	client, server := connect(t, pod, l)
	defer func() { _ = client.Close() }()
	defer func() { _ = server.Close() }()
	closing, rest := connect(t, pod, l)
	if err := errors.Join(closing.Close(), rest.Close()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if s := read(t, table); s.Len() != 0 {
		t.Errorf("%d listeners, want none", s.Len())
	}
	if s, err := table.Lookup([]uint16{9001, 9002}); err != nil || s.Len() != 0 {
		t.Errorf("%d listeners looked up, %v; want none", s.Len(), err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	if s := read(t, table); !s.Listens(9001) || s.Len() != 1 {
		t.Error("not there after listen")
	}
}

// Another namespace's listeners are never seen.
func TestOtherNamespace(t *testing.T) {
	pod, other := newPod(t), newPod(t)
	table := openTable(t, pod.Path)
	listenAt(t, other, "0.0.0.0:9090", listenOptions{})
	if s := read(t, table); s.Len() != 0 {
		t.Error("a listener of another namespace is seen")
	}
	listenAt(t, pod, "0.0.0.0:9091", listenOptions{})
	if s := read(t, table); s.Len() != 1 || !s.Listens(9091) {
		t.Error("the own listener is not seen")
	}
}

// A namespace without IPv6 is read like any other (dataplane decision 2).
func TestWithoutIPv6(t *testing.T) {
	pod := netnstest.New(t)
	pod.Do(t, func() error {
		// /proc/sys shows the namespace of the thread that opens it.
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0)
	})
	table := openTable(t, pod.Path)
	listenAt(t, pod, "127.0.0.1:9090", listenOptions{})
	listenAt(t, pod, "[::]:9091", listenOptions{})
	s := read(t, table)
	if !s.Listens(9090) || !s.Listens(9091) || s.Len() != 2 {
		t.Errorf("Listens %v, %v", s.Listens(9090), s.Listens(9091))
	}
	for _, port := range []uint16{9090, 9091} {
		if !reaches(t, pod, port) {
			t.Errorf("no connection to %d; the test's expectation is wrong", port)
		}
	}
}

// A table with many more listeners than fit in one datagram is read whole.
func TestManyListeners(t *testing.T) {
	pod := newPod(t)
	table := openTable(t, pod.Path)
	const n = 500
	for i := range n {
		listenAt(t, pod, fmt.Sprintf("127.0.0.1:%d", 20000+i), listenOptions{})
		listenAt(t, pod, fmt.Sprintf("[::1]:%d", 20000+i), listenOptions{})
	}
	s := read(t, table)
	if s.Len() != 2*n {
		t.Errorf("%d listeners, want %d", s.Len(), 2*n)
	}
	var ports []uint16
	for i := range n {
		ports = append(ports, uint16(20000+i))
		if !s.Listens(ports[i]) {
			t.Fatalf("port %d is missing", ports[i])
		}
	}
	if s, err := table.Lookup(ports); err != nil || s.Len() != n {
		t.Errorf("%d listeners looked up, %v; want %d", s.Len(), err, n)
	}
}
