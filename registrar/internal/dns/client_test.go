package dns

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

func vip(n int) VIP { return VIP{V4: netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})} }

// newClient returns a client that runs until the test ends.
func newClient(t *testing.T, socket string, change func(*Client)) *Client {
	t.Helper()
	c, err := NewClient(ClientConfig{Socket: socket, Settings: Settings{Domain: "aether.internal"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(c)
	}
	run(t, c)
	return c
}

func run(t *testing.T, c *Client) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

// within returns a context for something that takes no time.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await waits until everything that was set holds.
func await(t *testing.T, c *Client) {
	t.Helper()
	must(t, c.Await(within(t, patience)))
}

// Contract 4.8: nothing is sent before all names and all pods are known; the
// process may know more than a registrar that has just started.
func TestClientWaitsForTheWhole(t *testing.T) {
	e := newEnd(t)
	good := fullState(1, 1)
	stream, end := e.dial(t)
	send(t, stream, good)
	awaitAck(t, stream, 1)
	end()
	c := newClient(t, e.socket, nil)
	must(t, c.UpdateNames(map[string]VIP{"b.aether.internal": vip(2)}, nil))
	must(t, c.SetPod(testPod(2)))
	must(t, c.SetNames(map[string]VIP{"b.aether.internal": vip(2)}))
	err := c.AwaitPod(within(t, 50*time.Millisecond), testKey(2))
	if want := "mesh DNS not connected: the registrar does not know all names and pods yet"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
	if d := cmp.Diff(map[string]bool{"c1-eth0": true}, e.pods.keys()); d != "" || c.Connected() {
		t.Errorf("connected %t, pods (-want +got):\n%s", c.Connected(), d)
	}
	must(t, c.SetPods([]Pod{testPod(2)}))
	must(t, c.AwaitPod(within(t, patience), testKey(2)))
	if d := cmp.Diff(map[string]bool{"c2-eth0": true}, e.pods.keys()); d != "" || !c.Connected() {
		t.Errorf("connected %t, pods (-want +got):\n%s", c.Connected(), d)
	}
}

// AwaitPod is what ADD waits for: it returns when the sockets are open, and else
// says what is missing, in words for a pod's event (contract 4.2).
func TestAwaitPod(t *testing.T) {
	e := newEnd(t)
	e.pods.fail(testKey(2), "serve DNS in /run/netns/c2: address already in use")
	var acks []Ack
	var mu sync.Mutex
	c := newClient(t, e.socket, func(c *Client) {
		c.cfg.OnAck = func(a Ack) {
			mu.Lock()
			defer mu.Unlock()
			acks = append(acks, a)
		}
	})
	must(t, c.SetNames(nil))
	must(t, c.SetPods(nil))
	must(t, c.SetPod(testPod(1)))
	must(t, c.AwaitPod(within(t, patience), testKey(1)))
	must(t, c.SetPod(testPod(2)))
	await(t, c)
	for _, tc := range []struct {
		name string
		pod  int
		want string
	}{
		{name: "failed", pod: 2, want: "mesh DNS does not serve pod c2-eth0: serve DNS in /run/netns/c2: address already in use"},
		{name: "unknown", pod: 9, want: "mesh DNS: the pod is not set, or was removed: c9-eth0"},
	} {
		if err := c.AwaitPod(within(t, 50*time.Millisecond), testKey(tc.pod)); err == nil || err.Error() != tc.want {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	// It gets better while somebody waits.
	e.pods.fail(testKey(2), "")
	go e.server.podChanged(testKey(2))
	must(t, c.AwaitPod(within(t, patience), testKey(2)))
	// It is removed while somebody waits.
	e.pods.fail(testKey(3), "never")
	must(t, c.SetPod(testPod(3)))
	go c.RemovePod(testKey(3))
	if err := c.AwaitPod(within(t, patience), testKey(3)); err == nil || !strings.Contains(err.Error(), "was removed: c3-eth0") {
		t.Errorf("removed: %v", err)
	}
	// A pod that asked for nothing waits for nobody.
	e.stop()
	disabled := testPod(4)
	disabled.Disabled = true
	must(t, c.SetPod(disabled))
	must(t, c.AwaitPod(within(t, patience), testKey(4)))
	must(t, c.SetPod(testPod(5)))
	deadline := time.Now().Add(patience)
	for c.Connected() && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	err := c.AwaitPod(within(t, 300*time.Millisecond), testKey(5))
	if err == nil || !strings.HasPrefix(err.Error(), "mesh DNS not connected: ") || !strings.HasSuffix(err.Error(), "(is `registrar dns` running?)") {
		t.Errorf("away: %v", err)
	}
	if st := c.Status(); st.Connected || st.Pods != 4 || st.Err == "" {
		t.Errorf("status %+v", st)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(acks) == 0 || len(acks[0].Pods) > 1 || acks[0].Revision == 0 {
		t.Errorf("acknowledgements %+v", acks)
	}
}

// While a revision is on its way, whatever is set becomes one more; setting never
// waits.
func TestClientCoalesces(t *testing.T) {
	e := newEnd(t)
	gate := make(chan struct{})
	e.pods.setGate(gate)
	revisions := 0
	var mu sync.Mutex
	c := newClient(t, e.socket, func(c *Client) {
		c.cfg.OnAck = func(a Ack) {
			mu.Lock()
			defer mu.Unlock()
			revisions = int(a.Revision)
		}
	})
	must(t, c.SetNames(nil))
	must(t, c.SetPods(nil))
	gate <- struct{}{}
	gate <- struct{}{}
	await(t, c)
	must(t, c.SetPod(testPod(0)))
	gate <- struct{}{}
	must(t, c.SetPod(testPod(0)))
	for i := range 100 {
		must(t, c.SetPod(testPod(i)))
		must(t, c.UpdateNames(map[string]VIP{fmt.Sprintf("s%d.aether.internal", i): vip(i)}, nil))
	}
	close(gate)
	await(t, c)
	mu.Lock()
	defer mu.Unlock()
	if revisions > 5 {
		t.Errorf("%d revisions for 202 changes", revisions)
	}
	if names, n := e.table.Size(); names != 100 || n != 100 {
		t.Errorf("%d names and %d pods, want 100 of each", names, n)
	}
}

// A process that hangs is given up, and another connection tried.
func TestClientAckTimeout(t *testing.T) {
	e := newEnd(t)
	gate := make(chan struct{})
	e.pods.setGate(gate)
	c := newClient(t, e.socket, func(c *Client) { c.ackTimeout = 50 * time.Millisecond })
	must(t, c.SetNames(nil))
	must(t, c.SetPods([]Pod{testPod(1)}))
	deadline := time.Now().Add(patience)
	for {
		err := c.AwaitPod(within(t, 100*time.Millisecond), testKey(1))
		if err == nil {
			t.Fatal("served by a process that hangs")
		}
		if strings.Contains(err.Error(), "no acknowledgement within 50ms") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	close(gate)
	must(t, c.AwaitPod(within(t, patience), testKey(1)))
}

// What is not valid is refused where it is set, with the reason, and never breaks
// the stream for the rest.
func TestClientRefuses(t *testing.T) {
	for _, tc := range []struct {
		name   string
		config ClientConfig
		want   string
	}{
		{name: "socket", config: ClientConfig{Socket: "dns.sock"}, want: `socket "dns.sock" of mesh DNS is no absolute path`},
		{name: "log", config: ClientConfig{Socket: "/dns.sock"}, want: "Log is required"},
		{name: "domain", config: ClientConfig{Socket: "/dns.sock", Log: slog.New(slog.DiscardHandler)}, want: "mesh domain is empty"},
	} {
		if _, err := NewClient(tc.config); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	e := newEnd(t)
	c := newClient(t, e.socket, nil)
	must(t, c.SetPods(nil))
	err := c.SetNames(map[string]VIP{"a.aether.internal": vip(1), "b.aether.internal": {}, "Z.aether.internal": vip(2)})
	if want := `mesh DNS: 2 names left out, the first: name.name: "Z.aether.internal"`; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("names: %v, want %q", err, want)
	}
	bad := testPod(1)
	bad.Netns = "relative"
	for name, err := range map[string]error{"SetPod": c.SetPod(bad), "SetPods": c.SetPods([]Pod{bad})} {
		if err == nil || !strings.Contains(err.Error(), `mesh DNS: pod c1-eth0: pod.netns: "relative" is no absolute path`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.SetSettings(Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:15053")}}); err == nil || !strings.Contains(err.Error(), "is the mesh DNS itself") {
		t.Errorf("settings: %v", err)
	}
	if err := c.SetPods(make([]Pod, dnsv1.MaxPods+1)); err == nil || err.Error() != "mesh DNS: 4097 pods, at most 4096 are served" {
		t.Errorf("too many pods: %v", err)
	}
	await(t, c)
	if names, n := e.table.Size(); names != 1 || n != 0 {
		t.Errorf("%d names and %d pods, want 1 and 0", names, n)
	}
}

// A table that needs many messages arrives whole, and other settings do too: new
// resolvers as a change, a new domain as a full state.
func TestClientLargeTable(t *testing.T) {
	e := newEnd(t)
	c := newClient(t, e.socket, nil)
	names := map[string]VIP{}
	for i := range 10000 {
		names[fmt.Sprintf("s%d.%s.aether.internal", i, strings.Repeat("n", 60))] = vip(i)
	}
	must(t, c.SetNames(names))
	var list []Pod
	for i := range 1500 {
		p := testPod(i)
		p.Netns += strings.Repeat("x", 4000)
		list = append(list, p)
	}
	must(t, c.SetPods(list))
	await(t, c)
	if n, p := e.table.Size(); n != 10000 || p != 1500 {
		t.Errorf("%d names and %d pods", n, p)
	}
	upstream := netip.MustParseAddrPort("10.0.0.53:53")
	must(t, c.SetSettings(Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{upstream}}))
	await(t, c)
	if got := e.table.Upstreams(); len(got) != 1 || got[0] != upstream {
		t.Errorf("upstreams %v", got)
	}
	must(t, c.SetSettings(Settings{Domain: "mesh.example"}))
	await(t, c)
	if got := e.table.Settings(); got.Domain != "mesh.example" || len(got.Upstreams) != 0 {
		t.Errorf("settings %+v", got)
	}
	if n, p := e.table.Size(); n != 10000 || p != 1500 {
		t.Errorf("after a new domain %d names and %d pods", n, p)
	}
	if refused, sessions := metric(t, e.reg, "portolan_dns_table_refused_total"), metric(t, e.reg, "portolan_dns_table_sessions_total"); refused != 0 || sessions != 1 {
		t.Errorf("%v revisions were refused in %v sessions, want none in one", refused, sessions)
	}
}

// A report about the pod as it was does not count for the pod as it was set last.
func TestAwaitPodIgnoresOldReports(t *testing.T) {
	e := newEnd(t)
	c := newClient(t, e.socket, nil)
	must(t, c.SetNames(nil))
	must(t, c.SetPods([]Pod{testPod(1)}))
	must(t, c.AwaitPod(within(t, patience), testKey(1)))
	gate := make(chan struct{})
	e.pods.setGate(gate)
	changed := testPod(1)
	changed.IPv6 = true
	must(t, c.SetPod(changed))
	gate <- struct{}{} // the revision arrived, and waits for the second token
	e.server.podChanged(testKey(1))
	if err := c.AwaitPod(within(t, 100*time.Millisecond), testKey(1)); err == nil || err.Error() != "mesh DNS has not acknowledged pod c1-eth0 yet" {
		t.Errorf("error %v", err)
	}
	close(gate)
	must(t, c.AwaitPod(within(t, patience), testKey(1)))
}

// Whatever is set in whatever order, while connections break and the process
// restarts with an empty table: in the end the process has exactly what was set,
// and every pod is acknowledged.
func TestClientAgainstModel(t *testing.T) {
	e := newEnd(t)
	c := newClient(t, e.socket, nil)
	must(t, c.SetNames(nil))
	must(t, c.SetPods(nil))
	want := table.Change{Full: true, Settings: &table.Settings{Domain: "aether.internal"}, SetNames: map[string]VIP{}, SetPods: map[model.AttachmentKey]Pod{}}
	rnd := rand.New(rand.NewPCG(5, 6))
	for round := range 400 {
		mutate(t, c, rnd, &want)
		switch {
		case round%100 == 50:
			e.stop()
			if round == 150 {
				// The process forgot everything.
				_, err := e.table.Apply(table.Change{Full: true, Settings: want.Settings})
				must(t, err)
			}
			e.start(t)
		case round%10 == 0:
			await(t, c)
			checkTable(t, e.table, want)
		}
	}
	await(t, c)
	checkTable(t, e.table, want)
	for k := range want.SetPods {
		must(t, c.AwaitPod(within(t, patience), k))
	}
}

func mutate(t *testing.T, c *Client, rnd *rand.Rand, want *table.Change) {
	t.Helper()
	name := fmt.Sprintf("s%d.aether.internal", rnd.IntN(20))
	p := testPod(rnd.IntN(10))
	p.IPv6 = rnd.IntN(2) == 0
	switch rnd.IntN(8) {
	case 0, 1:
		v := vip(rnd.IntN(100))
		want.SetNames[name] = v
		must(t, c.UpdateNames(map[string]VIP{name: v}, nil))
	case 2:
		delete(want.SetNames, name)
		must(t, c.UpdateNames(nil, []string{name}))
	case 3, 4:
		want.SetPods[p.Key] = p
		must(t, c.SetPod(p))
	case 5:
		delete(want.SetPods, p.Key)
		c.RemovePod(p.Key)
	case 6:
		want.SetNames = map[string]VIP{name: vip(1)}
		must(t, c.SetNames(want.SetNames))
		want.SetNames = map[string]VIP{name: vip(1)}
	case 7:
		s := Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rnd.IntN(9) + 1)}), 53)}}
		want.Settings = &s
		must(t, c.SetSettings(s))
	}
}

func checkTable(t *testing.T, got *table.Table, want table.Change) {
	t.Helper()
	tb := table.New()
	_, err := tb.Apply(want)
	must(t, err)
	if d := cmp.Diff(tb.Message(), got.Message(), protocmp.Transform()); d != "" {
		t.Fatalf("table (-want +got):\n%s", d)
	}
}
