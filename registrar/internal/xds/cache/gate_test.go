package cache_test

import (
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// subscribeAll subscribes an ADS client as an Envoy does: clusters and listeners
// by wildcard, the rest by name.
func (m *mesh) subscribeAll(c *xdstest.Client) {
	m.Helper()
	m.must(c.Subscribe(resource.ClusterType))
	m.must(c.Subscribe(resource.ListenerType))
	m.must(c.Subscribe(resource.EndpointType, "e"))
	m.must(c.Subscribe(resource.RouteType, "r"))
	m.must(c.Subscribe(resource.SecretType, "s"))
}

// settled returns an ADS client that has subscribed to everything, holds what
// there is, and from now on withholds its acknowledgements.
func (m *mesh) settled() *xdstest.Client {
	m.Helper()
	m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
		cache.WildcardCluster: m.resources("a", "1", "old", "1"),
		cache.Endpoints:       m.resources("e", "1", "a", "1"),
		cache.Listener:        m.resources("l", "1", "old", "1"),
		cache.Route:           m.resources("r", "1"),
		cache.Secret:          m.resources("s", "1"),
	}})
	c := m.ads()
	m.subscribeAll(c)
	m.holds(c, cache.Listener, "l", "1", "old", "1")
	m.holds(c, cache.Route, "r", "1")
	c.SetJudge(withholdAll)
	return c
}

func (m *mesh) release(c *xdstest.Client, kind cache.Kind) {
	m.Helper()
	m.must(c.Release(kind.TypeURL()))
}

func (m *mesh) gateTimeouts() uint64 {
	var n uint64
	for _, counters := range m.Metrics().Counters {
		n += counters.GateTimeouts
	}
	return n
}

// Of one batch, clusters come first, then listeners when those are acknowledged,
// then routes when those are; secrets and load assignments wait for nothing
// (XDS-R14; dataplane decision 5).
func TestAdditionsInOrder(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("new", "1"),
			cache.Endpoints:       m.resources("e", "2"),
			cache.Listener:        m.resources("new", "1"),
			cache.Route:           m.resources("r", "2"),
			cache.Secret:          m.resources("s", "2"),
		}})
		synctest.Wait()
		n = m.got(c, n, "cluster +new", "endpoints +e", "secret +s")
		m.release(c, cache.WildcardCluster)
		n = m.got(c, n, "listener +new")
		m.release(c, cache.Listener)
		m.got(c, n, "route +r")
		if got := m.gateTimeouts(); got != 0 {
			t.Errorf("%d gates timed out, want none", got)
		}
	})
}

// Of one batch, routes and listeners go first and clusters when those are
// acknowledged; additions of clusters do not wait for that (XDS-R14).
func TestRemovalsInReverse(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{
			Remove: []cache.Key{key(cache.WildcardCluster, "old"), key(cache.Listener, "old")},
			Set: map[cache.Kind][]cache.Resource{
				cache.WildcardCluster: m.resources("new", "1"),
				cache.Route:           m.resources("r", "2"),
			},
		})
		synctest.Wait()
		n = m.got(c, n, "cluster +new", "listener -old")
		m.release(c, cache.WildcardCluster)
		n = m.got(c, n)
		m.release(c, cache.Listener)
		n = m.got(c, n, "route +r")
		m.release(c, cache.Route)
		m.got(c, n, "cluster -old")
	})
}

// A secret's removal waits until the listeners that named it are gone, and not for later ones.
func TestSecretRemovalWaitsForListeners(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.remove(key(cache.Listener, "old"), key(cache.Secret, "s"))
		n = m.got(c, n, "listener -old")
		m.set(cache.Listener, "l", "2")
		m.release(c, cache.Listener)
		m.got(c, n, "secret -s", "listener +l")
	})
}

// A cluster's removal waits for what was changed before it as well: an earlier
// batch took it out of a listener.
func TestRemovalWaitsForEarlierChange(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.set(cache.Listener, "l", "2")
		m.remove(key(cache.WildcardCluster, "old"))
		n = m.got(c, n, "listener +l")
		m.set(cache.Listener, "l", "3") // later: the removal does not wait for this
		m.release(c, cache.Listener)
		m.got(c, n, "cluster -old", "listener +l")
	})
}

