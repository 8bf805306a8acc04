package dns_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/dns"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

const (
	// real is the resolver that the pod's resolv.conf names.
	real4 = "10.0.0.53:53"
	real6 = "[fd00::53]:53"
	// fromUpstream and fromReal are what the two resolvers answer to everything.
	fromUpstream = "192.0.2.53"
	fromReal     = "192.0.2.99"
	payments4    = "198.18.0.1"
	payments6    = "fd70:6f72:746f::1"
)

// scene is a pod with real capture, its resolver outside, and the resolver that
// mesh DNS forwards to.
type scene struct {
	dir           string
	pod, outside  *dnstest.Namespace
	upstream, old *dnstest.Resolver
}

func key(name string) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: name, IfName: "eth0"}
}

func newScene(tb testing.TB) *scene {
	tb.Helper()
	s := &scene{dir: tb.TempDir(), pod: dnstest.NewNamespace(tb), outside: dnstest.NewNamespace(tb)}
	netnstest.Connect(tb, "eth0",
		netnstest.End{In: s.pod.Namespace, Addrs: []string{"10.0.0.2/24", "fd00::2/64"}},
		netnstest.End{In: s.outside.Namespace, Addrs: []string{"10.0.0.1/24", "10.0.0.53/24", "10.0.0.54/24", "fd00::53/64"}})
	s.pod.Route(tb, "eth0", "10.0.0.1")
	s.upstream = dnstest.NewResolver(tb, nil, "127.0.0.1:0")
	for _, addr := range []string{real4, real6, "10.0.0.54:53"} {
		s.old = dnstest.NewResolver(tb, s.outside, addr)
		s.old.Handle(func(w mdns.ResponseWriter, q *mdns.Msg) {
			m := new(mdns.Msg)
			m.SetReply(q)
			m.Answer = []mdns.RR{&mdns.A{Hdr: mdns.RR_Header{Name: q.Question[0].Name, Rrtype: mdns.TypeA, Class: mdns.ClassINET}, A: net.IPv4(192, 0, 2, 99)}}
			_ = w.WriteMsg(m)
		})
	}
	// The link works before anything is measured: a neighbour that is not known
	// yet may cost a second.
	for network, server := range map[string]string{"udp4": real4, "udp6": real6} {
		dnstest.Eventually(tb, func() string {
			if got := s.resolve(tb, network, server, "example.com", mdns.TypeA); got != fromReal {
				return "without the mesh: " + got
			}
			return ""
		})
	}
	cfg := capture.Config{
		VIPRanges: []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")},
		DNS:       true, IPv6: true,
	}
	if err := capture.Apply(s.pod.Path, cfg); err != nil {
		tb.Fatal(err)
	}
	return s
}

func (s *scene) podConfig() dns.Pod {
	return dns.Pod{Key: key("pod"), Netns: s.pod.Path, IPv6: true}
}

// start runs the process inside the test, and returns a function that ends it
// and waits.
func (s *scene) start(tb testing.TB, change func(*dns.Config)) (stop func()) {
	tb.Helper()
	cfg := config(s.dir)
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := dns.Run(ctx, cfg); err != nil {
			tb.Error(err)
		}
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	tb.Cleanup(stop)
	return stop
}

// startProcess runs it as a process of its own.
func (s *scene) startProcess(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), processEnv+"="+s.dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// client runs a registrar's client with payments and the pod, until stop.
func (s *scene) client(tb testing.TB) (c *dns.Client, stop func()) {
	tb.Helper()
	c, err := dns.NewClient(dns.ClientConfig{
		Socket: s.dir + "/run/dns.sock", Log: slog.New(slog.DiscardHandler),
		Settings: dns.Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{s.upstream.Addr}},
	})
	if err != nil {
		tb.Fatal(err)
	}
	vip := dns.VIP{V4: netip.MustParseAddr(payments4), V6: netip.MustParseAddr(payments6)}
	if err := c.SetNames(map[string]dns.VIP{"payments.aether.internal": vip, "payments.default.aether.internal": vip}); err != nil {
		tb.Fatal(err)
	}
	if err := c.SetPods([]dns.Pod{s.podConfig()}); err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = c.Run(ctx) })
	stop = func() {
		cancel()
		running.Wait()
	}
	tb.Cleanup(stop)
	return c, stop
}

