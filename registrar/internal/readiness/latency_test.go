package readiness_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A port is told as soon as the polls allow and never before: 2 ms after an ADD, 10 ms in
// its first seconds, 100 ms in its first half minute, 500 ms later; and so is its loss.
// After a change the polls are frequent again.
func TestLatency(t *testing.T) {
	tests := []struct {
		name  string
		after time.Duration
		bound time.Duration
	}{
		{"after an ADD", 30 * time.Millisecond, 2 * time.Millisecond},
		{"in the first seconds", 1500 * time.Millisecond, 10 * time.Millisecond},
		{"after them", 3 * time.Second, 100 * time.Millisecond},
		{"in the first half minute", 29 * time.Second, 100 * time.Millisecond},
		{"later", 10 * time.Minute, 500 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090)
				// Right after a poll, the worst time.
				time.Sleep(tt.after + time.Microsecond)
				synctest.Wait()
				r.take()
				change := time.Since(r.begin)
				tables.set("a", "127.0.0.1:9090")
				time.Sleep(time.Second)
				synctest.Wait()
				got := r.take()
				if len(got) != 1 || !slices.Equal(got[0].state.Listening, []uint16{9090}) {
					t.Fatalf("told %+v", got)
				}
				if d := got[0].at - change; d < 0 || d > tt.bound {
					t.Errorf("told after %v, want within %v", d, tt.bound)
				}
				lost := time.Since(r.begin)
				tables.set("a")
				time.Sleep(time.Second)
				synctest.Wait()
				got = r.take()
				if len(got) != 1 || got[0].state.Listening != nil {
					t.Fatalf("told %+v", got)
				}
				if d := got[0].at - lost; d > 100*time.Millisecond {
					t.Errorf("the loss was told after %v, want within 100ms of a change", d)
				}
			})
		})
	}
}

// A quiet pod is polled twice a second.
func TestQuietPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", withMesh("127.0.0.1:9090")...)
		w, _ := start(t, tables, nil)
		watch(t, w, "a", 9090)
		time.Sleep(time.Minute)
		before := tables.readCount("a")
		time.Sleep(time.Minute)
		if got := tables.readCount("a") - before; got < 119 || got > 121 {
			t.Errorf("%d polls a minute, want 120", got)
		}
	})
}

// Readiness that flaps five times a second for half a minute costs a few notices;
// what is told ends as it is, and each loss is told at the next poll (XDS-55).
func TestFlapping(t *testing.T) {
	for _, up := range []bool{true, false} {
		t.Run(fmt.Sprintf("ends up=%v", up), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 8080, 9090)
				time.Sleep(time.Minute)
				synctest.Wait()
				r.take()
				for range 30 * 5 {
					tables.set("a", withMesh("0.0.0.0:8080")...)
					time.Sleep(100 * time.Millisecond)
					tables.set("a", withMesh("0.0.0.0:8080", "0.0.0.0:9090")...)
					time.Sleep(100 * time.Millisecond)
				}
				if !up {
					tables.set("a", withMesh("0.0.0.0:8080")...)
				}
				synctest.Wait()
				notices := r.take()
				if len(notices) == 0 || len(notices) > 6 {
					t.Errorf("%d notices of 300 changes", len(notices))
				}
				for _, n := range notices {
					if !slices.Contains(n.state.Listening, 8080) || !n.state.Inbound {
						t.Errorf("a port that did not flap was told as lost: %+v", n.state)
					}
				}
				time.Sleep(10 * time.Second)
				synctest.Wait()
				notices = append(notices, r.take()...)
				last := notices[len(notices)-1]
				if got := slices.Contains(last.state.Listening, 9090); got != up {
					t.Errorf("told in the end: %v, want %v", got, up)
				}
			})
		})
	}
}

// A port that comes and goes every few seconds for an hour is told a bounded
// number of times, and is never told as there while it is not.
func TestFlappingSlowly(t *testing.T) {
	for _, period := range []time.Duration{time.Second, 3 * time.Second, 7 * time.Second, 12 * time.Second} {
		t.Run(period.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tables := newFakeTables()
				w, _ := start(t, tables, nil)
				r := watch(t, w, "a", 9090)
				var there int
				for begin := time.Now(); time.Since(begin) < time.Hour; there = 1 - there {
					tables.set("a", []string{"127.0.0.1:9090"}[:there]...)
					time.Sleep(period)
				}
				synctest.Wait()
				if n := len(r.take()); n > 12+2*int(time.Hour/(2*lastHold)) {
					t.Errorf("%d notices in an hour", n)
				}
			})
		})
	}
}

// lastHold is the longest time for which a port that flaps must stay.
const lastHold = 8 * time.Second

// An app that is restarted once is back as soon as it listens; after half a minute
// of calm so is one that had flapped.
func TestRestartIsNotHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		tables.set("a", "127.0.0.1:9090")
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		restart := func() time.Duration {
			t.Helper()
			tables.set("a")
			time.Sleep(time.Second)
			tables.set("a", "127.0.0.1:9090")
			back := time.Now()
			for !slices.Contains(r.last(t).Listening, 9090) {
				time.Sleep(time.Millisecond)
				synctest.Wait()
			}
			return time.Since(back)
		}
		time.Sleep(time.Minute)
		if d := restart(); d > 101*time.Millisecond {
			t.Errorf("back after %v", d)
		}
		for range 5 {
			restart()
		}
		if d := restart(); d < 4*time.Second {
			t.Errorf("after seven losses in a row back after %v, want held back; the test has no subject", d)
		}
		time.Sleep(31 * time.Second)
		if d := restart(); d > 101*time.Millisecond {
			t.Errorf("after calm back after %v", d)
		}
	})
}

// What changes nothing for traffic is told at most once a second, and the last
// word is right.
func TestMisboundIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		time.Sleep(5 * time.Second)
		r.take()
		for range 50 {
			tables.set("a", "[::1]:9090")
			time.Sleep(100 * time.Millisecond)
			tables.set("a")
			time.Sleep(100 * time.Millisecond)
		}
		tables.set("a", "[::1]:9090")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		got := r.take()
		if len(got) > 13 {
			t.Errorf("%d notices in twelve seconds", len(got))
		}
		if last := got[len(got)-1].state; len(last.Misbound) != 1 || last.Misbound[0].Port != 9090 {
			t.Errorf("last told %+v", last)
		}
	})
}

// Kick polls at once and keeps the polls frequent for a while.
func TestKick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tables := newFakeTables()
		w, _ := start(t, tables, nil)
		r := watch(t, w, "a", 9090)
		w.Kick(key("unknown"))
		time.Sleep(time.Minute + time.Millisecond)
		synctest.Wait()
		r.take()
		tables.set("a", "127.0.0.1:9090")
		w.Kick(key("a"))
		synctest.Wait()
		if got := r.take(); len(got) != 1 {
			t.Errorf("told %+v, want the port at once", got)
		}
		time.Sleep(time.Minute) // calm again
		before := tables.readCount("a")
		w.Kick(key("a"))
		time.Sleep(time.Second)
		if got := tables.readCount("a") - before; got < 9 {
			t.Errorf("%d polls in the second after", got)
		}
	})
}