// A removal goes as soon as nothing is outstanding, also when a listener was
// changed and changed back in the meantime.
func TestRemovalAfterNothingChanged(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.set(cache.Listener, "l", "2")
		m.set(cache.Listener, "l", "3")
		m.set(cache.Listener, "l", "2")
		m.remove(key(cache.WildcardCluster, "old"))
		n = m.got(c, n, "listener +l")
		m.release(c, cache.Listener)
		m.got(c, n, "cluster -old")
	})
}

// A route waits for clusters even if no listener changes.
func TestRouteWaitsForCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("new", "1"), cache.Route: m.resources("r", "2"),
		}})
		synctest.Wait()
		n = m.got(c, n, "cluster +new")
		m.release(c, cache.WildcardCluster)
		m.got(c, n, "route +r")
	})
}

// A listener waits for the clusters of its batch also while those are parts of a
// rejected response and newer clusters have the turn.
func TestListenerWaitsForParts(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("x", "1", "y", "1"), cache.Listener: m.resources("l", "2"),
		}})
		synctest.Wait()
		m.must(c.Send(nackOf(resource.ClusterType, c.Order()[n].GetNonce(), byDecoding(""))))
		m.set(cache.WildcardCluster, "z", "1")
		m.must(c.Send(ackOf(resource.ClusterType, c.Order()[n+1].GetNonce())))
		m.must(c.Send(ackOf(resource.ClusterType, c.Order()[n+2].GetNonce())))
		n = m.got(c, n, "cluster +x +y", "cluster +x", "cluster +z", "cluster +y")
		m.must(c.Send(ackOf(resource.ClusterType, c.Order()[n-1].GetNonce())))
		m.got(c, n, "listener +l")
	})
}

// A listener does not wait for clusters that changed after it, so a busy type
// cannot starve another.
func TestLaterChangesHoldNothing(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.set(cache.WildcardCluster, "a", "2")
		m.set(cache.Listener, "l", "2")
		m.set(cache.WildcardCluster, "a", "3")
		n = m.got(c, n, "cluster +a")
		m.release(c, cache.WildcardCluster)
		m.got(c, n, "cluster +a", "listener +l")
	})
}

// A rejected cluster does not hold up listeners: it is settled, if badly.
func TestRejectionOpensGate(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("a", "2"),
			cache.Listener:        m.resources("l", "2"),
		}})
		synctest.Wait()
		n = m.got(c, n, "cluster +a")
		m.must(c.Send(nackOf(resource.ClusterType, c.Order()[n-1].GetNonce(), "a: bad")))
		m.got(c, n, "listener +l")
	})
}

// A gate holds no longer than its bound, which is counted; what was rejected
// because of that is tried again when the gate has opened (XDS-R14).
func TestGateTimeout(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		n := len(c.Order())
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("new", "1"),
			cache.Listener:        m.resources("new", "1"),
			cache.Route:           m.resources("r", "2"),
		}})
		synctest.Wait()
		n = m.got(c, n, "cluster +new")
		time.Sleep(1999 * time.Millisecond)
		n = m.got(c, n)
		time.Sleep(time.Millisecond)
		synctest.Wait()
		n = m.got(c, n, "listener +new", "route +r")
		if got := m.gateTimeouts(); got != 2 {
			t.Errorf("%d gates timed out, want 2", got)
		}
		m.must(c.Send(nackOf(resource.ListenerType, c.Order()[n-2].GetNonce(), "new: route: unknown cluster 'new'")))
		time.Sleep(time.Minute)
		n = m.got(c, n)
		m.release(c, cache.WildcardCluster)
		n = m.got(c, n, "listener +new")
		m.must(c.Send(ackOf(resource.ListenerType, c.Order()[n-1].GetNonce())))
		if got := m.Status().Rejections; len(got) != 0 {
			t.Errorf("rejections %v, want none", got)
		}
		time.Sleep(time.Minute)
		m.got(c, n)
	})
}

