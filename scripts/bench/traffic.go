package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/node"
)

const (
	trafficRounds = 15
	trafficTime   = 700 * time.Millisecond
	// trafficConnections saturate the two workers of the node's Envoy.
	trafficConnections = 16
)

// load is what fortio measured, and what Envoy spent on each request.
type load struct {
	p50      time.Duration
	qps      float64
	requests int64
	envoy    float64 // microseconds of processor time
}

// traffic compares requests from pod to pod on one node: through the mesh, direct,
// and through an Envoy of the same number of workers with a hand-written
// configuration of the same hops. Each request passes Envoy twice, out of the one
// pod and into the other. That both passes are in one process, on one node, is what
// one node can show: with two nodes each pass has an Envoy of its own.
func traffic(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	n, err := r.node(ctx)
	if err != nil {
		return nil, err
	}
	server, err := n.AddPod(ctx, node.PodSpec{Name: "traffic", Annotations: map[string]string{"endpoint.aether.io/ports": "8080"}})
	if err != nil {
		return nil, err
	}
	defer deletePods(ctx, &err, server)
	client, err := n.AddPod(ctx, node.PodSpec{Name: "traffic-client", Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
	if err != nil {
		return nil, err
	}
	defer deletePods(ctx, &err, client)
	path := n.Binary("fortio")
	if _, err := server.Start("fortio", path, "server", "-http-port", "8080", "-grpc-port", "disabled",
		"-redirect-port", "disabled", "-tcp-port", "disabled", "-udp-port", "disabled", "-loglevel", "error"); err != nil {
		return nil, err
	}
	if err := n.WaitHealthy(ctx, "default/traffic", 8080, 1); err != nil {
		return nil, err
	}
	byHand, err := startHandwritten(ctx, r, client, server)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, byHand.stop()) }()

	ours, theirs := n.Envoy.Pid(), byHand.cmd.Process.Pid
	compare := func(connections int) ([][]load, error) {
		generator := fortio{path: path, from: client, connections: connections}
		run := func(url string, envoy int) func(context.Context) (load, error) {
			return func(ctx context.Context) (load, error) { return generator.send(ctx, url, envoy) }
		}
		return measure.Interleave(ctx, trafficRounds,
			measure.Variant[load]{Name: "direct", Measure: run(fmt.Sprintf("http://%s:8080/", server.IP()), ours)},
			measure.Variant[load]{Name: "portolan", Measure: run("http://traffic.aether.internal/", ours)},
			measure.Variant[load]{Name: "hand-written, HTTP/1.1 between", Measure: run(fmt.Sprintf("http://127.0.0.1:%d/", handwrittenHTTP1), theirs)},
			measure.Variant[load]{Name: "hand-written, HTTP/2 between", Measure: run(fmt.Sprintf("http://127.0.0.1:%d/", handwrittenHTTP2), theirs)},
		)
	}
	one, err := compare(1)
	if err != nil {
		return nil, err
	}
	many, err := compare(trafficConnections)
	if err != nil {
		return nil, err
	}
	return append([]measure.Figure{latency(one)}, throughput(many)...), nil
}

// fortio is the load generator, in a pod.
type fortio struct {
	path        string
	from        *node.Pod
	connections int
}

// send sends requests as fast as they are answered, and looks at the Envoy with
// this process ID meanwhile.
func (f fortio) send(ctx context.Context, url string, envoy int) (load, error) {
	before, err := measure.ProcessorTime(envoy)
	if err != nil {
		return load{}, err
	}
	out, err := f.from.Exec(ctx, f.path, "load", "-quiet", "-loglevel", "error", "-c", strconv.Itoa(f.connections), "-qps", "0",
		"-t", trafficTime.String(), "-r", "0.000005", "-p", "50", "-json", "-", url)
	if err != nil {
		return load{}, err
	}
	l, err := readLoad(out)
	if err != nil {
		return load{}, err
	}
	after, err := measure.ProcessorTime(envoy)
	l.envoy = float64((after - before).Microseconds()) / float64(l.requests)
	return l, err
}

func latency(loads [][]load) measure.Figure {
	var times [4][]time.Duration
	for i, rounds := range loads {
		for _, l := range rounds {
			times[i] = append(times[i], l.p50)
		}
	}
	mesh, http1, http2 := measure.P50(measure.Minus(times[1], times[0])), measure.P50(measure.Minus(times[2], times[0])), measure.P50(measure.Minus(times[3], times[0]))
	best := min(http1, http2)
	return measure.Figure{
		OK: measure.Ratio(mesh, best) <= 1.05, What: "latency that the mesh adds, one connection, two passes of one Envoy",
		Measured: fmt.Sprintf("%+.1f %% (+%s to direct %s)", 100*(measure.Ratio(mesh, best)-1), measure.Millis(mesh), measure.Millis(measure.P50(times[0]))),
		Compared: fmt.Sprintf("hand-written Envoy with HTTP/1.1 (+%s) or HTTP/2 (+%s) between the passes, the better", measure.Millis(http1), measure.Millis(http2)),
		Aim:      "<= 5 % worse",
	}
}

// throughput compares with the same protocol between the passes, and with HTTP/2
// there, which the mesh speaks only for clients that do.
func throughput(loads [][]load) []measure.Figure {
	var rates, spent [4][]float64
	for i, rounds := range loads {
		for _, l := range rounds {
			rates[i], spent[i] = append(rates[i], l.qps), append(spent[i], l.envoy)
		}
	}
	row := func(i int, version string) measure.Figure {
		relative := make([]float64, trafficRounds)
		for round := range relative {
			relative[round] = rates[1][round] / rates[i][round]
		}
		return measure.Figure{
			OK:   measure.P50(relative) >= 0.95,
			What: fmt.Sprintf("requests/s of HTTP/1.1 clients, %d connections, two passes of one Envoy with two workers", trafficConnections),
			Measured: fmt.Sprintf("%+.1f %% (%.0f/s, %.0f us of Envoy's processor time each; direct %.0f/s)",
				100*(measure.P50(relative)-1), measure.P50(rates[1]), measure.P50(spent[1]), measure.P50(rates[0])),
			Compared: fmt.Sprintf("hand-written Envoy with %s between the passes (%.0f/s, %.0f us)", version, measure.P50(rates[i]), measure.P50(spent[i])),
			Aim:      "<= 5 % worse",
		}
	}
	return []measure.Figure{row(2, "HTTP/1.1"), row(3, "HTTP/2")}
}

// readLoad reads fortio's report; an answer that is not 200 is an error.
func readLoad(report string) (load, error) {
	var r struct {
		ActualQPS         float64
		RetCodes          map[string]int64
		DurationHistogram struct {
			Percentiles []struct{ Value float64 }
		}
	}
	if err := json.Unmarshal([]byte(report), &r); err != nil {
		return load{}, fmt.Errorf("read fortio's report: %w", err)
	}
	if len(r.DurationHistogram.Percentiles) == 0 || len(r.RetCodes) != 1 || r.RetCodes["200"] == 0 {
		return load{}, fmt.Errorf("fortio's answers were %v", r.RetCodes)
	}
	return load{
		p50: time.Duration(r.DurationHistogram.Percentiles[0].Value * float64(time.Second)),
		qps: r.ActualQPS, requests: r.RetCodes["200"],
	}, nil
}
