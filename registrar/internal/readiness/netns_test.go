package readiness_test

import (
	"fmt"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// TestMain refuses to run without root: some of these tests make network
// namespaces, and a skipped one would prove nothing.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of readiness make network namespaces: run them as root")
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// realTables opens the kernel's tables.
func realTables(c *readiness.Config) {
	c.Open = func(netns string) (readiness.Table, error) { return listen.Open(netns) }
}

func listenIn(tb testing.TB, n *netnstest.Namespace, addr string) net.Listener {
	tb.Helper()
	return n.Listen(tb, net.ListenConfig{}, "tcp", addr)
}

// await returns the first state told that is as wanted, failing after a generous
// time, and every state told before it.
func await(t *testing.T, told <-chan readiness.State, wanted func(readiness.State) bool) (before []readiness.State) {
	t.Helper()
	timeout := time.NewTimer(20 * time.Second)
	defer timeout.Stop()
	for {
		select {
		case s := <-told:
			if wanted(s) {
				return before
			}
			before = append(before, s)
		case <-timeout.C:
			t.Fatalf("not told; told before: %+v", before)
		}
	}
}

// In a real namespace: the mesh's listeners are proven when all three listen, a
// server that starts to listen on 9090 later is told then and not before, one on
// the wrong address is reported, and one that goes is told as gone (contract 4.2,
// 4.3; XDS-27).
func TestRealNamespace(t *testing.T) {
	pod := netnstest.New(t)
	w, _ := start(t, newFakeTables(), realTables)
	told := make(chan readiness.State, 64)
	listenIn(t, pod, "127.0.0.1:8080")
	if err := w.Watch(key("a"), readiness.Spec{Netns: pod.Path, Ports: []uint16{8080, 9090}, Inbound: true}, func(s readiness.State) { told <- s }); err != nil {
		t.Fatal(err)
	}
	only8080 := func(s readiness.State) bool { return slices.Equal(s.Listening, []uint16{8080}) }
	if before := await(t, told, only8080); before != nil {
		t.Errorf("told before: %+v", before)
	}

	for _, addr := range meshListeners {
		listenIn(t, pod, addr)
	}
	proven := func(s readiness.State) bool { return s.Inbound && s.OutboundHTTP && s.OutboundTCP }
	for _, s := range await(t, told, proven) {
		if !only8080(s) {
			t.Errorf("told before 9090 listened: %+v", s)
		}
	}

	wrong := listenIn(t, pod, "[::1]:9090")
	await(t, told, func(s readiness.State) bool { return len(s.Misbound) == 1 && only8080(s) })
	if err := wrong.Close(); err != nil {
		t.Fatal(err)
	}
	l := listenIn(t, pod, "0.0.0.0:9090")
	both := func(s readiness.State) bool {
		return slices.Equal(s.Listening, []uint16{8080, 9090}) && s.Misbound == nil
	}
	await(t, told, both)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, told, func(s readiness.State) bool { return only8080(s) && proven(s) })

	pod.Unmount(t) // the path goes first, as when a runtime is killed between both
	w.Forget(key("a"))
	if err := w.Watch(key("a"), readiness.Spec{Netns: pod.Path}, func(readiness.State) {}); err == nil {
		t.Error("a namespace that is gone was watched")
	}
}

// BenchmarkPoll200 asks 200 real pods once, by look-ups, as at rest, and by dumps,
// as while something is missing. At rest each pod is asked twice a second.
func BenchmarkPoll200(b *testing.B) {
	var tables []*listen.Table
	for range 200 {
		pod := netnstest.New(b)
		for _, addr := range append([]string{"0.0.0.0:8080", "127.0.0.1:9090", "[::1]:15001", "[::1]:15002"}, meshListeners...) {
			listenIn(b, pod, addr)
		}
		t, err := listen.Open(pod.Path)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = t.Close() })
		tables = append(tables, t)
	}
	ports := []uint16{15001, 15002, 15008, 8080, 9090}
	for name, ask := range map[string]func(*listen.Table) (listen.Snapshot, error){
		"Lookup": func(t *listen.Table) (listen.Snapshot, error) { return t.Lookup(ports) },
		"Read":   func(t *listen.Table) (listen.Snapshot, error) { return t.Read() },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			before := cpuTime(b)
			for b.Loop() {
				for _, t := range tables {
					if s, err := ask(t); err != nil || !s.Listens(8080) || !s.Everywhere(15008) {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// cpuTime is the processor time of this process in nanoseconds: what a loaded
// machine does not blur.
func cpuTime(b *testing.B) int64 {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}