// The first answer to a wildcard of listeners is the whole: Envoy takes it for
// the full state and would go live without what a gate held back.
func TestFirstAnswerIsWhole(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Listener, "early", "1")
		m.set(cache.WildcardCluster, "a", "1")
		m.set(cache.Listener, "late", "1")
		c, _ := m.open(options{judge: withholdAll})
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Subscribe(resource.ListenerType))
		n := m.got(c, 0, "cluster +a")
		m.release(c, cache.WildcardCluster)
		m.got(c, n, "listener +early +late")
	})
}

// The load assignment of a cluster that is sent follows it, though unchanged,
// and after it: on the wildcard without waiting for the acknowledgement, which
// Envoy gives only then (XDS-34, XDS-D7; dataplane decision 5).
func TestAssignmentFollowsWildcardCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.settled()
		m.must(c.Subscribe(resource.EndpointType, "a"))
		m.release(c, cache.Endpoints)
		n := len(c.Order())
		m.set(cache.WildcardCluster, "a", "2")
		n = m.got(c, n, "cluster +a", "endpoints +a")
		m.release(c, cache.Endpoints)
		m.release(c, cache.WildcardCluster)
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("a", "3"),
			cache.Endpoints:       m.resources("a", "2", "e", "2"),
		}})
		synctest.Wait()
		n = m.got(c, n, "cluster +a", "endpoints +a +e")
		m.release(c, cache.Endpoints)
		m.release(c, cache.WildcardCluster)
		m.set(cache.WildcardCluster, "a", "3") // equal: nothing
		m.resend(key(cache.WildcardCluster, "a"))
		n = m.got(c, n, "cluster +a", "endpoints +a")
		m.set(cache.WildcardCluster, "a", "4") // waits for the acknowledgement, and so does what follows it
		m.release(c, cache.Endpoints)
		n = m.got(c, n)
		m.release(c, cache.WildcardCluster)
		m.got(c, n, "cluster +a", "endpoints +a")
	})
}

// envoy connects both streams of one Envoy, which withhold acknowledgements of
// on-demand clusters.
func (m *mesh) envoy(node, peer string) (ads, od *xdstest.Client, closeNow func()) {
	m.Helper()
	ads, closeADS := m.open(options{node: node, peer: peer})
	od, closeOD := m.open(options{node: node, peer: peer, service: cache.OnDemand, judge: withholdAll})
	return ads, od, func() { closeADS(); closeOD() }
}

func (m *mesh) setService(name, cluster, endpoints string) {
	m.Helper()
	m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
		cache.OnDemandCluster: m.resources(name, cluster),
		cache.Endpoints:       m.resources(name, endpoints),
	}})
	synctest.Wait()
}

// The load assignment of an on-demand cluster goes out after the cluster is
// acknowledged on its own stream: when it is new, when it changes, also when the
// assignment is unchanged; a change of endpoints alone waits for nothing
// (dataplane decision 5, XDS-D7).
func TestAssignmentWaitsForOnDemandCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od, _ := m.envoy("n1", "pid 1")
		m.setService("a", "1", "1")
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.must(ads.Subscribe(resource.EndpointType, "a"))
		m.got(od, 0, "cluster +a")
		m.got(ads, 0)
		m.release(od, cache.OnDemandCluster)
		m.got(ads, 0, "endpoints +a")
		m.setService("a", "1", "2")
		m.got(ads, 1, "endpoints +a")
		m.setService("a", "2", "2")
		m.set(cache.Endpoints, "a", "3", "other", "1")
		m.got(ads, 2)
		m.release(od, cache.OnDemandCluster)
		m.got(ads, 2, "endpoints +a")
		m.setService("a", "3", "3")
		m.release(od, cache.OnDemandCluster)
		m.got(ads, 3, "endpoints +a")
		m.holds(ads, cache.Endpoints, "a", "3")
		if got := m.gateTimeouts(); got != 0 {
			t.Errorf("%d gates timed out, want none", got)
		}
	})
}

// While an on-demand cluster is not acknowledged, other load assignments go on,
// and after the bound its own does.
func TestOnDemandGateTimeout(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od, _ := m.envoy("n1", "pid 1")
		m.setService("a", "1", "1")
		m.set(cache.Endpoints, "b", "1")
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.must(ads.Subscribe(resource.EndpointType, "a", "b"))
		m.got(ads, 0, "endpoints +b")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		m.got(ads, 1, "endpoints +a")
		if got := m.gateTimeouts(); got != 1 {
			t.Errorf("%d gates timed out, want 1", got)
		}
	})
}

