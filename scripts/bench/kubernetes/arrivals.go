package main

import (
	"context"
	"encoding/json"
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

// subscribe asks the server at target, as a node, for load assignments and tells what is
// in them.
func subscribe(ctx context.Context, target, node string, names []string, to *arrivals) (*delta.Client, error) {
	client, err := delta.Watch(ctx, target, node, func(resp *discoveryv3.DeltaDiscoveryResponse) { to.see(changesIn(resp)...) })
	if err != nil {
		return nil, err
	}
	return client, client.Subscribe(delta.EndpointType, names...)
}

// follow tells the changes in every object of a path that a plain watch delivers, until
// ctx ends.
func (r *rig) follow(ctx context.Context, path string, changes func(object json.RawMessage) []change, to *arrivals) (stop func() error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := r.client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").Param("watch", "true").Stream(ctx)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch %s: %w", path, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		decoder := json.NewDecoder(stream)
		for {
			var event struct{ Object json.RawMessage }
			if decoder.Decode(&event) != nil {
				return // who waits for more gives up
			}
			to.see(changes(event.Object)...)
		}
	}()
	return func() error {
		cancel()
		<-done
		return stream.Close()
	}, nil
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
