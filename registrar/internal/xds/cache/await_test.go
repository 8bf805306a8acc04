package cache_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// A key is settled when every stream that must has acknowledged what it was when
// it was awaited, or something later; changes after that do not delay it.
func TestAwait(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "1", "1")
		ads, od, _ := m.envoy("n1", "pid 1")
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.must(ads.Subscribe(resource.EndpointType, "a"))
		ads.SetJudge(withholdAll)

		cluster := m.await(key(cache.OnDemandCluster, "a"))
		both := m.await(key(cache.OnDemandCluster, "a"), key(cache.Endpoints, "a"))
		m.is(cluster, "pending")
		m.set(cache.OnDemandCluster, "a", "2")
		m.release(od, cache.OnDemandCluster)
		m.is(cluster, "acknowledged")
		m.is(both, "pending")
		m.release(od, cache.OnDemandCluster)
		m.is(both, "pending")
		m.set(cache.Endpoints, "a", "2")
		m.release(ads, cache.Endpoints)
		m.is(both, "acknowledged")
		m.is(m.await(key(cache.Endpoints, "a")), "pending")
	})
}

// Those whom one event settles are called in the order in which they began to wait.
func TestAwaitOrder(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, closeNow := m.open(options{node: "n1"})
		m.must(c.Subscribe(resource.ClusterType))
		m.got(c, 0, "cluster")
		c.SetJudge(withholdAll)
		var want, got []string
		for i := range 20 {
			name := fmt.Sprintf("%02d", (i*7)%20)
			m.set(cache.WildcardCluster, name, "1")
			want = append(want, name)
			m.Await([]cache.Key{key(cache.WildcardCluster, name)}, func(cache.Result) { got = append(got, name) })
		}
		closeNow()
		synctest.Wait()
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("called (-want +got):\n%s", d)
		}
	})
}

// An acknowledgement of the load assignment counts only for the copy that
// followed the cluster: it is the proof that the cluster is active (dataplane
// decision 5).
func TestAwaitAssignmentAfterCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "1", "1")
		ads, od, _ := m.envoy("n1", "pid 1")
		m.must(od.Subscribe(resource.ClusterType, "a"))
		m.must(ads.Subscribe(resource.EndpointType, "a"))
		m.release(od, cache.OnDemandCluster)
		m.is(m.await(key(cache.Endpoints, "a")), "acknowledged")
		m.set(cache.OnDemandCluster, "a", "2")
		again := m.await(key(cache.Endpoints, "a"))
		m.is(again, "pending")
		m.release(od, cache.OnDemandCluster)
		m.is(again, "acknowledged")
	})
}

// What nobody has to acknowledge is settled at once, and said to be: a name that
// nobody subscribes to, a name that does not exist; with no Envoy connected the
// result says that instead.
func TestAwaitAtOnce(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Secret, "s", "1")
		m.set(cache.Listener, "l", "1")
		for _, k := range []cache.Key{
			key(cache.Secret, "s"), key(cache.Listener, "l"), key(cache.OnDemandCluster, "a"), key(cache.Listener, "none"),
		} {
			m.is(m.await(k), "disconnected")
		}
		ads := m.ads()
		m.is(m.await(key(cache.Secret, "s")), "acknowledged unsubscribed secret/s")
		m.is(m.await(key(cache.OnDemandCluster, "a")), "acknowledged unsubscribed on-demand-cluster/a")
		listener, none := m.await(key(cache.Listener, "l")), m.await(key(cache.Listener, "none"))
		m.is(listener, "pending") // an Envoy that has not asked yet will
		m.must(ads.Subscribe(resource.ListenerType))
		m.is(listener, "acknowledged")
		m.is(none, "acknowledged")
		m.is(m.await(), "acknowledged")
	})
}

