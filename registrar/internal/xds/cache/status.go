package cache

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

// Rejection is one resource that a stream rejected and has not accepted since.
type Rejection struct {
	// Key of the resource; its name is empty if the rejection named none.
	Key Key
	// Stream and Node that rejected it.
	Stream uint64
	Node   string
	// Version that was rejected; empty with an empty name.
	Version string
	// Reason in Envoy's words, at most 1 KiB.
	Reason string
	// At is when it was last rejected, Count how often on this stream.
	At    time.Time
	Count int
}

func (r Rejection) compare(o Rejection) int {
	return cmp.Or(r.Key.Compare(o.Key), cmp.Compare(r.Stream, o.Stream))
}

// Status is a report for people.
type Status struct {
	// Held: no stream is answered, the content is not complete.
	Held bool
	// Resources is the number held, by kind.
	Resources map[Kind]int
	// Streams that are connected, oldest first.
	Streams []StreamStatus
	// Rejections in force, sorted.
	Rejections []Rejection
}

// StreamStatus reports one connected stream.
type StreamStatus struct {
	ID      uint64
	Service Service
	// Peer is the server's name for the process at the other end.
	Peer string
	// Node and Agent are the client's ID and version in its own words.
	Node, Agent string
	// Envoy: it said that it is an Envoy of this node.
	Envoy bool
	Since time.Time
	// Types that the stream subscribes to, in order of their kind.
	Types []TypeStatus
}

// TypeStatus reports one type on one stream.
type TypeStatus struct {
	Kind     Kind
	Wildcard bool
	// Named is the number of names subscribed to.
	Named int
	// Sent, Acknowledged and Pending count resources: given to the client and not
	// removed; acknowledged in the version that it should have; still to be sent
	// or acknowledged.
	Sent, Acknowledged, Pending int
	// Unacknowledged is since when a response waits for its acknowledgement; zero
	// if none does.
	Unacknowledged time.Time
}

// Status returns a report. It costs the number of resources that streams have.
func (c *Cache) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := Status{Held: c.held, Resources: make(map[Kind]int)}
	for kind := range numKinds {
		out.Resources[kind] = c.count[kind]
	}
	for service := range numServices {
		for st := range c.streams[service] {
			out.Streams = append(out.Streams, st.statusLocked())
			for _, sub := range st.subs {
				if sub == nil {
					continue
				}
				for _, r := range sub.rejections {
					out.Rejections = append(out.Rejections, *r)
				}
			}
		}
	}
	slices.SortFunc(out.Streams, func(a, b StreamStatus) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(out.Rejections, Rejection.compare)
	return out
}

func (st *Stream) statusLocked() StreamStatus {
	out := StreamStatus{
		ID: st.id, Service: st.service, Peer: st.peer, Since: st.since,
		Node: st.node.GetId(), Agent: agent(st.node), Envoy: st.node != nil && st.envoyLocked(),
	}
	for _, sub := range st.subs {
		if sub == nil {
			continue
		}
		t := TypeStatus{Kind: sub.kind, Wildcard: sub.wildcard, Named: sub.named}
		for _, v := range sub.views {
			if v.busy() {
				t.Pending++
			}
			if v.sent != versionUnknown && v.sent != versionGone {
				t.Sent++
			}
			if want := v.e.want(); v.acked == want && want != versionGone && want != versionUnknown {
				t.Acknowledged++
			}
		}
		if sub.flight != nil {
			t.Unacknowledged = sub.flight.at
		}
		out.Types = append(out.Types, t)
	}
	return out
}

// agent returns what the client says it is, such as "envoy 1.40.0".
func agent(node *corev3.Node) string {
	name := node.GetUserAgentName()
	if build := node.GetUserAgentBuildVersion().GetVersion(); build != nil {
		return fmt.Sprintf("%s %d.%d.%d", name, build.GetMajorNumber(), build.GetMinorNumber(), build.GetPatch())
	}
	if version := node.GetUserAgentVersion(); version != "" {
		return name + " " + version
	}
	return name
}

// Counters are totals of one kind since the cache was made, over all streams.
type Counters struct {
	// Responses sent, and the resources and removals in them.
	Responses, Resources uint64
	// Acknowledged and Rejected responses.
	Acknowledged, Rejected uint64
	// GateTimeouts are responses with something that should have waited longer.
	GateTimeouts uint64
}

// Gauges are present numbers of one kind, over all streams.
type Gauges struct {
	// Held resources.
	Held int
	// Named subscriptions.
	Named int
	// Pending resources: to be sent or to be acknowledged.
	Pending int
}

// Metrics are numbers for a monitoring system. They have no names in them.
type Metrics struct {
	// Held: no stream is answered.
	Held bool
	// Streams connected, by service.
	Streams map[Service]int
	// Envoys are the ADS streams of clients that said that they are Envoys of this
	// node.
	Envoys int
	// Counters and Gauges by kind.
	Counters map[Kind]Counters
	Gauges   map[Kind]Gauges
}

// Metrics returns the present numbers. It costs the number of streams.
func (c *Cache) Metrics() Metrics {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := Metrics{
		Held:     c.held,
		Streams:  make(map[Service]int, numServices),
		Counters: make(map[Kind]Counters, numKinds),
		Gauges:   make(map[Kind]Gauges, numKinds),
	}
	for service := range numServices {
		m.Streams[service] = len(c.streams[service])
	}
	for st := range c.streams[ADS] {
		if st.node != nil && st.envoyLocked() {
			m.Envoys++
		}
	}
	for kind := range numKinds {
		m.Counters[kind] = c.counters[kind]
		g := Gauges{Held: c.count[kind]}
		for st := range c.streams[kind.service()] {
			if sub := st.subs[kind]; sub != nil {
				g.Named += sub.named
				g.Pending += sub.pending()
			}
		}
		m.Gauges[kind] = g
	}
	return m
}

// pending counts what is to be sent or acknowledged; a view that changed while
// it was in flight counts twice.
func (s *subscription) pending() int {
	n := len(s.dirty)
	if s.flight != nil {
		n += len(s.flight.views)
	}
	for i := range s.suspects {
		n += len(s.suspects[i].views)
	}
	return n
}
