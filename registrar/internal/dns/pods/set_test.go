package pods_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// address asks for payments.aether.internal and returns the first address, or
// what went wrong.
func address(tb testing.TB, ns *dnstest.Namespace, network, addr string, qtype uint16) string {
	tb.Helper()
	m, err := ns.Ask(tb, network, addr, dnstest.Question("payments.aether.internal", qtype))
	switch {
	case err != nil:
		return err.Error()
	case len(m.Answer) == 0:
		return dns.RcodeToString[m.Rcode]
	}
	return strings.Fields(m.Answer[0].String())[4]
}

// A pod is served on its own loopback by UDP and TCP, on both families when it
// has IPv6 and on IPv4 alone when not; then AAAA has no data, and nothing listens
// on [::1]. Apply returns when the sockets are open.
func TestServe(t *testing.T) {
	w := newWorld(t, nil)
	dual, v4 := dnstest.NewNamespace(t), dnstest.NewNamespace(t)
	w.put(t, table.Pod{Key: key("dual"), Netns: dual.Path, IPv6: true}, table.Pod{Key: key("v4"), Netns: v4.Path})
	for _, tc := range []struct {
		name          string
		ns            *dnstest.Namespace
		network, addr string
		qtype         uint16
		want          string
	}{
		{name: "dual", ns: dual, network: "udp4", addr: addr4, qtype: dns.TypeA, want: "198.18.0.1"},
		{name: "dual", ns: dual, network: "tcp4", addr: addr4, qtype: dns.TypeA, want: "198.18.0.1"},
		{name: "dual", ns: dual, network: "udp6", addr: addr6, qtype: dns.TypeAAAA, want: "fd70:6f72:746f::1"},
		{name: "dual", ns: dual, network: "tcp6", addr: addr6, qtype: dns.TypeAAAA, want: "fd70:6f72:746f::1"},
		{name: "v4", ns: v4, network: "udp4", addr: addr4, qtype: dns.TypeA, want: "198.18.0.1"},
		{name: "v4", ns: v4, network: "udp4", addr: addr4, qtype: dns.TypeAAAA, want: "NOERROR"},
		{name: "v4", ns: v4, network: "udp6", addr: addr6, qtype: dns.TypeA, want: "connection refused"},
		{name: "v4", ns: v4, network: "tcp6", addr: addr6, qtype: dns.TypeA, want: "connection refused"},
	} {
		if got := address(t, tc.ns, tc.network, tc.addr, tc.qtype); !strings.HasSuffix(got, tc.want) {
			t.Errorf("%s, %s, %s: %q, want %q", tc.name, tc.network, dns.TypeToString[tc.qtype], got, tc.want)
		}
	}
	if st := w.status(t, "dual"); st.State != pods.Serving || st.Err != "" {
		t.Errorf("status %+v, want serving", st)
	}
	if _, err := net.Dial("tcp", addr4); err == nil {
		t.Error("something listens in the node's namespace")
	}
}

// A new configuration of a running pod: other resolvers keep the sockets and
// their connections, another family or path opens them anew; a pod that is
// disabled has none.
func TestReconfigure(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	conf := table.Pod{Key: key("a"), Netns: ns.Path}
	w.put(t, conf)
	conn, err := ns.Dial(t, "tcp4", addr4)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() string {
		t.Helper()
		m, err := dnstest.Exchange(t, conn, dnstest.Question("example.com", dns.TypeA), dnstest.Patience)
		if err != nil {
			return err.Error()
		}
		return dns.RcodeToString[m.Rcode]
	}
	if got := ask(); got != "NOERROR" {
		t.Errorf("first resolvers: %s", got)
	}
	other := dnstest.NewResolver(t, nil, "127.0.0.1:0")
	other.Handle(dnstest.Rcode(dns.RcodeNameError))
	conf.Upstreams = []netip.AddrPort{other.Addr}
	w.put(t, conf)
	if got := ask(); got != "NXDOMAIN" {
		t.Errorf("other resolvers, same connection: %s", got)
	}
	conf.IPv6 = true
	w.put(t, conf)
	if got := address(t, ns, "udp6", addr6, dns.TypeAAAA); got != "fd70:6f72:746f::1" {
		t.Errorf("with IPv6: %s", got)
	}
	conf.Disabled = true
	w.put(t, conf)
	if got := address(t, ns, "udp4", addr4, dns.TypeA); !strings.Contains(got, "refused") {
		t.Errorf("disabled: %s", got)
	}
	if st := w.status(t, "a"); st.State != pods.Disabled {
		t.Errorf("status %+v, want disabled", st)
	}
	if _, withdrawn, open := w.alive(ns.Path).counts(); withdrawn != 2 || open != 0 {
		t.Errorf("withdrawn %d times with %d captures open, want 2 and 0", withdrawn, open)
	}
	conf.Disabled = false
	w.put(t, conf)
	if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
		t.Errorf("enabled again: %s", got)
	}
}

