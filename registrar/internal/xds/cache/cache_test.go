package cache_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// The same message has the same bytes and version however its maps were filled
// (I5, XDS-R18, MESH-15), and a name that no client can ask for is refused.
func TestNewResource(t *testing.T) {
	var first cache.Resource
	for i := range 256 {
		fields := make(map[string]*structpb.Value)
		for _, n := range rand.New(rand.NewPCG(uint64(i), 0)).Perm(20) {
			fields[fmt.Sprint("k", n)] = structpb.NewNumberValue(float64(n))
		}
		r, err := cache.NewResource("a", &structpb.Struct{Fields: fields})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = r
		}
		if !bytes.Equal(r.Body.GetValue(), first.Body.GetValue()) || r.Version != first.Version {
			t.Fatalf("build %d differs from the first", i)
		}
	}
	if got, want := first.Body.GetTypeUrl(), "type.googleapis.com/google.protobuf.Struct"; got != want {
		t.Errorf("type %s, want %s", got, want)
	}
	for _, name := range []string{"", "*"} {
		if _, err := cache.NewResource(name, &clusterv3.Cluster{}); err == nil {
			t.Errorf("name %q is taken", name)
		}
	}
	if _, err := cache.NewResource("a", &clusterv3.Cluster{Name: "\xff"}); err == nil {
		t.Error("a message that cannot be serialised is taken")
	}
}

// The same content gives the same bytes on the wire, in whatever order and in
// however many batches it came (I5).
func TestOrderOfInput(t *testing.T) {
	var first []byte
	for seed := range uint64(20) {
		bubble(t, func(m *mesh) {
			order := rand.New(rand.NewPCG(seed, 0)).Perm(50)
			for len(order) > 0 {
				n := min(len(order), 1+int(seed))
				var list []string
				for _, i := range order[:n] {
					list = append(list, fmt.Sprint("c", i), fmt.Sprint(i))
				}
				m.set(cache.WildcardCluster, list...)
				order = order[n:]
			}
			m.set(cache.WildcardCluster, "gone", "1")
			m.remove(key(cache.WildcardCluster, "gone"))
			c := m.ads()
			m.must(c.Subscribe(resource.ClusterType))
			got, err := proto.MarshalOptions{Deterministic: true}.Marshal(c.Order()[0])
			m.must(err)
			if first == nil {
				first = got
			}
			if !bytes.Equal(got, first) {
				t.Errorf("order %d gives other bytes", seed)
			}
		})
	}
}

// Equal content is no change: nothing is sent, whatever else is in the batch.
func TestEqualContentIsNoChange(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType))
		m.set(cache.WildcardCluster, "a", "1", "b", "1")
		n := len(c.Order())
		m.set(cache.WildcardCluster, "a", "1", "b", "2")
		n = m.got(c, n, "cluster +b")
		m.set(cache.WildcardCluster, "a", "1", "b", "2")
		m.got(c, n)
	})
}

// A batch is seen whole: a key in its removals and its sets is set, and one
// response carries all of a type.
func TestBatchIsAtomic(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.SecretType, "a", "b", "c"))
		m.set(cache.Secret, "a", "1", "b", "1")
		m.Apply(cache.Batch{
			Remove: []cache.Key{key(cache.Secret, "a"), key(cache.Secret, "b")},
			Set:    map[cache.Kind][]cache.Resource{cache.Secret: m.resources("a", "2", "c", "1")},
		})
		synctest.Wait()
		m.got(c, 0, "secret +a +b", "secret +a +c -b")
	})
}

// With many writers at once, no client ends with an older state than the last
// one written, and what was published is never changed (XDS-46, MESH-23; run
// with -race).
func TestConcurrentWriters(t *testing.T) {
	bubble(t, func(m *mesh) {
		clients := []*xdstest.Client{m.ads(), m.ads(), m.ads()}
		for _, c := range clients {
			m.must(c.Subscribe(resource.ClusterType))
			m.must(c.Subscribe(resource.EndpointType, "e0", "e1", "e2"))
		}
		const writers, rounds = 50, 20
		published := make([][]cache.Resource, writers)
		var wg sync.WaitGroup
		for w := range writers {
			for i := range rounds {
				published[w] = append(published[w], m.resources(fmt.Sprint("c", w), fmt.Sprint(i))...)
			}
			wg.Go(func() {
				for i := range rounds {
					m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
						cache.WildcardCluster: published[w][i : i+1],
						cache.Endpoints:       m.resources(fmt.Sprint("e", w%3), fmt.Sprint(w, i)),
					}})
				}
			})
		}
		wg.Wait()
		m.set(cache.Endpoints, "e0", "last", "e1", "last", "e2", "last")
		for i, c := range clients {
			state := c.State(resource.ClusterType)
			for w := range writers {
				want := published[w][rounds-1]
				if got := state.Resources[want.Name].Version; got != want.Version {
					t.Errorf("client %d holds %s of %s, want %s", i, got, want.Name, want.Version)
				}
			}
		}
		for _, list := range published {
			for i := range list {
				again, err := cache.NewResource(list[i].Name, message(t, list[i]))
				if err != nil || again.Version != list[i].Version {
					t.Errorf("%s was changed after it was published (%v)", list[i].Name, err)
				}
			}
		}
	})
}

