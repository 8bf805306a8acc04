package xdstest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/anypb"
)

// Wildcard subscribes to every resource of a type.
const Wildcard = "*"

// Stream is the client's end of a delta xDS stream.
type Stream interface {
	Send(*discoveryv3.DeltaDiscoveryRequest) error
	Recv() (*discoveryv3.DeltaDiscoveryResponse, error)
	CloseSend() error
}

// Verdict is what the client does about a response.
type Verdict struct {
	action action
	reason string
}

type action uint8

const (
	ack action = iota
	nack
	withhold
)

// Ack applies and acknowledges the response.
func Ack() Verdict { return Verdict{} }

// Nack rejects the response with a reason in Envoy's words and applies nothing.
func Nack(reason string) Verdict { return Verdict{action: nack, reason: reason} }

// Withhold applies the response and says nothing until Release.
func Withhold() Verdict { return Verdict{action: withhold} }

// Judge decides about a response. It is called by one goroutine.
type Judge func(*discoveryv3.DeltaDiscoveryResponse) Verdict

// Resource is what the client holds of a name.
type Resource struct {
	// Version that the server gave it.
	Version string
	// Body of the resource.
	Body *anypb.Any
}

// State is what the client knows of one type.
type State struct {
	// Resources held, by name.
	Resources map[string]Resource
	// Subscribed names; Wildcard is one of them.
	Subscribed map[string]bool
	// Received and Removed count how often a name came and was said to be gone.
	Received, Removed map[string]int
	// Responses in order of arrival.
	Responses []*discoveryv3.DeltaDiscoveryResponse
	// Acked, Nacked and Withheld count responses.
	Acked, Nacked, Withheld int
}

func newState() *State {
	return &State{
		Resources:  make(map[string]Resource),
		Subscribed: make(map[string]bool),
		Received:   make(map[string]int),
		Removed:    make(map[string]int),
	}
}

// Versions returns the version of every resource held.
func (s *State) Versions() map[string]string {
	out := make(map[string]string, len(s.Resources))
	for name, r := range s.Resources {
		out[name] = r.Version
	}
	return out
}

// Names returns the names of the resources held, sorted.
func (s *State) Names() []string { return slices.Sorted(maps.Keys(s.Resources)) }

// Options are what a Client needs beside its stream.
type Options struct {
	// Node is sent with the first request; nil sends none.
	Node *corev3.Node
	// Judge of responses; nil acknowledges all.
	Judge Judge
}

// Client speaks delta xDS on one stream. Its methods are safe for concurrent use.
type Client struct {
	stream Stream
	done   chan struct{} // closed when the stream has ended

	sendMu sync.Mutex // orders requests; taken before mu

	// mu guards all below.
	mu       sync.Mutex
	node     *corev3.Node // nil once it was sent
	judge    Judge
	states   map[string]*State
	withheld map[string][]string // nonces by type
	order    []*discoveryv3.DeltaDiscoveryResponse
	changed  chan struct{} // closed and replaced at every change
	err      error         // why the stream ended
}

// New returns a client that uses stream.
func New(stream Stream, opts Options) *Client {
	c := &Client{
		stream:   stream,
		done:     make(chan struct{}),
		node:     opts.Node,
		judge:    opts.Judge,
		states:   make(map[string]*State),
		withheld: make(map[string][]string),
		changed:  make(chan struct{}),
	}
	if c.judge == nil {
		c.judge = func(*discoveryv3.DeltaDiscoveryResponse) Verdict { return Ack() }
	}
	go c.receive()
	return c
}

// SetJudge changes who decides about later responses.
func (c *Client) SetJudge(j Judge) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.judge = j
}

// Subscribe asks for names. With none it is the empty first request, which means
// the wildcard.
func (c *Client) Subscribe(typeURL string, names ...string) error {
	return c.request(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names})
}

// Unsubscribe gives names up; the client forgets them, unless a wildcard covers
// them.
func (c *Client) Unsubscribe(typeURL string, names ...string) error {
	return c.request(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesUnsubscribe: names})
}

// Resume makes the first request of a type on a stream as a client does that had
// a stream before and holds what state says.
func (c *Client) Resume(typeURL string, state *State) error {
	c.mu.Lock()
	c.stateLocked(typeURL).Resources = maps.Clone(state.Resources)
	c.mu.Unlock()
	return c.request(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl:                 typeURL,
		ResourceNamesSubscribe:  slices.Sorted(maps.Keys(state.Subscribed)),
		InitialResourceVersions: state.Versions(),
	})
}

// Release acknowledges what was withheld of a type, in order.
func (c *Client) Release(typeURL string) error {
	c.mu.Lock()
	nonces := c.withheld[typeURL]
	delete(c.withheld, typeURL)
	c.stateLocked(typeURL).Withheld = 0
	c.stateLocked(typeURL).Acked += len(nonces)
	c.mu.Unlock()
	for _, nonce := range nonces {
		if err := c.request(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: nonce}); err != nil {
			return err
		}
	}
	return nil
}