// A rejection settles and brings its reason, when the guilty resource is known:
// its neighbours in the response are acknowledged (contract 4.2, XDS-R10).
func TestAwaitRejection(t *testing.T) {
	for name, says := range map[string]func(string) string{"named": byName, "whole response": byDecoding} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(m *mesh) {
				c, _ := m.open(options{judge: m.rejecting("bad", "bad", says)})
				m.must(c.Subscribe(resource.ListenerType))
				m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
					cache.Listener: m.resources("a", "1", "b", "1", "bad", "bad"),
				}})
				bad := m.await(key(cache.Listener, "a"), key(cache.Listener, "bad"))
				good := m.await(key(cache.Listener, "a"), key(cache.Listener, "b"))
				m.is(bad, "rejected listener/bad ("+says("bad")+")")
				m.is(good, "acknowledged")
				m.is(m.await(key(cache.Listener, "bad")), "rejected listener/bad ("+says("bad")+")")
				m.set(cache.Listener, "bad", "good")
				m.is(m.await(key(cache.Listener, "bad")), "acknowledged")
			})
		})
	}
}

// A removal is awaited like any other change, a touch too.
func TestAwaitRemovalAndResend(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Listener, "l", "1")
		c := m.ads()
		m.must(c.Subscribe(resource.ListenerType))
		c.SetJudge(withholdAll)
		m.resend(key(cache.Listener, "l"))
		touched := m.await(key(cache.Listener, "l"))
		m.is(touched, "pending")
		m.release(c, cache.Listener)
		m.is(touched, "acknowledged")
		m.remove(key(cache.Listener, "l"))
		gone := m.await(key(cache.Listener, "l"))
		m.is(gone, "pending")
		m.release(c, cache.Listener)
		m.is(gone, "acknowledged")
	})
}

// The removal of what a client brought from an earlier connection is awaited as
// well, though nothing was ever said of the key here.
func TestAwaitInheritedRemoval(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.must(c.Resume(resource.ListenerType, m.had([]string{"*"}, "gone", "1")))
		o := m.await(key(cache.Listener, "gone"))
		m.is(o, "pending")
		m.release(c, cache.Listener)
		m.is(o, "acknowledged")
	})
}

// Every connected stream counts, one that comes later too; one that goes does
// not hold it up, and with the last one gone the result says so.
func TestAwaitStreams(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Listener, "l", "1")
		x, closeX := m.open(options{judge: withholdAll})
		y, closeY := m.open(options{judge: withholdAll})
		m.must(x.Subscribe(resource.ListenerType))
		m.must(y.Subscribe(resource.ListenerType))
		o := m.await(key(cache.Listener, "l"))
		m.release(x, cache.Listener)
		m.is(o, "pending")
		z, closeZ := m.open(options{judge: withholdAll})
		m.must(z.Subscribe(resource.ListenerType))
		closeY()
		m.is(o, "pending")
		m.release(z, cache.Listener)
		m.is(o, "acknowledged")

		m.set(cache.Listener, "l", "2")
		o = m.await(key(cache.Listener, "l"))
		closeX()
		m.is(o, "pending")
		closeZ()
		m.is(o, "disconnected")
	})
}

// An Envoy that answers on one of its streams works, and is waited for on the other as
// long as it takes. A client that answers on neither is not waited for, though an Envoy
// with its node ID does answer.
func TestAwaitSilent(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "1", "1")
		m.setService("b", "1", "1")
		ads, _ := m.open(options{node: "n1", peer: "pid 1"})
		m.must(ads.Subscribe(resource.ListenerType))
		for peer, name := range map[string]string{"pid 1": "a", "pid 2": "b"} {
			od, _ := m.open(options{node: "n1", peer: peer, service: cache.OnDemand, judge: withholdAll})
			m.must(od.Subscribe(resource.ClusterType, name))
		}
		time.Sleep(time.Minute)
		m.is(m.await(key(cache.OnDemandCluster, "a")), "pending")
		m.is(m.await(key(cache.OnDemandCluster, "b")), "acknowledged unsubscribed on-demand-cluster/b")
	})
}

// AwaitSubscribed waits until Envoy asks by itself: a listener's secrets are
// asked for after the listener was acknowledged (contract 4.2).
func TestAwaitSubscribed(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Secret, "s", "1")
		c := m.ads()
		o := &outcome{}
		m.AwaitSubscribed([]cache.Key{key(cache.Secret, "s")}, func(r cache.Result) { o.results = append(o.results, r) })
		m.is(o, "pending")
		m.must(c.Subscribe(resource.SecretType, "other"))
		m.is(o, "pending")
		m.must(c.Subscribe(resource.SecretType, "s"))
		m.is(o, "acknowledged")
	})
}