// A rejected on-demand cluster does not hold its load assignment, and neither
// does one whose stream ended or gave the name up.
func TestOnDemandGateOpens(t *testing.T) {
	for _, test := range []struct {
		name string
		open func(m *mesh, od *xdstest.Client, closeOD func())
	}{
		{name: "rejected", open: func(m *mesh, od *xdstest.Client, _ func()) {
			m.must(od.Send(nackOf(resource.ClusterType, od.Order()[0].GetNonce(), "bad")))
		}},
		{name: "stream ended", open: func(_ *mesh, _ *xdstest.Client, closeOD func()) { closeOD() }},
		{name: "unsubscribed", open: func(m *mesh, od *xdstest.Client, _ func()) {
			m.must(od.Unsubscribe(resource.ClusterType, "a"))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, func(m *mesh) {
				ads, _ := m.open(options{node: "n1"})
				od, closeOD := m.open(options{node: "n1", service: cache.OnDemand, judge: withholdAll})
				m.setService("a", "1", "1")
				m.must(od.Subscribe(resource.ClusterType, "a"))
				m.must(ads.Subscribe(resource.EndpointType, "a"))
				m.got(ads, 0)
				test.open(m, od, closeOD)
				m.got(ads, 0, "endpoints +a")
			})
		})
	}
}

// During a hot restart two Envoys have one node ID; the one that does not
// acknowledge holds up itself only (XDS-R12).
func TestHotRestart(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "1", "1")
		oldADS, oldOD, _ := m.envoy("n1", "pid 1")
		newADS, newOD, _ := m.envoy("n1", "pid 2")
		for _, od := range []*xdstest.Client{oldOD, newOD} {
			m.must(od.Subscribe(resource.ClusterType, "a"))
		}
		for _, ads := range []*xdstest.Client{oldADS, newADS} {
			m.must(ads.Subscribe(resource.EndpointType, "a"))
		}
		m.release(newOD, cache.OnDemandCluster)
		m.got(newADS, 0, "endpoints +a")
		m.got(oldADS, 0)
	})
}

// A secret that does not exist is none that a listener could lose: who asks for it is told
// at once, whatever is unacknowledged.
func TestAbsentSecretWaitsForNothing(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{node: "n1", judge: withholdAll})
		m.set(cache.Listener, "l", "1")
		m.must(c.Subscribe(resource.ListenerType))
		n := m.got(c, 0, "listener +l")
		m.must(c.Subscribe(resource.SecretType, "ghost"))
		m.remove(key(cache.Secret, "ghost"))
		m.got(c, n, "secret -ghost")
	})
}

// The load assignment of a cluster that goes does not wait for the cluster's removal, which
// waits for others: until then Envoy must not send to the endpoints of a name that leads
// nowhere.
func TestAssignmentGoesBeforeCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Subscribe(resource.ListenerType))
		m.set(cache.WildcardCluster, "a", "1")
		m.must(c.Subscribe(resource.EndpointType, "a"))
		m.set(cache.Endpoints, "a", "1")
		c.SetJudge(func(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
			if resp.GetTypeUrl() == resource.ListenerType {
				return xdstest.Withhold()
			}
			return xdstest.Ack()
		})
		n := len(c.Order())
		m.set(cache.Listener, "l", "1")
		m.remove(key(cache.WildcardCluster, "a"), key(cache.Endpoints, "a"))
		n = m.got(c, n, "listener +l", "endpoints +a")
		m.must(c.Release(resource.ListenerType))
		m.got(c, n, "cluster -a")
	})
}

// A cluster is given on demand once Envoy acknowledged that it is none of those that all
// have: the removal would take what was given before (dataplane decision 5).
func TestOnDemandWaitsForRemoval(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od := m.ads(), m.onDemand()
		m.must(ads.Subscribe(resource.ClusterType))
		m.set(cache.WildcardCluster, "a", "1")
		ads.SetJudge(withholdAll)
		n := len(ads.Order())
		m.remove(key(cache.WildcardCluster, "a"))
		m.got(ads, n, "cluster -a")
		m.set(cache.OnDemandCluster, "a", "1")
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.got(od, 0)
		m.must(ads.Release(resource.ClusterType))
		m.got(od, 0, "cluster +a")
	})
}

