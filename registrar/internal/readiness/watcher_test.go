package readiness_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
)

// A namespace that cannot be opened is said at once.
func TestWatchError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.broken["a"] = true
		w, _ := start(t, tables, nil)
		err := w.Watch(key("a"), readiness.Spec{Netns: "a"}, func(readiness.State) { t.Error("told") })
		if !errors.Is(err, errBroken) || !strings.Contains(err.Error(), "watch a-eth0") {
			t.Errorf("error %v", err)
		}
		time.Sleep(time.Second)
	})
}

// slowInterval is the longest time between two polls.
const slowInterval = 500 * time.Millisecond

// A callback that hangs delays its own pod alone; when it is back it is told the
// newest state once, and nothing that it knows already.
func TestSlowCallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		gate := make(chan struct{})
		slow := newRecorder()
		if err := w.Watch(key("slow"), readiness.Spec{Netns: "slow", Ports: []uint16{9090}}, func(s readiness.State) {
			slow.tell(s)
			<-gate
		}); err != nil {
			t.Fatal(err)
		}
		quick := watch(t, w, "quick", 9090)
		synctest.Wait()
		change := func(addrs ...string) {
			tables.set("slow", addrs...)
			tables.set("quick", addrs...)
			time.Sleep(slowInterval)
			synctest.Wait()
		}
		change("127.0.0.1:9090")
		change()
		change("127.0.0.1:9090")
		if n := len(quick.take()); n != 4 {
			t.Errorf("the quick callback was told %d times, want 4", n)
		}
		if n := len(slow.take()); n != 1 {
			t.Errorf("the slow callback was told %d times while it hung", n)
		}
		gate <- struct{}{}
		synctest.Wait()
		if got := slow.take(); len(got) != 1 || !slices.Equal(got[0].state.Listening, []uint16{9090}) {
			t.Errorf("told %+v, want the newest state", got)
		}
		time.Sleep(time.Minute)
		change()
		change("127.0.0.1:9090") // what the callback, which hangs again, was told last
		close(gate)
		synctest.Wait()
		if got := slow.take(); len(got) != 0 {
			t.Errorf("told what it knew: %+v", got)
		}
	})
}

// When Forget returns the callback has returned, is never called again, and the
// namespace is free.
func TestForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		w.Forget(key("unknown"))
		gate := make(chan struct{})
		calls := 0
		if err := w.Watch(key("a"), readiness.Spec{Netns: "a", Ports: []uint16{9090}}, func(readiness.State) {
			calls++
			<-gate
		}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		forgotten := make(chan struct{})
		go func() {
			w.Forget(key("a"))
			close(forgotten)
		}()
		synctest.Wait()
		select {
		case <-forgotten:
			t.Error("Forget returned while the callback ran")
		default:
		}
		if tables.open["a"] != 0 {
			t.Error("the namespace waits for the callback")
		}
		tables.set("a", "127.0.0.1:9090")
		close(gate)
		<-forgotten
		time.Sleep(time.Second)
		if calls != 1 {
			t.Errorf("%d calls", calls)
		}
	})
}

// Watching an attachment anew replaces everything of the first watch.
func TestWatchAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", "127.0.0.1:8080", "127.0.0.1:9090")
		w, _ := start(t, tables, nil)
		first := watch(t, w, "a", 8080)
		synctest.Wait()
		first.take()
		second := watch(t, w, "a", 8080, 9090)
		synctest.Wait()
		tables.set("a")
		time.Sleep(time.Second)
		synctest.Wait()
		if got := first.take(); got != nil {
			t.Errorf("the first callback was told %+v", got)
		}
		if got := second.take(); len(got) != 2 || !slices.Equal(got[0].state.Listening, []uint16{8080, 9090}) {
			t.Errorf("the second callback was told %+v", got)
		}
		if tables.open["a"] != 1 {
			t.Errorf("%d tables open", tables.open["a"])
		}
	})
}

// The callback of a second watch never runs beside the first one's.
func TestWatchAnewWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		gate := make(chan struct{})
		if err := w.Watch(key("a"), readiness.Spec{Netns: "a"}, func(readiness.State) { <-gate }); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		second := newRecorder()
		done := make(chan error, 1)
		go func() { done <- w.Watch(key("a"), readiness.Spec{Netns: "a"}, second.tell) }()
		time.Sleep(time.Second)
		if got := second.take(); got != nil {
			t.Errorf("the second callback was told %+v while the first one ran", got)
		}
		close(gate)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		second.last(t)
	})
}

