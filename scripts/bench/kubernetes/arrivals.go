package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/portolan-mesh/portolan/scripts/delta"
)

// change is a state of an endpoint that it has once: a weight.
type change struct {
	address string
	weight  uint32
}

// arrivals tells when changes arrive at a place.
type arrivals struct {
	mu      sync.Mutex // guards what follows
	waiting map[change]chan time.Time
	// answers counts what brought them.
	answers int
}

func newArrivals() *arrivals { return &arrivals{waiting: make(map[change]chan time.Time)} }

// expect returns where the time of a change's arrival comes, once.
func (a *arrivals) expect(c change) <-chan time.Time {
	arrived := make(chan time.Time, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting[c] = arrived
	return arrived
}

// see takes that the changes are there now.
func (a *arrivals) see(changes ...change) {
	now := time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers++
	for _, c := range changes {
		if arrived, ok := a.waiting[c]; ok {
			arrived <- now
			delete(a.waiting, c)
		}
	}
}

// wait returns when the change arrived.
func wait(ctx context.Context, where string, arrived <-chan time.Time) (time.Time, error) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case at := <-arrived:
		return at, nil
	case <-timer.C:
		return time.Time{}, fmt.Errorf("a change did not arrive at %s", where)
	case <-ctx.Done():
		return time.Time{}, ctx.Err()
	}
}

// subscribe asks a node's registrar for load assignments and tells what is in them.
func (r *rig) subscribe(ctx context.Context, node int, names []string, to *arrivals) (*delta.Client, error) {
	socket, err := r.lab.File(node, "/run/portolan/xds/xds.sock")
	if err != nil {
		return nil, err
	}
	client, err := delta.Watch(ctx, "unix://"+socket, func(resp *discoveryv3.DeltaDiscoveryResponse) { to.see(changesIn(resp)...) })
	if err != nil {
		return nil, err
	}
	return client, client.Subscribe(delta.EndpointType, names...)
}

// changesIn are the states of all endpoints in a response.
func changesIn(resp *discoveryv3.DeltaDiscoveryResponse) []change {
	var all []change
	for _, resource := range resp.GetResources() {
		var assignment endpointv3.ClusterLoadAssignment
		if resource.GetResource().UnmarshalTo(&assignment) != nil {
			continue // what is waited for does not come
		}
		for _, group := range assignment.GetEndpoints() {
			for _, ep := range group.GetLbEndpoints() {
				all = append(all, change{
					address: ep.GetEndpoint().GetAddress().GetSocketAddress().GetAddress(), weight: ep.GetLoadBalancingWeight().GetValue(),
				})
			}
		}
	}
	return all
}

// count is how many answers have come.
func (a *arrivals) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.answers
}
