package readiness_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
)

// A state is told once at first and then only when it changes; each of the mesh's
// listeners counts only at its own address (contract 4.2), each port only where
// the app hop reaches it, and a port that does not listen is not among them
// (XDS-27).
func TestState(t *testing.T) {
	tests := []struct {
		name  string
		addrs []string
		want  readiness.State
	}{
		{"nothing", nil, readiness.State{}},
		{"the mesh's listeners", meshListeners, readiness.State{Inbound: true, OutboundHTTP: true, OutboundTCP: true}},
		{"inbound on 0.0.0.0", []string{"0.0.0.0:15008"}, readiness.State{Inbound: true}},
		{"inbound on loopback only", []string{"127.0.0.1:15008"}, readiness.State{}},
		{"outbound on 0.0.0.0 is an app's", []string{"0.0.0.0:15001", "0.0.0.0:15002"}, readiness.State{}},
		{"outbound on ::1 only", []string{"[::1]:15001", "[::1]:15002"}, readiness.State{}},
		{"outbound HTTP", []string{"127.0.0.1:15001", "[::1]:15001"}, readiness.State{OutboundHTTP: true}},
		{"outbound TCP", []string{"127.0.0.1:15002"}, readiness.State{OutboundTCP: true}},
		{"one port of two", []string{"127.0.0.1:8080"}, readiness.State{Listening: []uint16{8080}}},
		{"both ports, ascending", []string{"[::]:9090", "0.0.0.0:8080"}, readiness.State{Listening: []uint16{8080, 9090}}},
		{"a port that is not served", []string{"0.0.0.0:7777"}, readiness.State{}},
		{
			"a port on the pod's address",
			[]string{"10.77.0.2:9090", "127.0.0.1:8080"},
			readiness.State{Listening: []uint16{8080}, Misbound: []readiness.Misbound{{Port: 9090, Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.2")}}}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", tt.addrs...)
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090, 8080, 9090)
				synctest.Wait()
				if got := r.take(); len(got) != 1 || !got[0].state.Equal(tt.want) || got[0].at != 0 {
					t.Fatalf("told %+v, want %+v once and at once", got, tt.want)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := r.take(); got != nil {
					t.Errorf("told again without a change: %+v", got)
				}
			})
		})
	}
}

// Ports and mesh listeners that come or go together are told together: a pod is
// never half promoted (MESH-50).
func TestStateIsWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 8080, 9090)
		time.Sleep(time.Minute)
		r.take()
		tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
		time.Sleep(time.Minute)
		tables.set("a")
		time.Sleep(time.Minute)
		synctest.Wait()
		got := r.take()
		all := readiness.State{Inbound: true, OutboundHTTP: true, OutboundTCP: true, Listening: []uint16{8080, 9090}}
		if len(got) != 2 || !got[0].state.Equal(all) || !got[1].state.Equal(readiness.State{}) {
			t.Errorf("told %+v", got)
		}
	})
}

// A misbound port is named with its addresses, for people.
func TestMisboundString(t *testing.T) {
	m := readiness.Misbound{Port: 9090, Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("::1")}}
	if got, want := m.String(), "9090 (only on 10.77.0.2, ::1)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A table that cannot be read leaves the state as it was, with the error; it is
// opened again, and what is right then is told (contract 4.8).
func TestReadError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		good := r.last(t)
		tables.with(func() { tables.broken["a"] = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		got := r.take()
		if len(got) < 2 || len(got) > 3 {
			t.Fatalf("told %+v, want the first state and the error", got)
		}
		for _, n := range got[1:] {
			if n.state.Err == nil || !slices.Equal(n.state.Listening, good.Listening) || !n.state.Inbound {
				t.Errorf("told %+v", n.state)
			}
		}
		tables.with(func() { tables.broken["a"] = false })
		tables.set("a", meshListeners...)
		time.Sleep(time.Second)
		synctest.Wait()
		if last := r.last(t); last.Err != nil || last.Listening != nil || !last.Inbound {
			t.Errorf("told %+v", last)
		}
		if tables.open["a"] != 1 || tables.opens["a"] != 2 {
			t.Errorf("%d tables open, opened %d times", tables.open["a"], tables.opens["a"])
		}
	})
}

// The whole table, whose cost grows with the machine's listeners, is dumped only
// while something is missing that should be there, and then once a second.
func TestDumpsOnlyWhatIsMissing(t *testing.T) {
	tests := []struct {
		name    string
		addrs   []string
		inbound bool
		want    int // in the first minute, at most
	}{
		{"all there", withMesh("127.0.0.1:9090"), true, 0},
		{"a client", []string{"127.0.0.1:15001", "127.0.0.1:15002", "0.0.0.0:9090"}, false, 0},
		{"a port is missing", meshListeners, true, 61},
		{"the inbound listener is missing", []string{"127.0.0.1:15001", "127.0.0.1:15002", "0.0.0.0:9090"}, true, 61},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", tt.addrs...)
				w, _ := start(t, tables, nil)
				if err := w.Watch(key("a"), readiness.Spec{Netns: "a", Ports: []uint16{9090}, Inbound: tt.inbound}, func(readiness.State) {}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if tables.dumps > tt.want || tables.dumps < tt.want-3 {
					t.Errorf("%d dumps in a minute, want %d", tables.dumps, tt.want)
				}
			})
		})
	}
}

// A dump that missed a socket, because the table changed, is no loss.
func TestTornDump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:8080")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 8080, 9090)
		time.Sleep(time.Minute)
		r.take()
		tables.with(func() { tables.torn = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.take(); got != nil {
			t.Errorf("told %+v", got)
		}
	})
}

// Something of the app's on 127.0.0.1:15008 neither counts as the mesh's inbound
// listener nor hides it.
func TestHiddenInbound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:15008", "127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.take(); len(got) != 1 || !got[0].state.Inbound {
			t.Errorf("told %+v, want the inbound listener once", got)
		}
		tables.set("a", "127.0.0.1:15001", "127.0.0.1:15002", "127.0.0.1:15008", "127.0.0.1:9090")
		time.Sleep(time.Second)
		synctest.Wait()
		if r.last(t).Inbound {
			t.Error("the app's listener counts as the mesh's")
		}
	})
}

// With 200 pods the poller works a quarter of the time at most while all of them
// are new, and every one of them is told soon all the same.
func TestCostOfManyPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.cost = 50 * time.Microsecond
		w, _ := start(t, tables, nil)
		var all []*recorder
		for i := range 200 {
			tables.set(fmt.Sprint(i), withMesh("0.0.0.0:9090")...)
			all = append(all, watch(t, w, fmt.Sprint(i), 9090))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		reads := 0
		for i, r := range all {
			reads += tables.readCount(fmt.Sprint(i))
			if got := r.take(); len(got) != 1 || got[0].at > 100*time.Millisecond {
				t.Fatalf("pod %d was told %+v", i, got)
			}
		}
		if share := time.Duration(reads) * tables.cost; share > 2*time.Second/4+10*time.Millisecond {
			t.Errorf("%v of 2s were spent in reading", share)
		}
	})
}

// A pod whose table is expensive to read is polled less, and no pod waits for it
// more than the length of one read.
func TestCostOfOnePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.cost = 50 * time.Millisecond
		tables.set("big", withMesh("0.0.0.0:9090")...)
		w, _ := start(t, tables, nil)
		watch(t, w, "big", 9090)
		time.Sleep(time.Minute)
		if got := tables.readCount("big"); got < 55 || got > 62 {
			t.Errorf("%d reads of 50ms in a minute, want one a second", got)
		}
	})
}
