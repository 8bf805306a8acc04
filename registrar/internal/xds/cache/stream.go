package cache

import (
	"context"
	"errors"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	gcpcache "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
)

var (
	_ gcpcache.ConfigWatcher = (*Stream)(nil)
	_ delta.Callbacks        = (*Stream)(nil)

	errClosed = errors.New("xds stream is closed")
	errSotW   = errors.New("state-of-the-world xds is not served: set api_type DELTA_GRPC")
)

// envoyAgent is what every Envoy calls itself in its node.
const envoyAgent = "envoy"

// StreamParams describes a stream that a server accepted.
type StreamParams struct {
	// Service that the stream belongs to.
	Service Service
	// Peer tells apart the processes at the other end: two streams with the same
	// non-empty Peer are one Envoy. Streams of different peers are paired by node
	// ID only if there is no better match.
	Peer string
}

// Stream is the server's end of one gRPC stream: it owns what the client
// subscribes to and what it was sent and has acknowledged. It is the
// ConfigWatcher and the Callbacks of one delta server that serves this stream
// alone; nobody else calls it.
type Stream struct {
	cache   *Cache
	id      uint64
	service Service
	peer    string
	since   time.Time

	// All below is guarded by cache.mu.

	closed  bool
	touched bool
	// answered: the client has acknowledged or rejected something.
	answered bool
	node     *corev3.Node
	subs     [numKinds]*subscription
	// partners are the streams of the other service that belong to the same Envoy;
	// valid while pairing equals the cache's.
	partners []*Stream
	pairing  uint64
	// stopTimer ends the timer that is set for timerAt; nil without one.
	stopTimer func() bool
	timerAt   time.Time
	// deadline is the earliest end of a gate found while flushing; zero is none.
	deadline time.Time
}

// Open returns a new stream. The caller closes it.
func (c *Cache) Open(p StreamParams) *Stream {
	c.mu.Lock()
	defer c.unlock()
	c.lastStream++
	c.pairing++
	st := &Stream{cache: c, id: c.lastStream, service: p.Service, peer: p.Peer, since: c.clock.Now()}
	c.streams[p.Service][st] = struct{}{}
	c.waits.recheckAll()
	c.demand.signal()
	return st
}

// Close forgets the stream and what it subscribed to. It may be called twice.
func (st *Stream) Close() {
	c := st.cache
	c.mu.Lock()
	defer c.unlock()
	if st.closed {
		return
	}
	st.touchPartners() // gates that waited for this stream are open
	st.closed = true
	delete(c.streams[st.service], st)
	c.pairing++
	for _, sub := range st.subs {
		if sub != nil {
			sub.closeLocked()
		}
	}
	if st.stopTimer != nil {
		st.stopTimer()
		st.stopTimer = nil
	}
	c.waits.recheckAll()
	c.demand.signal()
}

// CreateWatch implements ConfigWatcher; it is never reached by a delta server.
func (st *Stream) CreateWatch(*gcpcache.Request, gcpcache.Subscription, chan gcpcache.Response) (func(), error) {
	return nil, errSotW
}

// CreateDeltaWatch takes in one request: its acknowledgement or rejection, then
// its changes of the subscription, then the permission to send one response.
func (st *Stream) CreateDeltaWatch(
	req *discoveryv3.DeltaDiscoveryRequest, state gcpcache.Subscription, out chan gcpcache.DeltaResponse,
) (cancel func(), err error) {
	c := st.cache
	c.mu.Lock()
	defer c.unlock()
	if st.closed {
		return nil, errClosed
	}
	st.identifyLocked(req.GetNode())
	kind, ok := st.service.kind(req.GetTypeUrl())
	if !ok {
		st.refuseLocked(req, out)
		return nil, nil
	}
	sub := st.subscriptionLocked(kind)
	if nonce := req.GetResponseNonce(); nonce != "" {
		sub.verdictLocked(nonce, req.GetErrorDetail())
	}
	sub.changeLocked(req, state.IsWildcard())
	sub.out = out
	sub.watch++
	watch := sub.watch
	st.touch()
	if kind == OnDemandCluster || kind == WildcardCluster {
		st.touchPartners() // an acknowledgement opens gates of load assignments, or of what is given on demand
	}
	return func() { sub.cancel(watch) }, nil
}

// refuseLocked answers a type that is not served: none of the names exist. A
// name that is never answered would hold up its asker (XDS-D1), and an error
// would end the stream for every other type.
func (st *Stream) refuseLocked(req *discoveryv3.DeltaDiscoveryRequest, out chan gcpcache.DeltaResponse) {
	if req.GetResponseNonce() != "" && len(req.GetResourceNamesSubscribe()) == 0 {
		return // an acknowledgement
	}
	c := st.cache
	c.logs.add(func() {
		c.log.Warn("xds client asks for a type that is not served",
			"type", req.GetTypeUrl(), "stream", st.id, "service", st.service.String())
	})
	if len(out) == cap(out) {
		return
	}
	resp := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: req.GetTypeUrl()}
	for _, name := range req.GetResourceNamesSubscribe() {
		if name != wildcardName {
			resp.RemovedResources = append(resp.RemovedResources, name)
		}
	}
	out <- &gcpcache.DeltaPassthroughResponse{
		DeltaRequest:           &discoveryv3.DeltaDiscoveryRequest{TypeUrl: req.GetTypeUrl()},
		NextVersionMap:         map[string]string{},
		DeltaDiscoveryResponse: resp,
	}
}

// OnDeltaStreamOpen implements Callbacks.
func (st *Stream) OnDeltaStreamOpen(context.Context, int64, string) error { return nil }

