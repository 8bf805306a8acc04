package cache_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// An empty first request is a wildcard, and stays one when names follow; an empty
// later request means nothing; "*" may be given up (XDS-R1, XDS-R2).
func TestWildcard(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1", "b", "1")
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType))
		n := m.got(c, 0, "cluster +a +b")
		m.must(c.Subscribe(resource.ClusterType, "b", "ghost"))
		n = m.got(c, n, "cluster +b -ghost")
		m.set(cache.WildcardCluster, "c", "1")
		n = m.got(c, n, "cluster +c")
		m.must(c.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: resource.ClusterType}))
		n = m.got(c, n)
		m.must(c.Unsubscribe(resource.ClusterType, "*"))
		m.set(cache.WildcardCluster, "a", "2", "b", "2", "ghost", "1")
		m.got(c, n, "cluster +b +ghost")
		m.holds(c, cache.WildcardCluster, "b", "2", "ghost", "1")
	})
}

// A named first request is no wildcard; "*" may be added later and again without
// everything being sent again (XDS-R1).
func TestWildcardAfterNames(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1", "b", "1")
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType, "a"))
		n := m.got(c, 0, "cluster +a")
		m.must(c.Subscribe(resource.ClusterType, "*"))
		n = m.got(c, n, "cluster +b")
		m.must(c.Subscribe(resource.ClusterType, "*"))
		m.got(c, n)
	})
}

// A wildcard with nothing to give is answered (XDS-32), on every kind of stream,
// and does not hand out on-demand clusters (dataplane decision 5).
func TestEmptyWildcardIsAnswered(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od := m.ads(), m.onDemand()
		m.must(ads.Subscribe(resource.ClusterType))
		m.must(ads.Subscribe(resource.ListenerType))
		m.got(ads, 0, "cluster", "listener")
		m.set(cache.OnDemandCluster, "a", "1")
		m.must(od.Subscribe(resource.ClusterType))
		m.got(od, 0, "cluster")
		m.got(ads, 2)
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.got(od, 1, "cluster +a")
	})
}

// A name that does not exist is answered at once where the cache's set is whole
// (XDS-28, XDS-R2), on a fresh and on a wildcard stream; elsewhere as soon as the
// consumer says so.
func TestMissingNameIsAnswered(t *testing.T) {
	for _, wildcard := range []bool{false, true} {
		t.Run(fmt.Sprintf("wildcard %v", wildcard), func(t *testing.T) {
			bubble(t, func(m *mesh) {
				c := m.ads()
				if wildcard {
					m.must(c.Subscribe(resource.ClusterType))
				}
				n := len(c.Order())
				m.must(c.Subscribe(resource.ClusterType, "ghost"))
				m.got(c, n, "cluster -ghost")
			})
		})
	}
	for kind, want := range map[cache.Kind]string{
		cache.OnDemandCluster: "cluster -ghost", cache.Secret: "secret -ghost", cache.Route: "route -ghost",
		cache.Endpoints: "endpoints +ghost",
	} {
		t.Run(kind.String(), func(t *testing.T) {
			bubble(t, func(m *mesh) {
				c := m.ads()
				if kind == cache.OnDemandCluster {
					c = m.onDemand()
				}
				m.must(c.Subscribe(kind.TypeURL(), "ghost"))
				m.got(c, 0)
				m.demanded("+" + kind.String() + "/ghost")
				m.remove(key(kind, "ghost"))
				m.got(c, 0, want)
			})
		})
	}
}

// A subscribed name is answered even if the client is known to have it, and each
// time (XDS-R3).
func TestSubscribeIsAlwaysAnswered(t *testing.T) {
	for _, kind := range cache.Kinds() {
		t.Run(kind.String(), func(t *testing.T) {
			bubble(t, func(m *mesh) {
				c := m.ads()
				if kind == cache.OnDemandCluster {
					c = m.onDemand()
				}
				m.set(kind, "a", "1")
				for i := range 3 {
					m.must(c.Subscribe(kind.TypeURL(), "a"))
					if got := c.State(kind.TypeURL()).Received["a"]; got != i+1 {
						t.Errorf("after %d requests a was sent %d times", i+1, got)
					}
				}
				m.must(c.Unsubscribe(kind.TypeURL(), "a"))
				m.must(c.Subscribe(kind.TypeURL(), "a"))
				m.holds(c, kind, "a", "1")
			})
		})
	}
}