// Of several watches of one attachment at one time one stays, with one table.
func TestWatchTwiceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		gate := make(chan struct{})
		tables.gate = gate
		w, _ := start(t, tables, nil)
		var all [3]*recorder
		var wg sync.WaitGroup
		for i := range all {
			wg.Go(func() { all[i] = watch(t, w, "a", 9090) })
		}
		synctest.Wait()
		close(gate)
		wg.Wait()
		synctest.Wait()
		for _, r := range all {
			r.take()
		}
		tables.set("a", "127.0.0.1:9090")
		time.Sleep(time.Second)
		synctest.Wait()
		told := 0
		for _, r := range all {
			told += len(r.take())
		}
		if told != 1 || tables.open["a"] != 1 {
			t.Errorf("%d callbacks told of one change, %d tables open", told, tables.open["a"])
		}
	})
}

// When Run ends nothing is open and nothing runs, and Watch says so.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, stop := start(t, tables, nil)
		for i := range 5 {
			watch(t, w, fmt.Sprint(i), 9090)
		}
		synctest.Wait()
		stop()
		if err := w.Watch(key("late"), readiness.Spec{Netns: "late"}, func(readiness.State) {}); err == nil || !strings.Contains(err.Error(), "has stopped") {
			t.Errorf("error %v", err)
		}
		for path, n := range tables.open {
			if n != 0 {
				t.Errorf("%s is open", path)
			}
		}
		w.Forget(key("0"))
		w.Kick(key("0"))
	})
}

// Whatever is watched, kicked and forgotten at one time, in the end exactly what
// is watched is open and told.
func TestRandomly(t *testing.T) {
	tables := newFakeTables()
	w, stop := start(t, tables, nil)
	const names, workers = 6, 8
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 7))
			for range 300 {
				name := fmt.Sprint(rnd.IntN(names))
				switch rnd.IntN(4) {
				case 0:
					w.Forget(key(name))
				case 1:
					w.Kick(key(name))
				case 2:
					tables.set(name, []string{"127.0.0.1:9090"}[:rnd.IntN(2)]...)
				default:
					if err := w.Watch(key(name), readiness.Spec{Netns: name, Ports: []uint16{9090}}, func(readiness.State) {}); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	told := make(chan readiness.State, 16)
	for i := range names {
		name := fmt.Sprint(i)
		tables.set(name, "127.0.0.1:9090")
		if err := w.Watch(key(name), readiness.Spec{Netns: name, Ports: []uint16{9090}}, func(s readiness.State) { told <- s }); err != nil {
			t.Fatal(err)
		}
	}
	for range names {
		if s := <-told; !slices.Equal(s.Listening, []uint16{9090}) || s.Err != nil {
			t.Errorf("told %+v", s)
		}
	}
	tables.with(func() {
		for i := range names {
			if n := tables.open[fmt.Sprint(i)]; n != 1 {
				t.Errorf("pod %d has %d open tables", i, n)
			}
		}
	})
	stop()
	for path, n := range tables.open {
		if n != 0 {
			t.Errorf("%s has %d open tables after the end", path, n)
		}
	}
}

// The metrics count pods, polls, errors and notices.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		reg := prometheus.NewRegistry()
		w, _ := start(t, tables, func(c *readiness.Config) { c.Metrics = reg })
		watch(t, w, "a", 9090)
		watch(t, w, "b", 9090)
		synctest.Wait()
		tables.with(func() { tables.broken["a"] = true })
		w.Kick(key("a"))
		synctest.Wait()
		w.Forget(key("b"))
		list, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range list {
			got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
		}
		want := map[string]float64{
			"portolan_readiness_pods":               1,
			"portolan_readiness_polls_total":        3,
			"portolan_readiness_poll_errors_total":  1,
			"portolan_readiness_poll_seconds_total": 0,
			"portolan_readiness_changes_total":      2,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if _, err := readiness.New(readiness.Config{Open: tables.Open, Log: quiet(), Metrics: reg}); err == nil {
			t.Error("two watchers share one registry")
		}
	})
}

// A watcher without its necessary parts is refused.
func TestNewRefuses(t *testing.T) {
	if _, err := readiness.New(readiness.Config{Log: quiet()}); err == nil {
		t.Error("no error without Open")
	}
	if _, err := readiness.New(readiness.Config{Open: newFakeTables().Open}); err == nil {
		t.Error("no error without a log")
	}
}
