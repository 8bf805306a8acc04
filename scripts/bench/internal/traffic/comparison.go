package traffic

import (
	"context"
	"fmt"
	"time"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

const (
	rounds = 15
	// manyConnections saturate an Envoy of two workers.
	manyConnections = 16
)

// Way is one way from the client pod to the server.
type Way struct {
	// URL is what the client dials.
	URL string
	// Envoys are the process IDs of those that a request passes.
	Envoys []int
}

// Comparison is of four ways between the same two pods.
type Comparison struct {
	// Hops says for the table which Envoys a request passes.
	Hops string
	// Direct passes no Envoy; HTTP1 and HTTP2 are hand-written, by the protocol between
	// the passes.
	Direct, Mesh, HTTP1, HTTP2 Way
	// Fortio runs fortio in the client pod and returns what it prints.
	Fortio func(ctx context.Context, args ...string) (string, error)
}

// Latency returns a row for the latency of one connection.
func (c Comparison) Latency(ctx context.Context) ([]measure.Figure, error) {
	one, err := c.send(ctx, 1)
	if err != nil {
		return nil, err
	}
	return []measure.Figure{c.latency(one)}, nil
}

// Throughput returns two rows for the requests per second of many connections: the mesh
// keeps HTTP/1.1 between the passes for clients that speak it, so it is compared with
// that, and with HTTP/2 there.
func (c Comparison) Throughput(ctx context.Context) ([]measure.Figure, error) {
	many, err := c.send(ctx, manyConnections)
	if err != nil {
		return nil, err
	}
	return []measure.Figure{c.throughput(many, 2, "HTTP/1.1"), c.throughput(many, 3, "HTTP/2")}, nil
}

// send returns the loads by way, in the order of the fields, and round.
func (c Comparison) send(ctx context.Context, connections int) ([][]load, error) {
	variant := func(name string, w Way) measure.Variant[load] {
		return measure.Variant[load]{Name: name, Measure: func(ctx context.Context) (load, error) {
			before, err := processorTime(w.Envoys)
			if err != nil {
				return load{}, err
			}
			report, err := c.Fortio(ctx, fortioLoad(connections, w.URL)...)
			if err != nil {
				return load{}, err
			}
			l, err := readLoad(report)
			if err != nil {
				return load{}, err
			}
			after, err := processorTime(w.Envoys)
			l.envoy = float64((after - before).Microseconds()) / float64(l.requests)
			return l, err
		}}
	}
	return measure.Interleave(ctx, rounds, variant("direct", c.Direct), variant("the mesh", c.Mesh),
		variant("hand-written, HTTP/1.1 between", c.HTTP1), variant("hand-written, HTTP/2 between", c.HTTP2))
}

// processorTime is what processes have used together so far.
func processorTime(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		used, err := measure.ProcessorTime(pid)
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}

func (c Comparison) latency(loads [][]load) measure.Figure {
	var times [4][]time.Duration
	for i, rounds := range loads {
		for _, l := range rounds {
			times[i] = append(times[i], l.p50)
		}
	}
	added := func(i int) time.Duration { return measure.P50(measure.Minus(times[i], times[0])) }
	mesh, http1, http2 := added(1), added(2), added(3)
	best := min(http1, http2)
	return measure.Figure{
		OK: measure.Ratio(mesh, best) <= 1.05, What: "latency that the mesh adds, one connection, " + c.Hops,
		Measured: fmt.Sprintf("%+.1f %% (+%s to direct %s)", 100*(measure.Ratio(mesh, best)-1), measure.Millis(mesh), measure.Millis(measure.P50(times[0]))),
		Compared: fmt.Sprintf("hand-written Envoy with HTTP/1.1 (+%s) or HTTP/2 (+%s) between the passes, the better", measure.Millis(http1), measure.Millis(http2)),
		Aim:      "<= 5 % worse",
	}
}

// throughput compares with the way at index i.
func (c Comparison) throughput(loads [][]load, i int, version string) measure.Figure {
	var rates, spent [4][]float64
	for i, rounds := range loads {
		for _, l := range rounds {
			rates[i], spent[i] = append(rates[i], l.qps), append(spent[i], l.envoy)
		}
	}
	relative := make([]float64, rounds)
	for round := range relative {
		relative[round] = rates[1][round] / rates[i][round]
	}
	return measure.Figure{
		OK:   measure.P50(relative) >= 0.95,
		What: fmt.Sprintf("requests/s of HTTP/1.1 clients, %d connections, %s", manyConnections, c.Hops),
		Measured: fmt.Sprintf("%+.1f %% (%.0f/s, %.0f us of Envoy's processor time each; direct %.0f/s)",
			100*(measure.P50(relative)-1), measure.P50(rates[1]), measure.P50(spent[1]), measure.P50(rates[0])),
		Compared: fmt.Sprintf("hand-written Envoy with %s between the passes (%.0f/s, %.0f us)", version, measure.P50(rates[i]), measure.P50(spent[i])),
		Aim:      "<= 5 % worse",
	}
}