// A tool that watches, and an Envoy of another node, are served and no more: nothing
// waits for them, whatever they subscribe to, and alone they are nobody.
func TestAwaitTool(t *testing.T) {
	bubbleOf(t, cache.Config{NodeID: "n1"}, func(m *mesh) {
		m.set(cache.Listener, "l", "1")
		m.set(cache.Endpoints, "e", "1")
		for _, o := range []options{{tool: true, judge: withholdAll}, {node: "n2", judge: withholdAll}} {
			other, _ := m.open(o)
			m.must(other.Subscribe(resource.EndpointType, "e"))
			m.must(other.Subscribe(resource.ListenerType))
			m.holds(other, cache.Endpoints, "e", "1")
		}
		m.is(m.await(key(cache.Listener, "l")), "disconnected")
		m.is(m.await(key(cache.Endpoints, "e")), "disconnected")

		envoy := m.ads()
		listener, endpoints := m.await(key(cache.Listener, "l")), m.await(key(cache.Endpoints, "e"))
		m.is(listener, "pending")
		m.must(envoy.Subscribe(resource.ListenerType))
		m.is(listener, "acknowledged")
		m.is(endpoints, "acknowledged unsubscribed "+key(cache.Endpoints, "e").String())
		if got := m.Metrics(); got.Envoys != 1 || got.Streams[cache.ADS] != 3 {
			t.Errorf("%d Envoys in %d streams, want 1 of 3", got.Envoys, got.Streams[cache.ADS])
		}
	})
}

// A cancelled await never reports; the callback may use the cache, and one that
// blocks holds up neither the store nor the streams.
func TestAwaitCallback(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Listener, "l", "1")
		c := m.ads()
		cancelled := &outcome{}
		cancel := m.Await([]cache.Key{key(cache.Listener, "l")}, func(r cache.Result) { cancelled.results = append(cancelled.results, r) })
		cancel()
		cancel()

		block := make(chan struct{})
		m.Await([]cache.Key{key(cache.Listener, "l")}, func(cache.Result) {
			m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{cache.Listener: m.resources("l", "2")}})
			<-block
		})
		m.must(c.Subscribe(resource.ListenerType))
		m.holds(c, cache.Listener, "l", "2")
		m.set(cache.Listener, "l", "3")
		m.holds(c, cache.Listener, "l", "3")
		next := m.await(key(cache.Listener, "l"))
		m.is(next, "pending")
		close(block)
		m.is(next, "acknowledged")
		m.is(cancelled, "pending")
	})
}

// Endpoints that change without end do not keep a step from being settled
// (contract 2: the steps of a default-port change).
func TestAwaitUnderChurn(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Endpoints, "a", "0")
		c := m.ads()
		m.must(c.Subscribe(resource.EndpointType, "a"))
		c.SetJudge(withholdAll)
		m.set(cache.Endpoints, "a", "1")
		o := m.await(key(cache.Endpoints, "a"))
		for i := range 3 {
			m.set(cache.Endpoints, "a", string(rune('p'+i)))
			time.Sleep(time.Millisecond)
		}
		m.release(c, cache.Endpoints)
		m.is(o, "acknowledged")
		synctest.Wait()
	})
}