// Send sends a request as it is and keeps account of its subscriptions.
func (c *Client) Send(req *discoveryv3.DeltaDiscoveryRequest) error { return c.request(req) }

// State returns a copy of what the client knows of a type.
func (c *Client) State(typeURL string) *State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := *c.stateLocked(typeURL)
	s.Resources = maps.Clone(s.Resources)
	s.Subscribed = maps.Clone(s.Subscribed)
	s.Received = maps.Clone(s.Received)
	s.Removed = maps.Clone(s.Removed)
	s.Responses = slices.Clone(s.Responses)
	return &s
}

// Order returns the responses of all types in order of arrival.
func (c *Client) Order() []*discoveryv3.DeltaDiscoveryResponse {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.order)
}

// WaitFor returns when ok says so of the state of a type. ok is called when
// something has changed; it must neither keep nor change what it is given. The
// error says what the state was when ctx or the stream ended.
func (c *Client) WaitFor(ctx context.Context, typeURL string, ok func(*State) bool) error {
	for {
		c.mu.Lock()
		s := c.stateLocked(typeURL)
		if ok(s) {
			c.mu.Unlock()
			return nil
		}
		changed, ended, err := c.changed, c.err != nil, c.err
		was := fmt.Sprintf("%d resources, removed %v, %d responses, %d acknowledged, %d rejected",
			len(s.Resources), s.Removed, len(s.Responses), s.Acked, s.Nacked)
		c.mu.Unlock()
		if ended {
			return fmt.Errorf("wait for %s: stream ended (%s): %w", typeURL, was, err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s (%s): %w", typeURL, was, ctx.Err())
		}
	}
}

// Done is closed when the stream has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the stream ended, or nil while it runs.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the stream from the client's side and waits for its end.
func (c *Client) Close() error {
	c.sendMu.Lock()
	err := c.stream.CloseSend()
	c.sendMu.Unlock()
	<-c.done
	if err != nil {
		return fmt.Errorf("close xds stream: %w", err)
	}
	return nil
}

func (c *Client) request(req *discoveryv3.DeltaDiscoveryRequest) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.mu.Lock()
	s := c.stateLocked(req.GetTypeUrl())
	first := len(s.Subscribed) == 0 && len(s.Responses) == 0
	if first && len(req.GetResourceNamesSubscribe()) == 0 && len(req.GetResourceNamesUnsubscribe()) == 0 {
		s.Subscribed[Wildcard] = true
	}
	for _, name := range req.GetResourceNamesSubscribe() {
		s.Subscribed[name] = true
	}
	for _, name := range req.GetResourceNamesUnsubscribe() {
		s.forget(name)
	}
	req.Node, c.node = c.node, nil
	c.mu.Unlock()
	if err := c.stream.Send(req); err != nil {
		return fmt.Errorf("send %s request: %w", req.GetTypeUrl(), err)
	}
	return nil
}

// forget unsubscribes a name: what nothing covers any more is dropped.
func (s *State) forget(name string) {
	delete(s.Subscribed, name)
	for held := range s.Resources {
		if !s.Subscribed[held] && !s.Subscribed[Wildcard] {
			delete(s.Resources, held)
		}
	}
}

func (c *Client) stateLocked(typeURL string) *State {
	s := c.states[typeURL]
	if s == nil {
		s = newState()
		c.states[typeURL] = s
	}
	return s
}

func (c *Client) receive() {
	defer close(c.done)
	for {
		resp, err := c.stream.Recv()
		if err == nil {
			err = c.take(resp)
		}
		c.mu.Lock()
		if err != nil {
			c.err = err
		}
		close(c.changed)
		c.changed = make(chan struct{})
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// take judges one response, applies it and answers.
func (c *Client) take(resp *discoveryv3.DeltaDiscoveryResponse) error {
	c.mu.Lock()
	judge := c.judge
	c.mu.Unlock()
	verdict := judge(resp)

	typeURL := resp.GetTypeUrl()
	answer := &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: resp.GetNonce()}
	c.mu.Lock()
	s := c.stateLocked(typeURL)
	s.Responses = append(s.Responses, resp)
	c.order = append(c.order, resp)
	if verdict.action != nack {
		s.apply(resp)
	}
	switch verdict.action {
	case ack:
		s.Acked++
	case nack:
		s.Nacked++
		answer.ErrorDetail = &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: verdict.reason}
	case withhold:
		s.Withheld++
		c.withheld[typeURL] = append(c.withheld[typeURL], resp.GetNonce())
		answer = nil
	}
	c.mu.Unlock()
	if answer == nil {
		return nil
	}
	return c.request(answer)
}

func (s *State) apply(resp *discoveryv3.DeltaDiscoveryResponse) {
	for _, r := range resp.GetResources() {
		s.Received[r.GetName()]++
		if s.Subscribed[r.GetName()] || s.Subscribed[Wildcard] {
			s.Resources[r.GetName()] = Resource{Version: r.GetVersion(), Body: r.GetResource()}
		}
	}
	for _, name := range resp.GetRemovedResources() {
		s.Removed[name]++
		delete(s.Resources, name)
	}
}
