package wiretest

import (
	"fmt"
	"maps"
	"slices"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
)

// deltaStream is what the two services' streams have in common.
type deltaStream interface {
	Send(*discoveryv3.DeltaDiscoveryResponse) error
	Recv() (*discoveryv3.DeltaDiscoveryRequest, error)
}

// stream is one open delta stream. XDS.mu guards it.
type stream struct {
	onDemand bool
	subs     map[string]*subscription
	signal   chan struct{}
	counter  int
}

// subscription is what a stream asked for of one type.
type subscription struct {
	wildcard bool
	names    map[string]bool
	sent     map[string]string // name -> version
	forced   map[string]bool   // to be sent again though equal
	nonce    string            // of the response in flight
	inFlight []string          // its names
	started  bool              // the first response was sent
}

// update is what a response would carry.
type update struct {
	add    []*discoveryv3.Resource
	remove []string
	first  bool
}

func (u update) empty() bool { return len(u.add) == 0 && len(u.remove) == 0 && !u.first }

func (s *stream) wake() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}

// serve runs one stream until it ends.
func (x *XDS) serve(ds deltaStream, onDemand bool) error {
	s := &stream{onDemand: onDemand, subs: make(map[string]*subscription), signal: make(chan struct{}, 1)}
	x.mu.Lock()
	x.streams[s] = true
	if onDemand {
		x.opened++
	}
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		delete(x.streams, s)
		x.mu.Unlock()
	}()
	requests := make(chan *discoveryv3.DeltaDiscoveryRequest)
	failed := make(chan error, 1)
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			r, err := ds.Recv()
			if err != nil {
				failed <- err
				return
			}
			select {
			case requests <- r:
			case <-done:
				return
			}
		}
	}()
	for {
		select {
		case err := <-failed:
			return err
		case r := <-requests:
			x.receive(s, r)
		case <-s.signal:
		}
		for _, typeURL := range []string{TypeCluster, TypeEndpoint, TypeSecret, TypeListener, TypeRoute} {
			if response := x.respond(s, typeURL); response != nil {
				if err := ds.Send(response); err != nil {
					return err
				}
			}
		}
	}
}

// receive takes a subscription change, an acknowledgement or a rejection.
func (x *XDS) receive(s *stream, r *discoveryv3.DeltaDiscoveryRequest) {
	x.mu.Lock()
	defer x.mu.Unlock()
	sub := s.subs[r.GetTypeUrl()]
	if sub == nil {
		sub = &subscription{names: make(map[string]bool), sent: make(map[string]string), forced: make(map[string]bool)}
		sub.wildcard = len(r.GetResourceNamesSubscribe()) == 0 && !s.onDemand
		maps.Copy(sub.sent, r.GetInitialResourceVersions())
		s.subs[r.GetTypeUrl()] = sub
	}
	for _, name := range r.GetResourceNamesSubscribe() {
		if name == "*" {
			sub.wildcard = true
			continue
		}
		sub.names[name] = true
		sub.forced[name] = true
		if s.onDemand {
			x.asked[name]++
			if x.onDemand[name] == nil && x.unknown != nil {
				x.onDemand[name] = x.wrap(x.unknown(name))
			}
		}
	}
	for _, name := range r.GetResourceNamesUnsubscribe() {
		delete(sub.names, name)
		delete(sub.forced, name)
		delete(sub.sent, name)
	}
	if r.GetResponseNonce() == "" || r.GetResponseNonce() != sub.nonce {
		return
	}
	if detail := r.GetErrorDetail(); detail != nil {
		x.nacks = append(x.nacks, fmt.Sprintf("%s %v: %s", shortType(r.GetTypeUrl()), sub.inFlight, detail.GetMessage()))
	} else if r.GetTypeUrl() == TypeCluster {
		x.resendEndpoints(sub.inFlight)
	}
	sub.nonce, sub.inFlight = "", nil
}

// resendEndpoints sends the load assignments of clusters that were just
// acknowledged again: an updated cluster waits for one (XDS-D7).
func (x *XDS) resendEndpoints(clusters []string) {
	for s := range x.streams {
		sub := s.subs[TypeEndpoint]
		if sub == nil || s.onDemand {
			continue
		}
		for _, name := range clusters {
			if sub.names[name] {
				sub.forced[name] = true
				s.wake()
			}
		}
	}
}

// respond returns the next response of a type, nil when there is nothing to say or
// an acknowledgement is due.
func (x *XDS) respond(s *stream, typeURL string) *discoveryv3.DeltaDiscoveryResponse {
	x.mu.Lock()
	defer x.mu.Unlock()
	sub := s.subs[typeURL]
	if sub == nil || sub.nonce != "" {
		return nil
	}
	if clusters := s.subs[TypeCluster]; typeURL == TypeListener && clusters != nil {
		// A listener may name a cluster that is still on its way, or that was set after
		// this round had looked at clusters.
		if clusters.nonce != "" || len(x.pending(s, TypeCluster).add) > 0 {
			return nil
		}
	}
	u := x.pending(s, typeURL)
	if u.empty() {
		return nil
	}
	s.counter++
	sub.nonce = fmt.Sprintf("%s-%d", shortType(typeURL), s.counter)
	sub.started = true
	for _, r := range u.add {
		sub.sent[r.GetName()] = r.GetVersion()
		delete(sub.forced, r.GetName())
		sub.inFlight = append(sub.inFlight, r.GetName())
	}
	for _, name := range u.remove {
		delete(sub.sent, name)
		delete(sub.forced, name)
	}
	if typeURL == TypeCluster && !s.onDemand {
		// On this stream a cluster's acknowledgement waits for its endpoints.
		x.resendEndpoints(sub.inFlight)
	}
	return &discoveryv3.DeltaDiscoveryResponse{TypeUrl: typeURL, Nonce: sub.nonce, Resources: u.add, RemovedResources: u.remove}
}

// pending computes what the stream lacks. The caller holds mu.
func (x *XDS) pending(s *stream, typeURL string) update {
	sub := s.subs[typeURL]
	set := x.sets[typeURL]
	if s.onDemand {
		set = x.onDemand
	}
	wanted := make(map[string]bool, len(sub.names))
	for name := range sub.names {
		wanted[name] = true
	}
	if sub.wildcard {
		for name := range set {
			wanted[name] = true
		}
	}
	u := update{first: sub.wildcard && !sub.started}
	for _, name := range names(wanted) {
		r := set[name]
		switch {
		case r != nil && (sub.sent[name] != r.version || sub.forced[name]):
			u.add = append(u.add, &discoveryv3.Resource{Name: name, Version: r.version, Resource: r.body})
		case r == nil && x.withheld[name]:
		case r == nil && typeURL == TypeEndpoint && sub.sent[name] == "":
			// A name without endpoints is answered all the same (XDS-D1).
			empty := x.wrap(&endpointv3.ClusterLoadAssignment{ClusterName: name})
			u.add = append(u.add, &discoveryv3.Resource{Name: name, Version: empty.version, Resource: empty.body})
		case r == nil && sub.forced[name] && (s.onDemand || typeURL == TypeSecret):
			u.remove = append(u.remove, name)
		}
	}
	for _, name := range names(sub.sent) {
		if set[name] == nil && typeURL != TypeEndpoint {
			u.remove = append(u.remove, name)
		}
	}
	slices.Sort(u.remove)
	u.remove = slices.Compact(u.remove)
	return u
}