// Whoever gives up waiting can say what was missing, and where (contract 4.2).
func TestOutstanding(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{
			cache.WildcardCluster: m.resources("c", "1"), cache.Listener: m.resources("l", "1"), cache.Secret: m.resources("s", "1", "t", "1"),
		}})
		keys := []cache.Key{key(cache.WildcardCluster, "c"), key(cache.Listener, "l"), key(cache.Secret, "s")}
		c, _ := m.open(options{node: "n1", judge: withholdAll})
		m.must(c.Subscribe(resource.ClusterType))
		m.must(c.Subscribe(resource.ListenerType))
		m.outstanding(keys, true,
			`cluster/c: sent, not acknowledged (node "n1", stream 1)`,
			`secret/s: Envoy has not asked for it (node "n1", stream 1)`,
			`listener/l: waits for the acknowledgement of what must come first (node "n1", stream 1)`)
		m.release(c, cache.WildcardCluster)
		m.outstanding(keys, false, `listener/l: sent, not acknowledged (node "n1", stream 1)`)
		m.must(c.Subscribe(resource.SecretType, "t"))
		m.must(c.Subscribe(resource.SecretType, "s", "later"))
		m.outstanding(keys[2:], true, `secret/s: waits behind a response that is not acknowledged (node "n1", stream 1)`)
		m.release(c, cache.Secret)
		m.release(c, cache.Secret)
		m.outstanding([]cache.Key{key(cache.Secret, "later")}, true, `secret/later: the registrar has not said what it is (node "n1", stream 1)`)
		m.outstanding(keys[2:], true)
		m.release(c, cache.Listener)
		m.Hold()
		m.set(cache.Listener, "l", "2")
		m.outstanding(keys, false, `listener/l: held back, the registrar does not know everything yet (node "n1", stream 1)`)
	})
}

// A load assignment that an Envoy brought from an earlier connection proves nothing: the
// cluster that it got last may still warm. It is sent again to who is waited for.
func TestAwaitInheritedAssignment(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1")
		m.set(cache.Endpoints, "a", "1")
		first := m.ads()
		m.must(first.Subscribe(resource.EndpointType, "a"))
		resume := func() *xdstest.Client {
			ads, _ := m.open(options{node: "n1", judge: withholdAll})
			m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1")))
			m.must(ads.Resume(resource.EndpointType, m.had([]string{"a"}, "a", "1")))
			m.release(ads, cache.WildcardCluster)
			return ads
		}
		before := resume()
		n := m.got(before, 0, "cluster")
		o := m.await(key(cache.Endpoints, "a"))
		m.is(o, "pending")
		m.got(before, n, "endpoints +a")
		after := resume() // while somebody waits
		m.got(after, 0, "cluster", "endpoints +a")
		m.release(before, cache.Endpoints)
		m.is(o, "pending")
		m.release(after, cache.Endpoints)
		m.is(o, "acknowledged")
	})
}

// What of the names with a prefix is unsettled on some stream: not answered for, to be sent,
// on its way, also as a removal, or rejected.
func TestUnsettled(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a:1", "1", "1")
		m.setService("a:2", "1", "1")
		m.setService("b:1", "1", "1")
		od, _ := m.open(options{node: "n1", service: cache.OnDemand})
		m.must(od.Subscribe(resource.ClusterType, "a:1", "a:2", "a:3", "b:1"))
		m.unsettled("on-demand-cluster/a:3")
		m.remove(key(cache.OnDemandCluster, "a:3"))
		m.unsettled()
		od.SetJudge(withholdAll)
		m.remove(key(cache.OnDemandCluster, "a:1"), key(cache.OnDemandCluster, "b:1"))
		m.unsettled("on-demand-cluster/a:1")
		m.set(cache.OnDemandCluster, "a:2", "bad")
		m.unsettled("on-demand-cluster/a:1", "on-demand-cluster/a:2")
		od.SetJudge(m.rejecting("a:2", "bad", byName))
		m.release(od, cache.OnDemandCluster)
		m.unsettled("on-demand-cluster/a:2")
		m.set(cache.OnDemandCluster, "a:2", "good")
		m.unsettled()
	})
}

func (m *mesh) unsettled(want ...string) {
	m.Helper()
	synctest.Wait()
	var got []string
	for _, k := range m.Unsettled(cache.OnDemandCluster, "a:") {
		got = append(got, k.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.Errorf("unsettled (-want +got):\n%s", diff)
	}
}

func (m *mesh) outstanding(keys []cache.Key, subscribed bool, want ...string) {
	m.Helper()
	var got []string
	for _, o := range m.Outstanding(keys, subscribed) {
		got = append(got, o.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.Errorf("outstanding (-want +got):\n%s", diff)
	}
}
