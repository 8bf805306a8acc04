package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

// The packages whose Go benchmarks are run here.
const (
	cachePackage      = "./registrar/internal/xds/cache"
	projectionPackage = "./registrar/internal/projection"
)

// changeRounds is how often the caches are measured in turns; the lowest processor
// time counts, which the rest of the machine disturbs least.
const changeRounds = 4

// goBench is the compiled benchmarks of one package.
type goBench struct{ binary, dir string }

// compile builds the benchmarks of a package of this module.
func compile(ctx context.Context, pkg string) (goBench, error) {
	b := goBench{binary: filepath.Join(logDir, filepath.Base(pkg)+".test"), dir: pkg}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-o", b.binary, pkg)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return b, fmt.Errorf("build the benchmarks of %s (run bench in the module's folder): %w", pkg, err)
	}
	return b, nil
}

// run runs the benchmarks that pattern selects and returns unit's values by name,
// without Benchmark in front and the number of cores behind.
func (b goBench) run(ctx context.Context, pattern, benchtime, unit string) (map[string]float64, error) {
	cmd := exec.CommandContext(ctx, b.binary, "-test.run=^$", "-test.bench="+pattern, "-test.benchtime="+benchtime)
	cmd.Dir = b.dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", pattern, err, out)
	}
	values := make(map[string]float64)
	for r := benchfmt.NewReader(bytes.NewReader(out), pattern); r.Scan(); {
		result, ok := r.Result().(*benchfmt.Result)
		if !ok {
			continue
		}
		i := slices.IndexFunc(result.Values, func(v benchfmt.Value) bool { return v.Unit == unit || v.OrigUnit == unit })
		if i < 0 {
			return nil, fmt.Errorf("%s: no %s in the results of %s", pattern, unit, result.Name)
		}
		v := result.Values[i]
		if v.OrigUnit == unit {
			v.Value = v.OrigValue
		}
		base, parts := result.Name.Parts()
		parts = slices.DeleteFunc(parts, func(p []byte) bool { return p[0] == '-' }) // the number of cores
		values[string(base)+string(bytes.Join(parts, nil))] = v.Value
	}
	if len(values) == 0 {
		return nil, fmt.Errorf("%s: no benchmark of %s matches", pattern, b.dir)
	}
	return values, nil
}

// series is one benchmark at three sizes.
type series struct {
	pkg, name, benchtime, unit string
	rounds                     int
}

// changeSeries are the caches, from a change to its acknowledgement, and what comes
// before them.
func changeSeries() []series {
	const cache = "EndpointChange/cache="
	return []series{
		{cachePackage, cache + "portolan/resources=", "1000x", "cpu-ns/op", changeRounds},
		{cachePackage, cache + "linear/resources=", "1000x", "cpu-ns/op", changeRounds},
		// One change costs a thousand times as much.
		{cachePackage, cache + "snapshot/resources=", "2x", "cpu-ns/op", 1},
		{projectionPackage, "EndpointChange/endpoints=", "1000x", "ns/op", changeRounds},
	}
}

// endpointChange compares what one change costs, at three sizes.
func endpointChange(ctx context.Context, _ *rig) ([]measure.Figure, error) {
	benches := make(map[string]goBench)
	all := changeSeries()
	least := make([]map[string]float64, len(all))
	for i, s := range all {
		var err error
		if _, ok := benches[s.pkg]; !ok {
			if benches[s.pkg], err = compile(ctx, s.pkg); err != nil {
				return nil, err
			}
		}
		least[i] = make(map[string]float64)
	}
	for round := range changeRounds {
		for i, s := range all {
			if round >= s.rounds {
				continue
			}
			got, err := benches[s.pkg].run(ctx, "^Benchmark"+strings.Replace(s.name, "/", "$/^", 1), s.benchtime, s.unit)
			if err != nil {
				return nil, err
			}
			for name, v := range got {
				if old, ok := least[i][name]; !ok || v < old {
					least[i][name] = v
				}
			}
		}
	}
	ours, oursText := micros(least[0], all[0].name)
	_, linear := micros(least[1], all[1].name)
	_, snapshot := micros(least[2], all[2].name)
	before, beforeText := micros(least[3], all[3].name)
	return []measure.Figure{
		{
			OK:       slices.Max(ours) <= 30 && flat(ours),
			What:     "one endpoint change, cache to acknowledgement, at 100 / 10,000 / 100,000 load assignments, 200 subscribed (processor time)",
			Measured: oursText, Compared: fmt.Sprintf("LinearCache %s; SnapshotCache %s", linear, snapshot), Aim: "<= 30 us and flat",
		},
		{
			OK:       slices.Max(before) <= 30 && flat(before),
			What:     "before that: record to new load assignments of two ports, at 100 / 10,000 / 100,000 endpoints",
			Measured: beforeText, Aim: "<= 30 us and flat",
		},
	}, nil
}

// micros are nanoseconds at the three sizes as microseconds.
func micros(nanos map[string]float64, name string) ([]float64, string) {
	var values []float64
	var texts []string
	for _, size := range []string{"100", "10000", "100000"} {
		v := nanos[name+size] / 1000
		values = append(values, v)
		texts = append(texts, fmt.Sprintf("%.3g", v))
	}
	return values, strings.Join(texts, " / ") + " us"
}

// flat reports that the largest size costs no more than twice the smallest: a
// larger table has more cache misses, but no more work.
func flat(values []float64) bool { return slices.Max(values) <= 2*slices.Min(values) }

// memoryPerEndpoint is what the projection keeps of a record.
func memoryPerEndpoint(ctx context.Context, _ *rig) ([]measure.Figure, error) {
	projection, err := compile(ctx, projectionPackage)
	if err != nil {
		return nil, err
	}
	got, err := projection.run(ctx, "^BenchmarkMemoryPerEndpoint$", "1x", "bytes/endpoint")
	if err != nil {
		return nil, err
	}
	hundred, ten := got["MemoryPerEndpoint/pods=100"], got["MemoryPerEndpoint/pods=10"]
	return []measure.Figure{{
		OK: max(hundred, ten) <= 500, What: "memory of an endpoint in the projection, 100,000 with three ports each, 100 / 10 in a service",
		Measured: fmt.Sprintf("%.0f / %.0f bytes", hundred, ten), Aim: "<= 500 bytes",
	}}, nil
}