// serve starts everything and waits until the pod is served and captured.
func (s *scene) serve(tb testing.TB) *dns.Client {
	tb.Helper()
	c, _ := s.client(tb)
	s.awaitPod(tb, c)
	s.awaitCaptured(tb)
	return c
}

func (s *scene) awaitPod(tb testing.TB, c *dns.Client) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), dnstest.Patience)
	defer cancel()
	if err := c.AwaitPod(ctx, key("pod")); err != nil {
		tb.Fatal(err)
	}
}

// awaitCaptured waits until a mesh name is answered through the redirection.
func (s *scene) awaitCaptured(tb testing.TB) {
	tb.Helper()
	dnstest.Eventually(tb, func() string {
		if got := s.resolve(tb, "udp4", real4, "payments.aether.internal", mdns.TypeA); got != payments4 {
			return "payments.aether.internal through the redirection: " + got
		}
		return ""
	})
}

// resolve asks from the pod with a socket of its own and returns the address, or
// what came instead.
func (s *scene) resolve(tb testing.TB, network, server, name string, qtype uint16) string {
	tb.Helper()
	conn, err := s.pod.Dial(tb, network, server)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	return ask(tb, conn, dnstest.Question(name, qtype), dnstest.Patience)
}

func ask(tb testing.TB, conn *mdns.Conn, q *mdns.Msg, wait time.Duration) string {
	tb.Helper()
	m, err := dnstest.Exchange(tb, conn, q, wait)
	switch {
	case err != nil:
		return err.Error()
	case len(m.Answer) == 0:
		return mdns.RcodeToString[m.Rcode]
	}
	return strings.Fields(m.Answer[0].String())[4]
}

// Contract 2 and dataplane decision 9, through the pod's real rules: whatever
// resolver a client asks, by UDP and TCP, on both families, mesh names get their
// VIP and the rest comes from the upstream resolver.
func TestResolveThroughCapture(t *testing.T) {
	s := newScene(t)
	s.start(t, nil)
	s.serve(t)
	for _, server := range []string{real4, real6} {
		for _, transport := range []string{"udp", "tcp"} {
			network := transport + map[bool]string{true: "6", false: "4"}[server == real6]
			for _, tc := range []struct {
				name  string
				qtype uint16
				want  string
			}{
				{name: "payments.aether.internal", qtype: mdns.TypeA, want: payments4},
				{name: "Payments.default.AETHER.internal", qtype: mdns.TypeAAAA, want: payments6},
				{name: "ghost.aether.internal", qtype: mdns.TypeA, want: "NXDOMAIN"},
				{name: "pod-0.payments.default.aether.internal", qtype: mdns.TypeA, want: "NXDOMAIN"},
				{name: "payments.aether.internal.default.svc.cluster.local", qtype: mdns.TypeA, want: fromUpstream},
				{name: "example.com", qtype: mdns.TypeA, want: fromUpstream},
			} {
				if got := s.resolve(t, network, server, tc.name, tc.qtype); got != tc.want {
					t.Errorf("%s, %s, %s: %s, want %s", network, tc.name, mdns.TypeToString[tc.qtype], got, tc.want)
				}
			}
		}
	}
}

