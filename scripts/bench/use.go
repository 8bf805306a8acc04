package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/node"
)

const (
	useRounds = 40
	cniSocket = "unix:///run/portolan/cni/cni.sock"
	useURL    = "http://use.aether.internal:9090/"
)

// endpointChangeToEnvoy measures how soon Envoy uses a change. An endpoint goes
// when the registrar is told of its DEL: from that call to the first request that
// no longer reaches it. An endpoint comes when its port listens: that includes the
// wait for the next look at the kernel's listen table, which is no part of the way
// to Envoy.
func endpointChangeToEnvoy(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	n, err := r.node(ctx)
	if err != nil {
		return nil, err
	}
	ports := map[string]string{"endpoint.aether.io/service": "use", "endpoint.aether.io/ports": "8080,9090"}
	// It keeps the name and the cluster and never listens.
	keeper, err := n.AddPod(ctx, node.PodSpec{Name: "use-keeper", Annotations: ports})
	if err != nil {
		return nil, err
	}
	defer deletePods(ctx, &err, keeper)
	client, err := n.AddPod(ctx, node.PodSpec{Name: "use-client", Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
	if err != nil {
		return nil, err
	}
	defer deletePods(ctx, &err, client)
	pods, err := newNetwork(r.bin, portolan())
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(cniSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("call the registrar: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	u := use{network: pods, annotations: ports, caller: newCaller(client, true), registrar: cniv1.NewRegistrarServiceClient(conn)}
	if _, err := u.caller.until(ctx, useURL, http.StatusServiceUnavailable); err != nil {
		return nil, err
	}
	var come, gone []time.Duration
	for range useRounds {
		c, g, err := u.round(ctx)
		if err != nil {
			return nil, err
		}
		come, gone = append(come, c), append(gone, g)
	}
	return []measure.Figure{
		{
			OK: measure.P50(gone) < 5*time.Millisecond, What: "endpoint change in the registrar -> Envoy uses it",
			Measured: fmt.Sprintf("p50 %s, p90 %s", measure.Millis(measure.P50(gone)), measure.Millis(measure.Quantile(gone, 0.9))), Aim: "p50 < 5 ms",
		},
		{
			OK:       measure.P50(come) < 6*time.Millisecond,
			What:     "port of a new pod listens -> first request reaches it (its listen table is read every 2 ms at first)",
			Measured: fmt.Sprintf("p50 %s, p90 %s", measure.Millis(measure.P50(come)), measure.Millis(measure.Quantile(come, 0.9))), Aim: "p50 < 5 ms and the mean wait of 1 ms",
		},
	}, nil
}

type use struct {
	network     *network
	annotations map[string]string
	caller      *caller
	registrar   cniv1.RegistrarServiceClient
}

// round is the life of one pod.
func (u use) round(ctx context.Context) (come, gone time.Duration, err error) {
	a, err := newAttachment(u.network, "use", u.annotations)
	if err != nil {
		return 0, 0, err
	}
	defer func() {
		_, delErr := a.del(context.WithoutCancel(ctx))
		err = errors.Join(err, delErr, a.remove())
	}()
	if _, err := a.add(ctx); err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	server, err := serve(ctx, a.runtime.NetNS, 9090)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	at, err := u.caller.until(ctx, useURL, http.StatusOK)
	if err != nil {
		return 0, 0, err
	}
	come = at.Sub(begin)

	told := make(chan error, 1)
	begin = time.Now()
	go func() {
		_, err := u.registrar.Del(ctx, &cniv1.DelRequest{
			Attachment: &cniv1.Attachment{ContainerId: a.runtime.ContainerID, Ifname: a.runtime.IfName}, Network: node.NetworkName,
		})
		told <- err
	}()
	at, err = u.caller.until(ctx, useURL, http.StatusServiceUnavailable)
	return come, at.Sub(begin), errors.Join(err, <-told)
}