// A name that does not exist is remembered and pushed when it appears, removed
// when it goes and pushed when it is back, on every stream that asked for it
// (XDS-R4, MESH-21).
func TestNameAppearsLater(t *testing.T) {
	bubble(t, func(m *mesh) {
		x, y := m.onDemand(), m.onDemand()
		m.must(x.Subscribe(resource.ClusterType, "a", "other"))
		m.must(y.Subscribe(resource.ClusterType, "a"))
		m.demanded("+on-demand-cluster/a", "+on-demand-cluster/other")
		m.remove(key(cache.OnDemandCluster, "a"))
		m.got(x, 0, "cluster -a")
		m.got(y, 0, "cluster -a")
		for i := range 2 {
			text := fmt.Sprint(i)
			m.set(cache.OnDemandCluster, "a", text)
			m.holds(x, cache.OnDemandCluster, "a", text)
			m.holds(y, cache.OnDemandCluster, "a", text)
			m.remove(key(cache.OnDemandCluster, "a"))
			m.holds(x, cache.OnDemandCluster)
			m.holds(y, cache.OnDemandCluster)
		}
		m.got(x, 1, "cluster +a", "cluster -a", "cluster +a", "cluster -a")
		m.demanded() // absence was stated, not asked about again
	})
}

// An unsubscribe needs no answer, except under a live wildcard: there the client
// is told whether the resource stays (XDS-R5).
func TestUnsubscribe(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1")
		named, all := m.ads(), m.ads()
		m.must(named.Subscribe(resource.ClusterType, "a"))
		m.must(named.Unsubscribe(resource.ClusterType, "a"))
		m.set(cache.WildcardCluster, "a", "2")
		m.got(named, 0, "cluster +a")

		m.must(all.Subscribe(resource.ClusterType))
		m.must(all.Subscribe(resource.ClusterType, "a", "ghost"))
		n := len(all.Order())
		m.must(all.Unsubscribe(resource.ClusterType, "a"))
		n = m.got(all, n, "cluster +a")
		m.must(all.Unsubscribe(resource.ClusterType, "ghost"))
		n = m.got(all, n, "cluster -ghost")
		m.set(cache.WildcardCluster, "a", "3")
		m.got(all, n, "cluster +a")
	})
}

// Unsubscribing what was never subscribed changes nothing, and a wildcard's
// resources stay (XDS-R6).
func TestPhantomUnsubscribe(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1")
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Unsubscribe(resource.ClusterType, "a", "never"))
		m.set(cache.Secret, "s", "1")
		m.must(c.Subscribe(resource.SecretType, "s"))
		m.must(c.Unsubscribe(resource.SecretType, "never"))
		n := m.got(c, 0, "cluster +a", "secret +s")
		m.set(cache.WildcardCluster, "a", "2")
		m.got(c, n, "cluster +a")
		m.demanded()
	})
}

// A subscription change counts whatever nonce the request has; a wrong nonce
// acknowledges nothing (XDS-R7).
func TestStaleNonce(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Secret, "a", "1", "b", "1")
		c, _ := m.open(options{judge: withholdAll})
		m.must(c.Subscribe(resource.SecretType, "a"))
		m.must(c.Send(&discoveryv3.DeltaDiscoveryRequest{
			TypeUrl: resource.SecretType, ResponseNonce: "stale", ResourceNamesSubscribe: []string{"b"},
		}))
		m.got(c, 0, "secret +a")
		m.must(c.Release(resource.SecretType))
		m.got(c, 1, "secret +b")
	})
}

// A name is at most once in a response, however often it was asked for and
// changed meanwhile (XDS-R8).
func TestNameOnceInResponse(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.WildcardCluster, "a", "1")
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Subscribe(resource.ClusterType, "a", "a", "b", "b"))
		m.must(c.Unsubscribe(resource.ClusterType, "a"))
		m.set(cache.WildcardCluster, "a", "2", "b", "2")
		m.remove(key(cache.WildcardCluster, "b"))
		m.resend(key(cache.WildcardCluster, "a"), key(cache.WildcardCluster, "a"))
		m.must(c.Release(resource.ClusterType))
		m.got(c, 0, "cluster +a", "cluster +a -b")
	})
}

// At most one response per type and stream is unacknowledged; what changes in
// the meantime is coalesced into the next one (XDS-R11). Other types go on.
func TestOneUnacknowledgedResponse(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.Secret, "a", "0")
		m.set(cache.Endpoints, "e", "0")
		m.must(c.Subscribe(resource.SecretType, "a", "b"))
		for i := range 100 {
			m.set(cache.Secret, "a", fmt.Sprint(i), "b", fmt.Sprint(i))
		}
		m.must(c.Subscribe(resource.SecretType, "c"))
		m.must(c.Subscribe(resource.EndpointType, "e"))
		m.got(c, 0, "secret +a", "endpoints +e")
		m.must(c.Release(resource.SecretType))
		m.got(c, 2, "secret +a +b")
		m.must(c.Release(resource.SecretType))
		m.holds(c, cache.Secret, "a", "99", "b", "99")
		m.got(c, 3)
	})
}