// What programs use: the resolver of the C library, and Go's own.
func TestResolversOfPrograms(t *testing.T) {
	s := newScene(t)
	s.start(t, nil)
	s.serve(t)
	if err := os.WriteFile("/etc/resolv.conf", []byte("nameserver 10.0.0.53\nsearch default.svc.cluster.local svc.cluster.local\noptions ndots:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ database, name, want string }{
		{"ahostsv4", "payments.aether.internal", payments4},
		{"ahostsv4", "PAYMENTS.aether.internal.", payments4},
		{"ahostsv6", "payments.default.aether.internal", payments6},
		{"ahostsv4", "example.com", fromUpstream},
	} {
		if out, err := s.pod.Output(t, "getent", tc.database, tc.name); err != nil || !strings.HasPrefix(out, tc.want+" ") {
			t.Errorf("getent %s %s: %q, %v; want %s", tc.database, tc.name, out, err, tc.want)
		}
	}
	if out, err := s.pod.Output(t, "getent", "ahostsv4", "ghost.aether.internal."); err == nil {
		t.Errorf("getent ghost: %q", out)
	}
	r := net.Resolver{PreferGo: true, Dial: func(_ context.Context, network, _ string) (net.Conn, error) {
		conn, err := s.pod.Dial(t, network+"4", real4) //nolint:contextcheck // the test's own is used
		if err != nil {
			return nil, err
		}
		return conn.Conn, nil
	}}
	for name, want := range map[string]string{"payments.aether.internal.": payments4, "example.com.": fromUpstream} {
		if got, err := r.LookupNetIP(t.Context(), "ip4", name); err != nil || len(got) != 1 || got[0].Unmap().String() != want {
			t.Errorf("Go's resolver, %s: %v, %v; want %s", name, got, err, want)
		}
	}
	_, err := r.LookupNetIP(t.Context(), "ip4", "ghost.aether.internal.")
	if dnsErr := (*net.DNSError)(nil); !asDNSError(err, &dnsErr) || !dnsErr.IsNotFound {
		t.Errorf("Go's resolver, ghost: %v, want not found", err)
	}
}

// CNI-60: two clients with one source port ask two resolvers; both get their
// answers, each from the resolver it asked. And no query of ours comes back to
// us: the resolver that we forward to is asked once for each.
func TestSourcePortsAndLoops(t *testing.T) {
	s := newScene(t)
	s.start(t, nil)
	s.serve(t)
	var conns []*mdns.Conn
	s.pod.Do(t, func() error {
		d := net.Dialer{Timeout: dnstest.Patience, LocalAddr: &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 40053}, Control: reuseAddr}
		for _, server := range []string{real4, "10.0.0.54:53"} {
			conn, err := d.DialContext(t.Context(), "udp4", server)
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = conn.Close() })
			conns = append(conns, &mdns.Conn{Conn: conn})
		}
		return nil
	})
	before := s.upstream.UDP.Load()
	for range 5 {
		for i, conn := range conns {
			if got := ask(t, conn, dnstest.Question("payments.aether.internal", mdns.TypeA), dnstest.Patience); got != payments4 {
				t.Errorf("resolver %d: %s", i, got)
			}
			if got := ask(t, conn, dnstest.Question("example.com", mdns.TypeA), dnstest.Patience); got != fromUpstream {
				t.Errorf("resolver %d, other name: %s", i, got)
			}
		}
	}
	if got := s.upstream.UDP.Load() - before; got != 10 {
		t.Errorf("the upstream resolver was asked %d times for 10 queries", got)
	}
}

// Contract 0, 5, MESH-46: the process is killed while a client holds its socket.
// Names outside the mesh resolve again once the capture's time-out of 5 s is over, on
// the very same socket. The process comes back without a registrar and serves its last table at once.
func TestKilledAndRestarted(t *testing.T) {
	s := newScene(t)
	process := s.startProcess(t)
	c, stop := s.client(t)
	s.awaitPod(t, c)
	s.awaitCaptured(t)
	held, err := s.pod.Dial(t, "udp4", real4)
	if err != nil {
		t.Fatal(err)
	}
	held6, err := s.pod.Dial(t, "udp6", real6)
	if err != nil {
		t.Fatal(err)
	}
	for _, conn := range []*mdns.Conn{held, held6} {
		if got := ask(t, conn, dnstest.Question("payments.aether.internal", mdns.TypeA), dnstest.Patience); got != payments4 {
			t.Fatal(got)
		}
	}
	awaitFile(t, s.dir+"/lib/dns.json", "c", "payments.default")
	stop()
	// What bounds the outage is the kernel's time-out, which nobody refreshes any more.
	s.pod.Do(t, func() error {
		set, err := exec.CommandContext(t.Context(), "nft", "list", "set", "inet", "portolan", "alive").CombinedOutput()
		if err == nil && !strings.Contains(string(set), "timeout 5s") {
			err = errors.New("it has no time-out of 5 s")
		}
		if err != nil {
			return fmt.Errorf("the capture of look-ups is %s: %w", set, err)
		}
		return nil
	})
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = process.Wait()
	start := time.Now()
	for _, conn := range []*mdns.Conn{held, held6} {
		dnstest.Eventually(t, func() string {
			if got := ask(t, conn, dnstest.Question("example.com", mdns.TypeA), 100*time.Millisecond); got != fromReal {
				return "another name with the process gone: " + got
			}
			return ""
		})
	}
	t.Logf("other names resolved %s after the process was killed", time.Since(start))

	s.startProcess(t)
	start = time.Now()
	for ask(t, held, dnstest.Question("payments.aether.internal", mdns.TypeA), time.Second) != payments4 {
		if time.Since(start) > dnstest.Patience {
			t.Fatal("the last table is not served")
		}
	}
	t.Logf("mesh names resolved %s after the process was started", time.Since(start))
	if got := ask(t, held, dnstest.Question("example.com", mdns.TypeA), dnstest.Patience); got != fromUpstream {
		t.Errorf("another name after the restart: %s", got)
	}
}

