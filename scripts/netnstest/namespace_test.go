package netnstest_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// The two ends of a pair reach each other in both families as soon as Connect
// returns, commands run inside, and a namespace that is unmounted is freed: the
// other end of its pair goes.
func TestConnect(t *testing.T) {
	pod, world := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, "eth1",
		netnstest.End{In: pod, Addrs: []string{"10.0.0.2/24", "fd00::2/64"}},
		netnstest.End{In: world, Addrs: []string{"10.0.0.1/24", "fd00::1/64"}})
	pod.Route(t, "eth1", "10.0.0.1")
	for _, addr := range []string{"10.0.0.1:80", "[fd00::1]:80"} {
		world.Listen(t, net.ListenConfig{}, "tcp", addr)
		pod.Do(t, func() error {
			conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(context.Background(), "tcp", addr)
			if err != nil {
				return err
			}
			return conn.Close()
		})
	}
	if got := pod.Exec(t, "ip", "route", "show", "default"); !strings.HasPrefix(got, "default via 10.0.0.1 dev eth1") {
		t.Errorf("default route: %q", got)
	}
	if out, err := pod.Output(t, "ip", "link", "show", "dev", "eth2"); err == nil {
		t.Errorf("a failed command printed %q and no error", out)
	}
	if !world.HasLink(t, "eth1") {
		t.Fatal("the pair has one end only")
	}
	pod.Unmount(t)
	deadline := time.Now().Add(15 * time.Second)
	for world.HasLink(t, "eth1") {
		if time.Now().After(deadline) {
			t.Fatal("the namespace was unmounted and not freed")
		}
		time.Sleep(time.Millisecond)
	}
	pod.Mount(t)
	if pod.HasLink(t, "eth1") {
		t.Error("the namespace mounted again is the old one")
	}
}