// What cannot be opened is reported with the path and the reason, is tried again,
// and never touches the other pods.
func TestOpenErrors(t *testing.T) {
	w := newWorld(t, nil)
	empty := filepath.Join(t.TempDir(), "pin")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	taken := dnstest.NewNamespace(t)
	var squatter net.PacketConn
	taken.Do(t, func() (err error) {
		squatter, err = net.ListenPacket("udp4", addr4)
		return err
	})
	ns := dnstest.NewNamespace(t)
	w.put(t,
		table.Pod{Key: key("missing"), Netns: "/run/netns/no-such"}, table.Pod{Key: key("empty"), Netns: empty},
		table.Pod{Key: key("own"), Netns: "/proc/thread-self/ns/net"}, table.Pod{Key: key("taken"), Netns: taken.Path},
		table.Pod{Key: key("good"), Netns: ns.Path},
	)
	for name, want := range map[string]string{
		"missing": "open network namespace: open /run/netns/no-such: no such file or directory",
		"empty":   "open network namespace " + empty + ": nothing is mounted there",
		"own":     "open network namespace /proc/thread-self/ns/net: it is the node's own",
		"taken":   "address already in use (something in the pod, or another mesh-DNS process, has this port; contract 1 reserves it)",
	} {
		if st := w.status(t, name); st.State != pods.Failed || !strings.Contains(st.Err, want) {
			t.Errorf("%s: %+v, want %q", name, st, want)
		}
		if refreshed, _, _ := w.alive(map[string]string{"taken": taken.Path, "empty": empty}[name]).counts(); refreshed != 0 {
			t.Errorf("%s: captured though nothing serves it", name)
		}
	}
	if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
		t.Errorf("the other pod: %s", got)
	}
	_ = squatter.Close()
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "taken"); st.State != pods.Serving {
			return fmt.Sprintf("the port is free: %+v, want serving", st)
		}
		return ""
	})
	if got := address(t, taken, "tcp4", addr4, dns.TypeA); got != "198.18.0.1" {
		t.Errorf("after the port was free: %s", got)
	}
}

// When a pod is removed nothing of ours keeps its namespace in existence: the
// kernel takes the namespace, and with it the interface pair, away. Also with a
// TCP connection open.
func TestRemoveFreesNamespace(t *testing.T) {
	w := newWorld(t, nil)
	peer := dnstest.NewNamespace(t)
	ns := dnstest.NewNamespace(t)
	netnstest.Connect(t, "eth0", netnstest.End{In: ns.Namespace}, netnstest.End{In: peer.Namespace})
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path, IPv6: true})
	if got := address(t, ns, "tcp6", addr6, dns.TypeA); got != "198.18.0.1" {
		t.Fatal(got)
	}
	conn, err := ns.Dial(t, "tcp4", addr4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dnstest.Exchange(t, conn, dnstest.Question("payments.aether.internal", dns.TypeA), dnstest.Patience); err != nil {
		t.Fatal(err)
	}
	w.remove(t, "a")
	_ = conn.Close()
	ns.Unmount(t)
	dnstest.Eventually(t, func() string {
		if peer.HasLink(t, "eth0") {
			return "the namespace of the removed pod still exists"
		}
		return ""
	})
	if _, ok := w.set.Status(key("a")); ok {
		t.Error("the removed pod is still in the set")
	}
	if n := w.metric(t, "portolan_dns_pods_serving") + w.metric(t, "portolan_dns_pods_captured") + w.metric(t, "portolan_dns_tcp_connections"); n != 0 {
		t.Errorf("the gauges add up to %v, want 0", n)
	}
}

// A pod that ends while the registrar is away is let go of all the same, once its
// path is gone; another namespace at the path is served instead.
func TestNamespaceVanishes(t *testing.T) {
	w := newWorld(t, nil)
	peer := dnstest.NewNamespace(t)
	ns := dnstest.NewNamespace(t)
	netnstest.Connect(t, "eth0", netnstest.End{In: ns.Namespace}, netnstest.End{In: peer.Namespace})
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
		t.Fatal(got)
	}
	ns.Unmount(t)
	dnstest.Eventually(t, func() string {
		if peer.HasLink(t, "eth0") {
			return "the namespace of the vanished pod still exists"
		}
		return ""
	})
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "a"); st.State != pods.Failed || !strings.Contains(st.Err, "no such file or directory") {
			return fmt.Sprintf("%+v, want failed", st)
		}
		return ""
	})
	ns.Mount(t)
	dnstest.Eventually(t, func() string {
		if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
			return "the new namespace: " + got
		}
		return ""
	})
}

// A hundred pods are served, and let go of, together.
func TestManyPods(t *testing.T) {
	w := newWorld(t, nil)
	const n = 100
	var list []table.Pod
	var names []string
	var spaces []*dnstest.Namespace
	for i := range n {
		ns := dnstest.NewNamespace(t)
		name := fmt.Sprintf("p%d", i)
		spaces, names = append(spaces, ns), append(names, name)
		list = append(list, table.Pod{Key: key(name), Netns: ns.Path, IPv6: true})
	}
	w.put(t, list...)
	for i, ns := range spaces {
		if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
			t.Fatalf("pod %d: %s", i, got)
		}
	}
	dnstest.Eventually(t, func() string {
		if got := w.metric(t, "portolan_dns_pods_captured"); got != n {
			return fmt.Sprintf("%v pods are captured, want %d", got, n)
		}
		return ""
	})
	w.remove(t, names...)
	for i, ns := range spaces {
		if got := address(t, ns, "udp4", addr4, dns.TypeA); !strings.Contains(got, "refused") {
			t.Fatalf("removed pod %d: %s", i, got)
		}
		if _, withdrawn, open := w.alive(ns.Path).counts(); withdrawn != 1 || open != 0 {
			t.Fatalf("removed pod %d: withdrawn %d times, %d captures open", i, withdrawn, open)
		}
	}
}
