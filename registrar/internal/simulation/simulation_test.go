package simulation

import (
	"flag"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
)

var (
	simulationSeeds = flag.Int("simulation.seeds", 100, "runs of the simulation")
	simulationSteps = flag.Int("simulation.steps", 1000, "steps of each run")
	simulationFirst = flag.Uint64("simulation.first", 1, "seed of the first run")
)

// run is one run of the simulation: steps with rests in between.
func run(t *testing.T, seed uint64, steps int) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, seed)
		for i := range steps {
			w.act()
			if *simulationInside && i%50 == 0 {
				runtime.GC() // which nobody else does there
			}
			if i%250 == 249 {
				w.rest()
			}
		}
		w.rest()
		w.crash()
	})
}

// regression is a run that failed once.
type regression struct {
	name  string
	seed  uint64
	steps int
}

func regressions() []regression {
	return []regression{
		{"an on-demand cluster goes with its removal from those of every Envoy", 40, 700},
		{"a load assignment overtakes a cluster that waits behind another", 35, 450},
		{"a load assignment overtakes the cluster of a stream that comes late", 38, 500},
		{"a load assignment overtakes a cluster that nobody has answered for", 25, 1000},
		{"an evicted ADD leaves its listeners", 5, 600},
		{"a second ADD without a certificate leaves its record", 50, 1000},
		{"the route table has a flat name twice", 132, 1000},
		{"a forgotten service is known again before its removal is acknowledged", 28, 600},
		{"an Envoy answers on one of its streams only", 2540, 200},
		{"a step overtakes the removal of a warm cluster", 2696, 500},
		{"a flat name is claimed before clusters of it are removed", 2003, 700},
		{"a removal takes what an Envoy has on demand, too", 5152, 800},
		{"a name that leads nowhere is forgotten while an Envoy has it", 2209, 300},
		{"endpoints overtake their cluster while the disk hangs", 2158, 650},
		{"a warm cluster of a forgotten service becomes a mere spelling", 2803, 300},
	}
}

// Attachments, registry, projection, publisher and cache, all real, with a node around
// them that is not: pods come, go, die, change and get each other's addresses; two
// Envoys acknowledge late, reject, lose their streams and start anew; the registrar is
// killed in the middle of anything and starts with its file or without; the disk hangs,
// the signer refuses.
//
// A seed decides everything, on a clock that only the run moves, and a step begins when
// the one before has come to rest (doc.go says how a run is repeated).
//
// At every step, for what each Envoy has: no endpoint that does not serve the port, no
// request to another port or service (I1), no listener without its clusters (I6), no
// more unknown names than the cap (I9). At rest: exactly the sets of the contract (I1),
// no cluster of a default port's own name (I2), every name answered (I6), and the same
// bytes from a registrar that goes on from what is saved, and from one that starts from
// nothing, whatever order they are told the records in (I5).
//
// Not held to I1 is an Envoy that came back with what it had, rejected a cluster or does
// not answer, for as long as that lasts: it may combine what was never sent together.
// Then it is the pod's guard, or the identity that the cluster pins, that refuses
// (resource.TestWireStaleEndpoint tests that on real Envoys).
func TestSimulation(t *testing.T) {
	if !*simulationInside && !*simulationFree {
		t.Parallel()
		_, runs, some := strings.Cut(flag.Lookup("test.run").Value.String(), "/")
		if some {
			runs = "/" + runs
		}
		out, err := runInside(t, repeatable(t), "^TestSimulation$"+runs, append(settings(), "-test.v")...)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		n := strings.Count(string(out), "--- PASS: TestSimulation/")
		t.Logf("%d runs passed", n)
		if n == 0 {
			t.Error("no run has this name")
		}
		return
	}
	for _, c := range regressions() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			run(t, c.seed, c.steps)
		})
	}
	for i := range *simulationSeeds {
		seed := *simulationFirst + uint64(i)
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			t.Parallel()
			run(t, seed, *simulationSteps)
		})
	}
}

// In turns that no seed decides: those that the scheduler, and Go's own draws, give to the
// goroutines of a step. What a race detector finds is found here.
func TestSimulationInAnyOrder(t *testing.T) {
	const seeds, steps = 12, 400
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			t.Parallel()
			run(t, seed, steps)
		})
	}
}
