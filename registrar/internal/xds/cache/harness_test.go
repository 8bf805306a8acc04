package cache_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/delta/v3"
	"github.com/google/go-cmp/cmp"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// mesh is a cache with clients, in a bubble with a clock of its own.
type mesh struct {
	*testing.T
	*cache.Cache
}

// bubble runs test with a released cache in a testing/synctest bubble.
func bubble(t *testing.T, test func(*mesh)) {
	t.Helper()
	bubbleOf(t, cache.Config{}, test)
}

func bubbleOf(t *testing.T, cfg cache.Config, test func(*mesh)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := &mesh{T: t, Cache: cache.New(cfg)}
		m.Release()
		test(m)
	})
}

// options of a client.
type options struct {
	node, peer string
	// tool is a client that is no Envoy.
	tool    bool
	service cache.Service
	judge   xdstest.Judge
}

// open connects a client that lives until the test ends or close is called.
func (m *mesh) open(o options) (client *xdstest.Client, closeNow func()) {
	m.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	typeURL := resource.AnyType
	if o.service == cache.OnDemand {
		typeURL = resource.ClusterType
	}
	stream := xdstest.Pipe(ctx, func(str xdstest.ServerStream) error {
		st := m.Open(cache.StreamParams{Service: o.service, Peer: o.peer})
		defer st.Close()
		return delta.NewServer(str.Context(), st, st).DeltaStreamHandler(str, typeURL)
	})
	client = xdstest.New(stream, xdstest.Options{Node: node(o), Judge: o.judge})
	closeNow = func() {
		cancel()
		<-client.Done()
		synctest.Wait()
	}
	m.Cleanup(closeNow)
	synctest.Wait()
	return client, closeNow
}

// node returns what a client says of itself.
func node(o options) *corev3.Node {
	if o.tool {
		return nil
	}
	return &corev3.Node{
		Id: o.node, UserAgentName: "envoy",
		UserAgentVersionType: &corev3.Node_UserAgentBuildVersion{UserAgentBuildVersion: &corev3.BuildVersion{
			Version: &typev3.SemanticVersion{MajorNumber: 1, MinorNumber: 40},
		}},
	}
}

// ads connects an Envoy's ADS stream.
func (m *mesh) ads() *xdstest.Client {
	m.Helper()
	client, _ := m.open(options{node: "n1"})
	return client
}

// onDemand connects an Envoy's on-demand stream.
func (m *mesh) onDemand() *xdstest.Client {
	m.Helper()
	client, _ := m.open(options{node: "n1", service: cache.OnDemand})
	return client
}

// must fails the test on an error and waits until nothing moves any more.
func (m *mesh) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
	synctest.Wait()
}

// set applies resources of one kind, given as name and text.
func (m *mesh) set(kind cache.Kind, nameText ...string) {
	m.Helper()
	m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{kind: m.resources(nameText...)}})
	synctest.Wait()
}

func (m *mesh) remove(keys ...cache.Key) {
	m.Helper()
	m.Apply(cache.Batch{Remove: keys})
	synctest.Wait()
}

func (m *mesh) resend(keys ...cache.Key) {
	m.Helper()
	m.Apply(cache.Batch{Resend: keys})
	synctest.Wait()
}

// resources makes resources of names and texts.
func (m *mesh) resources(nameText ...string) []cache.Resource {
	m.Helper()
	var list []cache.Resource
	for i := 0; i < len(nameText); i += 2 {
		list = append(list, text(m, nameText[i], nameText[i+1]))
	}
	return list
}