// While an Envoy hands over to its successor both have one node ID, and what the one was
// sent says nothing about the other: the successor's streams open one after the other.
func TestHandover(t *testing.T) {
	former := func(m *mesh, service cache.Service) *xdstest.Client {
		m.Helper()
		c, _ := m.open(options{node: "n1", peer: "former", service: service})
		return c
	}
	next := func(m *mesh) *xdstest.Client {
		m.Helper()
		c, _ := m.open(options{node: "n1", peer: "next"})
		return c
	}
	t.Run("a cluster that the former has on demand is taken from the next", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			m.setService("a", "1", "1")
			m.set(cache.WildcardCluster, "a", "1")
			m.must(former(m, cache.OnDemand).Subscribe(resource.ClusterType, "a"))
			ads := next(m)
			m.must(ads.Subscribe(resource.ClusterType))
			n := m.got(ads, 0, "cluster +a")
			m.remove(key(cache.WildcardCluster, "a"))
			m.got(ads, n, "cluster -a")
		})
	})
	t.Run("the next's removal holds nothing of the former", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			m.set(cache.WildcardCluster, "a", "1")
			ads, od := next(m), former(m, cache.OnDemand)
			m.must(ads.Subscribe(resource.ClusterType))
			ads.SetJudge(withholdAll)
			m.remove(key(cache.WildcardCluster, "a"))
			m.set(cache.OnDemandCluster, "a", "1")
			m.must(od.Subscribe(resource.ClusterType, "a"))
			m.got(ads, 0, "cluster +a", "cluster -a")
			m.got(od, 0, "cluster +a")
		})
	})
	t.Run("the former's unacknowledged cluster holds nothing of the next", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			m.setService("a", "1", "1")
			od := former(m, cache.OnDemand)
			od.SetJudge(withholdAll)
			m.must(od.Subscribe(resource.ClusterType, "a"))
			ads := next(m)
			m.must(ads.Subscribe(resource.EndpointType, "a"))
			m.got(ads, 0, "endpoints +a")
		})
	})
	t.Run("what the next lost the former has", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			ads := next(m)
			m.must(ads.Resume(resource.ListenerType, m.had([]string{"*"})))
			m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1")))
			m.got(ads, 0, "listener", "cluster -a")
			m.set(cache.OnDemandCluster, "a", "1")
			od := former(m, cache.OnDemand)
			m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
			m.got(od, 0)
		})
	})
	t.Run("what the former asks for is not what the next has", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			m.setService("a", "2", "2")
			m.must(former(m, cache.OnDemand).Subscribe(resource.ClusterType, "a"))
			ads := next(m)
			m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"})))
			m.must(ads.Resume(resource.EndpointType, m.had([]string{"a"}, "a", "1")))
			m.got(ads, 0, "cluster")
		})
	})
}

// An on-demand cluster and its load assignment that have waited equally long: the cluster
// goes, and the assignment waits for its acknowledgement.
func TestGatesEndTogether(t *testing.T) {
	for range 20 { // whose timer comes first is a draw
		bubble(t, func(m *mesh) {
			m.set(cache.WildcardCluster, "b", "1")
			m.set(cache.Endpoints, "b", "1")
			ads, od := m.ads(), m.onDemand()
			m.must(ads.Subscribe(resource.ClusterType))
			m.must(ads.Subscribe(resource.EndpointType, "b"))
			ads.SetJudge(withholdAll)
			m.remove(key(cache.WildcardCluster, "b"))
			n := m.got(ads, 0, "cluster +b", "endpoints +b", "cluster -b")
			od.SetJudge(withholdAll)
			m.must(od.Subscribe(resource.ClusterType, "b"))
			m.setService("b", "2", "2")
			m.got(od, 0)
			time.Sleep(2 * time.Second)
			synctest.Wait()
			m.got(od, 0, "cluster +b")
			n = m.got(ads, n)
			m.must(od.Release(resource.ClusterType))
			m.got(ads, n, "endpoints +b")
		})
	}
}
