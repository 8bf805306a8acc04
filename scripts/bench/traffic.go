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
// has two.
func requests(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
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
	fortio := n.Binary("fortio")
	if _, err := server.Start("fortio", append([]string{fortio}, traffic.FortioServer()...)...); err != nil {
		return nil, err
	}
	if err := n.WaitHealthy(ctx, "default/traffic", 8080, 1); err != nil {
		return nil, err
	}
	written, err := startByHand(ctx, r, client, server)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, written.stop()) }()

	ours, theirs := []int{n.Envoy.Pid()}, []int{written.cmd.Process.Pid}
	comparison := traffic.Comparison{
		Hops:   "two passes of one Envoy with two workers",
		Direct: traffic.Way{URL: fmt.Sprintf("http://%s:8080/", server.IP())},
		Mesh:   traffic.Way{URL: "http://traffic.aether.internal/", Envoys: ours},
		HTTP1:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP1Port), Envoys: theirs},
		HTTP2:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP2Port), Envoys: theirs},
		Fortio: func(ctx context.Context, args ...string) (string, error) {
			return client.Exec(ctx, append([]string{fortio}, args...)...)
		},
	}
	return comparison.Measure(ctx)
}
