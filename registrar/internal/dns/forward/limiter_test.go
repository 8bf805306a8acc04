package forward_test

import (
	"math/rand/v2"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
)

// I9: pods that flood take no more than the shared part, and a pod that does not
// always has its own, however many others flood.
func TestLimiterFloodStarvesNobody(t *testing.T) {
	l := forward.NewLimiter(forward.Limits{Own: 4, Most: 20, Shared: 32})
	total := 0
	for range 10 {
		s := l.Share()
		taken := 0
		for s.TryAcquire() {
			if taken++; taken > 100 {
				t.Fatal("no end")
			}
		}
		if taken < 4 || taken > 20 {
			t.Errorf("a flooding pod has %d, want 4 to 20", taken)
		}
		total += taken
	}
	if want := 10*4 + 32; total != want || l.InFlight() != want {
		t.Errorf("all together have %d, %d in flight, want %d", total, l.InFlight(), want)
	}
	quiet := l.Share()
	for i := range 4 {
		if !quiet.TryAcquire() {
			t.Fatalf("a quiet pod was refused its look-up %d", i)
		}
	}
	if quiet.TryAcquire() {
		t.Error("the shared part is larger than it is")
	}
}

// Whatever order look-ups begin and end in, the bounds hold and nothing is lost.
func TestLimiterAgainstModel(t *testing.T) {
	limits := forward.Limits{Own: 3, Most: 7, Shared: 6}
	rnd := rand.New(rand.NewPCG(3, 4))
	l := forward.NewLimiter(limits)
	shares := make([]*forward.Share, 5)
	used := make([]int, len(shares))
	for i := range shares {
		shares[i] = l.Share()
	}
	for range 20000 {
		i := rnd.IntN(len(shares))
		if rnd.IntN(2) == 0 && used[i] > 0 {
			shares[i].Release()
			used[i]--
		} else {
			shared, all := 0, 0
			for _, u := range used {
				shared += max(0, u-limits.Own)
				all += u
			}
			want := used[i] < limits.Own || used[i] < limits.Most && shared < limits.Shared
			if got := shares[i].TryAcquire(); got != want {
				t.Fatalf("pod %d of %v: %t, want %t", i, used, got, want)
			}
			if want {
				used[i]++
				all++
			}
			if l.InFlight() != all || shares[i].InUse() != used[i] {
				t.Fatalf("%d in flight and %d of pod %d, want %v", l.InFlight(), shares[i].InUse(), i, used)
			}
		}
	}
}
