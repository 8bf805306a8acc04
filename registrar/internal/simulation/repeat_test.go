package simulation

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var (
	simulationFree   = flag.Bool("simulation.free", false, "run in this process, in which a seed has many traces")
	simulationTraces = flag.String("simulation.traces", "", "folder for the whole trace of each run")
	simulationInside = flag.Bool("simulation.inside", false, "this is the process in which a seed has one trace")
)

// edit replaces text that is in a file of Go's own library exactly once.
type edit struct{ file, old, new string }

// edits take out of Go what the program does not decide: what Go draws, and turns that
// it gives to others because of the time that passed. In a bubble there is one sequence
// of draws; maps have theirs in one order, so that what a process fills once, such as
// the types of messages, shifts nothing. That GOMAXPROCS=1 and GOGC=off leave one
// goroutine running, until it waits, is the environment's (runInside).
func edits() []edit {
	const bubble = "\ttotal   int // total goroutines\n"
	return []edit{
		{"runtime/synctest.go", bubble, bubble + "\tdrawn   uint64\n"},
		{"runtime/rand.go", "func maps_rand() uint64 {\n\treturn rand()\n}\n", `func maps_rand() uint64 { return 0 }

func (bubble *synctestBubble) draw() uint64 {
	bubble.drawn += 0x9e3779b97f4a7c15
	x := bubble.drawn
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func selectDraw(n uint32) uint32 {
	if gp := getg(); gp.bubble != nil {
		return uint32(gp.bubble.draw()>>32) % n
	}
	return 0
}
`},
		{"runtime/alg.go", "hashkey[i] = uintptr(bootstrapRand())", "hashkey[i] = uintptr(i + 1)"},
		{"runtime/alg.go", "key[i] = bootstrapRand()", "key[i] = 0x9e3779b97f4a7c15 * uint64(i+1)"},
		{"runtime/select.go", "cheaprandn(uint32(norder + 1))", "selectDraw(uint32(norder + 1))"},
		{"runtime/time.go", "t.rand = cheaprand()", "t.rand = uint32(getg().bubble.draw())"},
		// The order of a context's children is that of their birth, not of their addresses.
		{"context/context.go", "children map[canceler]struct{} //", "born int\n\tchildren map[canceler]int //"},
		{"context/context.go", "p.children = make(map[canceler]struct{})", "p.children = make(map[canceler]int)"},
		{"context/context.go", "p.children[child] = struct{}{}", "p.born++\n\t\t\tp.children[child] = p.born"},
		{"context/context.go", "\tfor child := range c.children {\n", `	for len(c.children) > 0 {
		var child canceler
		for other, born := range c.children {
			if child == nil || born < c.children[child] {
				child = other
			}
		}
		delete(c.children, child)
`},
		// Nobody is interrupted, and a system call ends before others go on.
		{"runtime/proc.go", "func retake(now int64) uint32 {\n", "func retake(now int64) uint32 {\n\tif now > 0 {\n\t\treturn 0\n\t}\n"},
		// Nobody waits for a mutex so long that it is handed over.
		{"internal/sync/mutex.go", "waitStartTime = runtime_nanotime()", "waitStartTime = 1"},
		{"internal/sync/mutex.go", "runtime_nanotime()-waitStartTime > starvationThresholdNs", "false"},
	}
}

// repeatable builds these tests with a Go that decides nothing by itself, and returns
// the program's path. Go caches what it builds; the first time takes a minute.
func repeatable(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	must(t, err)
	texts := map[string]string{}
	for _, e := range edits() {
		path := filepath.Join(strings.TrimSpace(string(root)), "src", e.file)
		if texts[path] == "" {
			text, err := os.ReadFile(path)
			must(t, err)
			texts[path] = string(text)
		}
		if n := strings.Count(texts[path], e.old); n != 1 {
			t.Fatalf("%s has %d times %q: edits() has to follow this version of Go", path, n, e.old)
		}
		texts[path] = strings.Replace(texts[path], e.old, e.new, 1)
	}
	replace := map[string]string{}
	for path, text := range texts {
		replace[path] = filepath.Join(dir, fmt.Sprint(len(replace), ".go"))
		must(t, os.WriteFile(replace[path], []byte(text), 0o600))
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	must(t, err)
	overlay, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "simulation.test")
	must(t, os.WriteFile(overlay, text, 0o600))
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return program
}

// runInside runs tests in a process of the repeatable program.
func runInside(t *testing.T, program, tests string, args ...string) ([]byte, error) {
	t.Helper()
	args = append([]string{"-simulation.inside", "-test.timeout=0", "-test.run", tests}, args...)
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "GOGC=off")
	return cmd.CombinedOutput()
}

// settings are the arguments of this process that say what is run.
func settings() []string {
	var out []string
	flag.Visit(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "simulation.") {
			out = append(out, "-"+f.Name+"="+f.Value.String())
		}
	})
	return out
}

// Equal seeds give equal traces, whatever ran before in the same process; others do not.
func TestSameSeed(t *testing.T) {
	t.Parallel()
	const first, seeds, steps = 8, 4, 400
	program := repeatable(t)
	traces := func(first, seeds int) map[int]string {
		dir := t.TempDir()
		out, err := runInside(t, program, "^TestSimulation$/^seed", "-simulation.traces", dir,
			fmt.Sprint("-simulation.first=", first), fmt.Sprint("-simulation.seeds=", seeds), fmt.Sprint("-simulation.steps=", steps))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		all := map[int]string{}
		for seed := first; seed < first+seeds; seed++ {
			text, err := os.ReadFile(filepath.Join(dir, fmt.Sprint("seed", seed)))
			must(t, err)
			if n := strings.Count(string(text), "\n"); n < steps/2 {
				t.Fatalf("seed %d has a trace of %d lines", seed, n)
			}
			all[seed] = string(text)
		}
		return all
	}
	once := traces(first, seeds)
	for seed, again := range traces(first+1, seeds-1) {
		if line, a, b := firstDifference(once[seed], again); line != 0 {
			t.Errorf("seed %d: traces differ in line %d:\n%s\n%s", seed, line, a, b)
		}
		if once[seed] == once[first] {
			t.Errorf("seeds %d and %d have the same trace", seed, first)
		}
	}
}

// wholeTrace is where a run writes its trace.
func wholeTrace(t *testing.T, seed uint64) io.Writer {
	t.Helper()
	if *simulationTraces == "" {
		return io.Discard
	}
	f, err := os.Create(filepath.Join(*simulationTraces, fmt.Sprint("seed", seed)))
	must(t, err)
	out := bufio.NewWriter(f)
	t.Cleanup(func() {
		must(t, out.Flush())
		must(t, f.Close())
	})
	return out
}

// firstDifference returns the number and the texts of the first line in which x and y
// differ; it is 0 if they do not.
func firstDifference(x, y string) (line int, a, b string) {
	if x == y {
		return 0, "", ""
	}
	as, bs := strings.Split(x, "\n"), strings.Split(y, "\n")
	for i := range min(len(as), len(bs)) {
		if as[i] != bs[i] {
			return i + 1, as[i], bs[i]
		}
	}
	return min(len(as), len(bs)) + 1, "", ""
}