// Pushes in a row are sent as long as they are acknowledged (XDS-33).
func TestPushesInARow(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType))
		for i := range 3 {
			m.set(cache.WildcardCluster, "a", fmt.Sprint(i))
		}
		m.got(c, 0, "cluster", "cluster +a", "cluster +a", "cluster +a")
	})
}

// A response that was queued before its name was unsubscribed does not come back
// after: the next state of the name is not sent (XDS-30).
func TestUnsubscribedWhileUnacknowledged(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.Secret, "a", "1", "b", "1")
		m.must(c.Subscribe(resource.SecretType, "a", "b"))
		m.set(cache.Secret, "a", "2", "b", "2")
		m.must(c.Unsubscribe(resource.SecretType, "a"))
		m.must(c.Release(resource.SecretType))
		m.got(c, 0, "secret +a +b", "secret +b")
	})
}

// A client that does not read holds up neither the store nor other clients, and
// finds the final state when it reads again (XDS-R12, XDS-R13).
func TestSlowStream(t *testing.T) {
	bubble(t, func(m *mesh) {
		block := make(chan struct{})
		slow, _ := m.open(options{judge: func(*discoveryv3.DeltaDiscoveryResponse) verdict {
			<-block
			return ackVerdict()
		}})
		fast := m.ads()
		for _, c := range []interface {
			Subscribe(string, ...string) error
		}{slow, fast} {
			m.must(c.Subscribe(resource.ClusterType))
			m.must(c.Subscribe(resource.SecretType, "s"))
		}
		for i := range 50 {
			m.set(cache.WildcardCluster, "a", fmt.Sprint(i))
			m.set(cache.Secret, "s", fmt.Sprint(i))
			m.holds(fast, cache.WildcardCluster, "a", fmt.Sprint(i))
		}
		close(block)
		synctest.Wait()
		m.holds(slow, cache.WildcardCluster, "a", "49")
		m.holds(slow, cache.Secret, "s", "49")
		if got := len(slow.State(resource.ClusterType).Responses); got > 3 {
			t.Errorf("slow client got %d responses, want the first and what was coalesced", got)
		}
	})
}

// A type that is not served ends no stream: its names do not exist.
func TestUnknownType(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.set(cache.WildcardCluster, "a", "1")
		m.must(c.Subscribe(resource.RuntimeType, "r"))
		m.must(c.Subscribe(resource.ClusterType))
		m.got(c, 0, resource.RuntimeType+" -r", "cluster +a")
		if err := c.Err(); err != nil {
			t.Errorf("stream ended: %v", err)
		}
	})
}

// What came and went before it could be sent is not mentioned to a wildcard, and
// a removal that was acknowledged leaves nothing behind (I9).
func TestComeAndGone(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.WildcardCluster, "a", "1")
		m.must(c.Subscribe(resource.ClusterType))
		m.set(cache.WildcardCluster, "short", "1")
		m.remove(key(cache.WildcardCluster, "short"))
		m.release(c, cache.WildcardCluster)
		m.got(c, 0, "cluster +a")
		if got := cache.Entries(m.Cache); got != 1 {
			t.Errorf("%d entries, want a alone", got)
		}
		m.remove(key(cache.WildcardCluster, "a"))
		m.release(c, cache.WildcardCluster)
		if got := cache.Entries(m.Cache); got != 0 {
			t.Errorf("%d entries, want none", got)
		}
	})
}

// Names that nobody has any more cost nothing: entries and views end with the
// last stream that knew them (I9).
func TestNamesAreForgotten(t *testing.T) {
	bubble(t, func(m *mesh) {
		for range 3 {
			c, closeNow := m.open(options{service: cache.OnDemand})
			for i := range 50 {
				m.must(c.Subscribe(resource.ClusterType, fmt.Sprintf("ghost-%d", i)))
			}
			for i := range 25 {
				m.remove(key(cache.OnDemandCluster, fmt.Sprintf("ghost-%d", i)))
			}
			if got := len(m.Demanded(cache.OnDemandCluster)); got != 50 {
				t.Errorf("%d names demanded, want 50", got)
			}
			closeNow()
			if got := cache.Entries(m.Cache); got != 0 {
				t.Errorf("%d entries left, want none", got)
			}
		}
	})
}