// text returns a resource whose content is a string.
func text(tb testing.TB, name, content string) cache.Resource {
	tb.Helper()
	r, err := cache.NewResource(name, wrapperspb.String(content))
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// texts returns what a client holds of a kind: name to content.
func (m *mesh) texts(c *xdstest.Client, kind cache.Kind) map[string]string {
	m.Helper()
	out := make(map[string]string)
	for name, r := range c.State(kind.TypeURL()).Resources {
		out[name] = m.content(r)
	}
	return out
}

func (m *mesh) content(r xdstest.Resource) string {
	m.Helper()
	var s wrapperspb.StringValue
	if err := r.Body.UnmarshalTo(&s); err != nil {
		return "(" + r.Body.GetTypeUrl() + ")"
	}
	return s.GetValue()
}

// holds checks what a client holds of a kind, given as name and text.
func (m *mesh) holds(c *xdstest.Client, kind cache.Kind, nameText ...string) {
	m.Helper()
	want := make(map[string]string)
	for i := 0; i < len(nameText); i += 2 {
		want[nameText[i]] = nameText[i+1]
	}
	if diff := cmp.Diff(want, m.texts(c, kind)); diff != "" {
		m.Errorf("%s held (-want +got):\n%s", kind, diff)
	}
}

// log describes a client's responses from the given one on: "cluster +a +b -c".
func log(c *xdstest.Client, from int) []string {
	var out []string
	for _, resp := range c.Order()[from:] {
		out = append(out, describe(resp))
	}
	return out
}

func describe(resp *discoveryv3.DeltaDiscoveryResponse) string {
	names := map[string]string{
		resource.ClusterType: "cluster", resource.EndpointType: "endpoints", resource.ListenerType: "listener",
		resource.RouteType: "route", resource.SecretType: "secret",
	}
	s := names[resp.GetTypeUrl()]
	if s == "" {
		s = resp.GetTypeUrl()
	}
	for _, r := range resp.GetResources() {
		s += " +" + r.GetName()
	}
	for _, name := range resp.GetRemovedResources() {
		s += " -" + name
	}
	return s
}

// got checks the responses of a client from the given one on and returns how
// many there are now.
func (m *mesh) got(c *xdstest.Client, from int, want ...string) int {
	m.Helper()
	if diff := cmp.Diff(want, log(c, from)); diff != "" {
		m.Errorf("responses (-want +got):\n%s", diff)
	}
	return len(c.Order())
}

// demanded checks what TakeDemand gives, as "+kind/name" and "-kind/name".
func (m *mesh) demanded(want ...string) {
	m.Helper()
	d := m.TakeDemand()
	var got []string
	for _, key := range d.Wanted {
		got = append(got, "+"+key.String())
	}
	for _, key := range d.Dropped {
		got = append(got, "-"+key.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.Errorf("demand (-want +got):\n%s", diff)
	}
}

// outcome is the result of an await once it is there.
type outcome struct{ results []cache.Result }

// await starts an Await and returns where its result will be.
func (m *mesh) await(keys ...cache.Key) *outcome {
	m.Helper()
	o := &outcome{}
	m.Await(keys, func(r cache.Result) { o.results = append(o.results, r) })
	synctest.Wait()
	return o
}

// String returns "pending", or the one result in short.
func (o *outcome) String() string {
	if len(o.results) == 0 {
		return "pending"
	}
	if len(o.results) > 1 {
		return fmt.Sprintf("%d results", len(o.results))
	}
	r := o.results[0]
	s := "acknowledged"
	switch {
	case r.Disconnected:
		s = "disconnected"
	case len(r.Rejections) > 0:
		s = "rejected"
		for _, rejection := range r.Rejections {
			s += fmt.Sprintf(" %s (%s)", rejection.Key, rejection.Reason)
		}
	}
	for _, key := range r.Unsubscribed {
		s += " unsubscribed " + key.String()
	}
	return s
}

func (m *mesh) is(o *outcome, want string) {
	m.Helper()
	synctest.Wait()
	if got := o.String(); got != want {
		m.Errorf("await: %s, want %s", got, want)
	}
}

func key(kind cache.Kind, name string) cache.Key { return cache.Key{Kind: kind, Name: name} }

// verdict is short for xdstest's.
type verdict = xdstest.Verdict

func ackVerdict() verdict { return xdstest.Ack() }

func withholdAll(*discoveryv3.DeltaDiscoveryResponse) verdict { return xdstest.Withhold() }

func errorDetail(reason string) *rpcstatus.Status {
	return &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: reason}
}
