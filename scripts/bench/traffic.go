package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/handwritten"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/traffic"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// requests compares requests from pod to pod on one node. Each passes Envoy twice, out of
// the one pod and into the other, and both passes are in one process; bench-kubernetes
// has two. The latency is that of one worker: with two it is chance whether the worker of
// the one pass has the other as well, which saves two wakings, and one connection meets
// one case.
func requests(ctx context.Context, r *rig) ([]measure.Figure, error) {
	latency, err := compare(ctx, r, 1, traffic.Comparison.Latency)
	if err != nil {
		return nil, err
	}
	throughput, err := compare(ctx, r, 2, traffic.Comparison.Throughput)
	return append(latency, throughput...), err
}

// compare measures on a node of its own whose Envoy has so many workers.
func compare(ctx context.Context, r *rig, workers int, measured func(traffic.Comparison, context.Context) ([]measure.Figure, error)) (_ []measure.Figure, err error) {
	if err := r.close(ctx); err != nil {
		return nil, err
	}
	options := r.options()
	options.Workers = workers
	n, err := node.Start(ctx, options)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeNode(ctx, n)) }()
	server, err := n.AddPod(ctx, node.PodSpec{Name: "traffic", Annotations: map[string]string{"endpoint.aether.io/ports": "8080"}})
	if err != nil {
		return nil, err
	}
	client, err := n.AddPod(ctx, node.PodSpec{Name: "traffic-client", Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
	if err != nil {
		return nil, err
	}
	fortio := n.Binary("fortio")
	if _, err := server.Start("fortio", append([]string{fortio}, traffic.FortioServer()...)...); err != nil {
		return nil, err
	}
	if err := n.WaitHealthy(ctx, "default/traffic", 8080, 1); err != nil {
		return nil, err
	}
	written, err := startByHand(ctx, r, workers, client, server)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, written.stop()) }()

	ours, theirs := []int{n.Envoy.Pid()}, []int{written.cmd.Process.Pid}
	return measured(traffic.Comparison{
		Hops:   fmt.Sprintf("two passes of one Envoy, workers: %d", workers),
		Direct: traffic.Way{URL: fmt.Sprintf("http://%s:8080/", server.IP())},
		Mesh:   traffic.Way{URL: "http://traffic.aether.internal/", Envoys: ours},
		HTTP1:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP1Port), Envoys: theirs},
		HTTP2:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP2Port), Envoys: theirs},
		Fortio: func(ctx context.Context, args ...string) (string, error) {
			return client.Exec(ctx, append([]string{fortio}, args...)...)
		},
	}, ctx)
}
