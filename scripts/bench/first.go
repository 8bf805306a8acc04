package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// The first request to each of firstPorts ports of firstPods services is measured.
const (
	firstPods    = 4
	firstPorts   = 50
	firstPort    = 7000
	unknownPorts = 200
	// grownTo is how many connections Envoy has held at once before.
	grownTo = 1000
)

// firstRequest measures requests to clusters that Envoy does not have yet, and to
// ports that nobody serves; each asks DNS and opens a connection.
func firstRequest(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	n, err := r.node(ctx)
	if err != nil {
		return nil, err
	}
	client, err := n.AddPod(ctx, node.PodSpec{Name: "first-client", Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
	if err != nil {
		return nil, err
	}
	defer deletePods(ctx, &err, client)
	for i := range firstPods {
		pod, end, err2 := firstServer(ctx, n, fmt.Sprintf("first-%d", i))
		defer deletePods(ctx, &err, pod)
		defer end()
		if err2 != nil {
			return nil, err2
		}
	}
	if err := grow(ctx, client); err != nil {
		return nil, err
	}
	call := newCaller(client, false)
	ask := func(service, port, status int) (time.Duration, error) {
		url := fmt.Sprintf("http://first-%d.aether.internal:%d/", service, port)
		got, took, err := call.get(ctx, url)
		if err == nil && got != status {
			err = fmt.Errorf("%s: status %d, want %d", url, got, status)
		}
		return took, err
	}
	var cold, warm, unknown []time.Duration
	for _, times := range []*[]time.Duration{&cold, &warm} {
		for i := range firstPods * firstPorts {
			took, err := ask(i%firstPods, firstPort+i/firstPods, http.StatusOK)
			if err != nil {
				return nil, err
			}
			*times = append(*times, took)
		}
	}
	for i := range 2 * unknownPorts { // each port twice
		took, err := ask(0, 20_000+i%unknownPorts, http.StatusServiceUnavailable)
		if err != nil {
			return nil, err
		}
		unknown = append(unknown, took)
	}
	worst := measure.Quantile(unknown, 1)
	return []measure.Figure{
		{
			OK: measure.Quantile(cold, 0.99) < 15*time.Millisecond, What: "first request to a (service, port), with DNS and connection",
			Measured: fmt.Sprintf("p99 %s, p50 %s", measure.Millis(measure.Quantile(cold, 0.99)), measure.Millis(measure.P50(cold))),
			Compared: fmt.Sprintf("the second (p50 %s)", measure.Millis(measure.P50(warm))), Aim: "p99 < 15 ms",
		},
		{
			OK: worst < 5*time.Millisecond, What: "request to a port that nobody serves: 503, with DNS and connection",
			Measured: fmt.Sprintf("slowest of %d %s, p50 %s", len(unknown), measure.Millis(worst), measure.Millis(measure.P50(unknown))), Aim: "< 5 ms every time",
		},
	}, nil
}

// grow lets Envoy hold many connections at once, as on a node that has served for a
// while. The first time that it has 128, 256, 512 files open, the kernel holds up the
// thread that opens one more for 10-20 ms: it copies the table of a process with threads
// and waits for a grace period. Three of the 200 requests that are measured met that.
func grow(ctx context.Context, client *node.Pod) error {
	held := make([]net.Conn, 0, grownTo)
	defer func() {
		for _, conn := range held {
			_ = conn.Close()
		}
	}()
	call := newCaller(client, false)
	for range grownTo {
		conn, err := call.dial(ctx, "tcp", net.JoinHostPort("first-0.aether.internal", strconv.Itoa(firstPort)))
		if err != nil {
			return fmt.Errorf("connect to Envoy: %w", err)
		}
		held = append(held, conn)
	}
	return nil
}

// firstServer makes a pod whose ports all listen. end ends its servers; it and pod
// are to be used whatever the error is.
func firstServer(ctx context.Context, n *node.Node, name string) (pod *node.Pod, end func(), err error) {
	var servers []*http.Server
	end = func() {
		for _, s := range servers {
			_ = s.Close()
		}
	}
	var ports []string
	for i := range firstPorts {
		ports = append(ports, fmt.Sprint(firstPort+i))
	}
	pod, err = n.AddPod(ctx, node.PodSpec{Name: name, Annotations: map[string]string{"endpoint.aether.io/ports": strings.Join(ports, ",")}})
	if err != nil {
		return nil, end, err
	}
	var errs []error
	for i := range firstPorts {
		s, err := serve(ctx, pod.Netns, firstPort+i)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		servers = append(servers, s)
	}
	errs = append(errs, n.WaitHealthy(ctx, "default/"+name, firstPort+firstPorts-1, 1))
	return pod, end, errors.Join(errs...)
}