// OnDeltaStreamClosed implements Callbacks.
func (st *Stream) OnDeltaStreamClosed(int64, *corev3.Node) { st.Close() }

// OnStreamDeltaRequest implements Callbacks.
func (st *Stream) OnStreamDeltaRequest(int64, *discoveryv3.DeltaDiscoveryRequest) error { return nil }

// OnStreamDeltaResponse learns the nonce that the delta server gave a response,
// just before it is written.
func (st *Stream) OnStreamDeltaResponse(
	_ int64, _ *discoveryv3.DeltaDiscoveryRequest, resp *discoveryv3.DeltaDiscoveryResponse,
) {
	c := st.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	kind, ok := st.service.kind(resp.GetTypeUrl())
	if !ok || st.subs[kind] == nil || st.subs[kind].flight == nil {
		return
	}
	st.subs[kind].flight.nonce = resp.GetNonce()
}

// touch marks the stream to be flushed at the end of the critical section.
func (st *Stream) touch() {
	if !st.touched && !st.closed {
		st.touched = true
		st.cache.touched[st.service] = append(st.cache.touched[st.service], st)
	}
}

// touchPartners marks the streams of the same Envoy.
func (st *Stream) touchPartners() {
	for _, partner := range st.partnersLocked() {
		partner.touch()
	}
}

func (st *Stream) subscriptionLocked(kind Kind) *subscription {
	if st.subs[kind] == nil {
		st.subs[kind] = newSubscription(st, kind)
		st.cache.waits.recheckAll()
	}
	return st.subs[kind]
}

func (st *Stream) identifyLocked(node *corev3.Node) {
	if st.node != nil {
		return
	}
	st.node = node // not nil: the delta server sees to it
	c := st.cache
	c.pairing++
	c.waits.recheckAll() // some waited to hear whether it is an Envoy
	c.demand.signal()
	if node.GetUserAgentName() == envoyAgent && !st.envoyLocked() {
		got := node.GetId()
		c.logs.add(func() {
			c.log.Warn("an Envoy of another node is served, but not waited for: give it the bootstrap that this node's registrar prints",
				"node", got, "want", c.nodeID, "stream", st.id)
		})
	}
}

// silentAfter is how long a client may take to answer for the first time. Envoy
// answers its first response, an empty one, at once.
const silentAfter = 5 * time.Second

// silentLocked reports whether the client takes responses and never answers, on neither
// of its streams. It is no Envoy that works, so nobody waits for it: it must have no veto
// on pods.
func (st *Stream) silentLocked() bool {
	if st.answered || st.cache.clock.Now().Sub(st.since) <= silentAfter {
		return false
	}
	return !slices.ContainsFunc(st.partnersLocked(), func(partner *Stream) bool {
		return partner.answered && partner.pairsLocked(st)
	})
}

// envoyLocked reports whether the client is an Envoy of this node, or has not said
// yet. Others, such as tools that watch, are served, and nobody waits for them.
func (st *Stream) envoyLocked() bool {
	if st.node == nil {
		return true
	}
	return st.node.GetUserAgentName() == envoyAgent && (st.cache.nodeID == "" || st.node.GetId() == st.cache.nodeID)
}

// partnersLocked returns the streams of the other service that belong to the
// same Envoy: an ADS stream has those with its peer or, if there are none, those
// with its node ID; an on-demand stream has those that have it. While an Envoy
// hands over to its successor both have one node ID (hot restart), and the
// peer tells them apart.
func (st *Stream) partnersLocked() []*Stream {
	c := st.cache
	if st.pairing == c.pairing {
		return st.partners
	}
	st.pairing = c.pairing
	st.partners = nil
	if st.service == OnDemand {
		for ads := range c.streams[ADS] {
			for _, od := range ads.partnersLocked() {
				if od == st {
					st.partners = append(st.partners, ads)
				}
			}
		}
		return st.partners
	}
	var byNode []*Stream
	for od := range c.streams[OnDemand] {
		switch {
		case st.peer != "" && od.peer == st.peer:
			st.partners = append(st.partners, od)
		case st.node.GetId() != "" && od.node.GetId() == st.node.GetId():
			byNode = append(byNode, od)
		}
	}
	if st.partners == nil {
		st.partners = byNode
	}
	return st.partners
}

// pairsLocked reports whether a partner surely is the same Envoy's. While an Envoy has
// opened but one of its streams, that of another with its node ID stands in for the other.
func (st *Stream) pairsLocked(partner *Stream) bool { return st.peer == partner.peer }

// flushLocked sends what can be sent, kind by kind, and sets the timer for the
// gates that hold something.
func (st *Stream) flushLocked() {
	if st.closed {
		return
	}
	st.deadline = time.Time{}
	for _, sub := range st.subs {
		if sub != nil {
			sub.sendLocked()
		}
	}
	for _, kind := range []Kind{WildcardCluster, Secret} {
		if sub := st.subs[kind]; sub != nil && len(sub.dirty) > 0 {
			sub.sendLocked() // removals wait for listeners and routes, which came last
		}
	}
	st.armLocked()
}

func (st *Stream) armLocked() {
	if st.deadline.IsZero() || (st.stopTimer != nil && !st.timerAt.After(st.deadline)) {
		return
	}
	if st.stopTimer != nil {
		st.stopTimer()
	}
	c := st.cache
	st.timerAt = st.deadline
	st.stopTimer = c.clock.AfterFunc(st.deadline.Sub(c.clock.Now()), func() {
		c.mu.Lock()
		defer c.unlock()
		st.stopTimer = nil
		st.touch()
		st.touchPartners() // a cluster whose gate ends at the same time goes before its load assignment
	})
}

// ID returns the number that logs and Status give the stream.
func (st *Stream) ID() uint64 { return st.id }