// A graceful stop withdraws the capture first: names outside the mesh resolve
// at once, on held sockets too.
func TestGracefulStop(t *testing.T) {
	s := newScene(t)
	process := s.startProcess(t)
	s.serve(t)
	held, err := s.pod.Dial(t, "udp4", real4)
	if err != nil {
		t.Fatal(err)
	}
	if got := ask(t, held, dnstest.Question("example.com", mdns.TypeA), dnstest.Patience); got != fromUpstream {
		t.Fatal(got)
	}
	if err := process.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := process.Wait(); err != nil {
		t.Errorf("the process ended with %v", err)
	}
	if got := ask(t, held, dnstest.Question("example.com", mdns.TypeA), dnstest.Patience); got != fromReal {
		t.Errorf("held socket right after the stop: %s", got)
	}
	if got := s.resolve(t, "tcp4", real4, "example.com", mdns.TypeA); got != fromReal {
		t.Errorf("TCP right after the stop: %s", got)
	}
	if _, err := os.Stat(s.dir + "/run/dns.sock"); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// With the registrar away everything known goes on; when it is back, what changed
// meanwhile is made up for, and a pod that is removed has its own DNS again.
func TestRegistrarAway(t *testing.T) {
	s := newScene(t)
	s.start(t, nil)
	c, stop := s.client(t)
	s.awaitPod(t, c)
	s.awaitCaptured(t)
	stop()
	if c.Connected() {
		t.Error("connected after the end")
	}
	if got := s.resolve(t, "udp4", real4, "payments.aether.internal", mdns.TypeA); got != payments4 {
		t.Errorf("mesh name while the registrar is away: %s", got)
	}
	if got := s.resolve(t, "udp4", real4, "example.com", mdns.TypeA); got != fromUpstream {
		t.Errorf("other name while the registrar is away: %s", got)
	}
	c, _ = s.client(t)
	s.awaitPod(t, c)
	c.RemovePod(key("pod"))
	if err := c.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.resolve(t, "udp4", real4, "payments.aether.internal", mdns.TypeA); got != fromReal {
		t.Errorf("after the pod was removed: %s", got)
	}
}

// CNI-68 with two registrars: the one that started later has the table for good;
// the other says why it is not connected, and takes over when it is alone.
func TestTwoRegistrars(t *testing.T) {
	s := newScene(t)
	s.start(t, nil)
	older, _ := s.client(t)
	s.awaitPod(t, older)
	newer, stopNewer := s.client(t)
	s.awaitPod(t, newer)
	dnstest.Eventually(t, func() string {
		if st := older.Status(); st.Connected || !strings.Contains(st.Err, "a registrar that started later owns the table") {
			return fmt.Sprintf("the older registrar: %+v", st)
		}
		return ""
	})
	if !newer.Connected() {
		t.Errorf("the newer registrar: %+v", newer.Status())
	}
	stopNewer()
	s.awaitPod(t, older)
}

// A table file that is not usable is set aside and named; the process starts, and
// the registrar's table is served.
func TestCorruptStateFile(t *testing.T) {
	s := newScene(t)
	path := s.dir + "/lib/dns.json"
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("{half a ta"), 0o600); err != nil {
		t.Fatal(err)
	}
	var log syncBuffer
	s.start(t, func(c *dns.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	s.serve(t)
	for _, want := range []string{"table file " + path + " is not usable", "set aside as " + path + ".corrupt", "names are served when the registrar connects"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log does not say %q:\n%s", want, log.String())
		}
	}
	if aside, err := os.ReadFile(path + ".corrupt"); err != nil || string(aside) != "{half a ta" {
		t.Errorf("set aside: %q, %v", aside, err)
	}
	awaitFile(t, path, "payments.aether.internal", s.pod.Path)
}

// Two processes overlap during an update: the second one waits, and serves every
// pod when the first one ends.
func TestHandover(t *testing.T) {
	s := newScene(t)
	stop := s.start(t, nil)
	s.serve(t)
	awaitFile(t, s.dir+"/lib/dns.json", "payments.aether.internal", s.pod.Path)
	var log syncBuffer
	s.start(t, func(c *dns.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	dnstest.Eventually(t, func() string {
		if !strings.Contains(log.String(), "waiting for it to end") {
			return "the second process does not wait: " + log.String()
		}
		return ""
	})
	if got := s.resolve(t, "udp4", real4, "payments.aether.internal", mdns.TypeA); got != payments4 {
		t.Errorf("while the second process waits: %s", got)
	}
	stop()
	s.awaitCaptured(t)
}

// Metrics and health are on the loopback, and carry no name of anybody.
func TestHTTP(t *testing.T) {
	s := newScene(t)
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	s.start(t, func(c *dns.Config) { c.HTTP = address })
	s.serve(t)
	s.resolve(t, "udp4", real4, "ghost.aether.internal", mdns.TypeA)
	get := func(path string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	if code, body := get("/healthz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("health: %d %q", code, body)
	}
	var body string
	for _, want := range []string{
		"portolan_dns_names 2\n", "portolan_dns_pods 1\n", "portolan_dns_pods_serving 1\n", "portolan_dns_pods_captured 1\n", "portolan_dns_table_connected 1\n",
		`portolan_dns_queries_total{outcome="nxdomain",transport="udp"} 1`, "portolan_dns_table_sessions_total 1\n", "portolan_dns_forwarding 0\n",
	} {
		// The rules work a moment before the process has heard so.
		dnstest.Eventually(t, func() string {
			var code int
			if code, body = get("/metrics"); code != http.StatusOK || !strings.Contains(body, want) {
				return fmt.Sprintf("metrics %d lack %q", code, want)
			}
			return ""
		})
	}
	for _, no := range []string{"payments", "ghost", "aether", s.pod.Path} {
		if strings.Contains(body, no) {
			t.Errorf("metrics carry %q", no)
		}
	}
}

// A configuration that cannot work is refused with what is wrong.
func TestRunRefuses(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*dns.Config)
		want   string
	}{
		{name: "socket", change: func(c *dns.Config) { c.Socket = "dns.sock" }, want: `socket "dns.sock" of mesh DNS is no absolute path`},
		{name: "state file", change: func(c *dns.Config) { c.StateFile = "" }, want: `state file "" of mesh DNS is no absolute path`},
		{name: "no capture", change: func(c *dns.Config) { c.OpenAlive = nil }, want: "Registry, OpenAlive and Log are required"},
		{name: "folder of the socket", change: func(c *dns.Config) { c.Socket = "/proc/none/dns.sock" }, want: "directory of socket /proc/none/dns.sock: mkdir /proc/none"},
		{name: "folder of the state file", change: func(c *dns.Config) { c.StateFile = "/proc/none/dns.json" }, want: "folder of the state file: mkdir /proc/none"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := config(t.TempDir())
			tc.change(&cfg)
			if err := dns.Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}

// The socket is for this user alone, whatever the modes were before, and so is
// the state file.
func TestModes(t *testing.T) {
	s := newScene(t)
	if err := os.Mkdir(s.dir+"/run", 0o755); err != nil {
		t.Fatal(err)
	}
	s.start(t, nil)
	s.serve(t)
	awaitFile(t, s.dir+"/lib/dns.json", "payments.aether.internal")
	for path, want := range map[string]os.FileMode{
		"/run": os.ModeDir | 0o700, "/run/dns.sock": os.ModeSocket | 0o600, "/lib": os.ModeDir | 0o700, "/lib/dns.json": 0o600,
	} {
		if info, err := os.Stat(s.dir + path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
	// Opened to everybody by somebody, another user is refused all the same.
	for path, mode := range map[string]os.FileMode{"/run": 0o755, "/run/dns.sock": 0o666} {
		if err := os.Chmod(s.dir+path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for dir := s.dir; dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	out, err := connectAs(t, 65534, s.dir+"/run/dns.sock")
	if err != nil || out != "EOF" {
		t.Errorf("as another user: %q, %v; want EOF", out, err)
	}
}

// awaitFile waits until the file contains every part.
func awaitFile(tb testing.TB, path string, parts ...string) {
	tb.Helper()
	dnstest.Eventually(tb, func() string {
		data, err := os.ReadFile(path)
		for _, part := range parts {
			if err != nil || !bytes.Contains(data, []byte(part)) {
				return fmt.Sprintf("%s lacks %q: %v", path, part, err)
			}
		}
		return ""
	})
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