func message(t *testing.T, r cache.Resource) proto.Message {
	t.Helper()
	msg, err := r.Body.UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

// One service that flaps delays no other: a change elsewhere is sent at once
// (XDS-53), and the flapping service costs at most one response per
// acknowledgement and never its cluster (XDS-55).
func TestFlapping(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "1", "0")
		m.setService("b", "1", "0")
		ads, od, _ := m.envoy("n1", "pid 1")
		m.must(od.Subscribe(resource.ClusterType, "a", "b"))
		m.release(od, cache.OnDemandCluster)
		m.must(ads.Subscribe(resource.EndpointType, "a", "b"))
		od.SetJudge(nil)
		for i := range 150 { // 5 Hz for 30 s
			m.setService("a", "1", fmt.Sprint(i%2))
			time.Sleep(200 * time.Millisecond)
		}
		m.setService("b", "1", "changed")
		m.holds(ads, cache.Endpoints, "a", "1", "b", "changed")
		if got := od.State(resource.ClusterType).Received["a"]; got != 1 {
			t.Errorf("the cluster was sent %d times, want once", got)
		}
		if got := ads.State(resource.EndpointType).Received["a"]; got != 150 {
			t.Errorf("the assignment was sent %d times, want once per change", got)
		}

		ads.SetJudge(withholdAll)
		n := len(ads.Order())
		for i := range 100 {
			m.setService("a", "1", fmt.Sprint(i))
		}
		m.got(ads, n, "endpoints +a")
		m.release(ads, cache.Endpoints)
		m.holds(ads, cache.Endpoints, "a", "99", "b", "changed")
	})
}

// Thousands of names that lead nowhere, and endpoints that change all the time, hold up
// no cold name: it is answered at once, and nothing else is sent again with it (XDS-38).
func TestColdNameAmongTombstones(t *testing.T) {
	bubble(t, func(m *mesh) {
		const tombstones, cold = 5000, 100
		var names, nameText []string
		for i := range tombstones {
			name := fmt.Sprint("ghost", i)
			names, nameText = append(names, name), append(nameText, name, "1")
		}
		m.set(cache.OnDemandCluster, nameText...)
		ads, od := m.ads(), m.onDemand()
		m.must(od.Subscribe(resource.ClusterType, names...))
		m.setService("busy", "1", "0")
		m.must(od.Subscribe(resource.ClusterType, "busy"))
		m.must(ads.Subscribe(resource.EndpointType, "busy"))
		clock := time.Now()
		for i := range cold {
			name := fmt.Sprint("cold", i)
			m.setService("busy", "1", fmt.Sprint(i))
			m.setService(name, "1", "1")
			m.must(od.Subscribe(resource.ClusterType, name))
			m.must(ads.Subscribe(resource.EndpointType, name))
			if _, ok := ads.State(resource.EndpointType).Resources[name]; !ok {
				t.Fatalf("%s has no endpoints", name)
			}
		}
		if waited := time.Since(clock); waited != 0 {
			t.Errorf("%d cold names waited for %v", cold, waited) // the bubble's clock: for no timer at all
		}
		for name, n := range od.State(resource.ClusterType).Received {
			if n != 1 {
				t.Errorf("cluster %s was sent %d times, want once", name, n)
			}
		}
	})
}

// The report tells people what is connected, what is outstanding and what was
// rejected.
func TestStatus(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1", "b", "1")
		m.set(cache.Secret, "s", "1")
		c, _ := m.open(options{node: "n1", peer: "pid 1", judge: withholdAll})
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Subscribe(resource.SecretType, "s", "t"))
		m.release(c, cache.Secret)
		m.set(cache.WildcardCluster, "b", "2", "c", "1")
		got := m.Status()
		want := cache.Status{
			Resources: map[cache.Kind]int{cache.WildcardCluster: 3, cache.Secret: 1, cache.Endpoints: 0, cache.Listener: 0, cache.Route: 0, cache.OnDemandCluster: 0},
			Streams: []cache.StreamStatus{{
				ID: 1, Service: cache.ADS, Peer: "pid 1", Node: "n1", Agent: "envoy 1.40.0", Envoy: true, Since: time.Now(),
				Types: []cache.TypeStatus{
					{Kind: cache.WildcardCluster, Wildcard: true, Sent: 2, Pending: 3, Unacknowledged: time.Now()},
					{Kind: cache.Secret, Named: 2, Sent: 1, Acknowledged: 1},
				},
			}},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("status (-want +got):\n%s", diff)
		}
		wantMetrics := cache.Gauges{Held: 3, Pending: 4} // b is in flight and changed
		if diff := cmp.Diff(wantMetrics, m.Metrics().Gauges[cache.WildcardCluster]); diff != "" {
			t.Errorf("gauges (-want +got):\n%s", diff)
		}
	})
}
