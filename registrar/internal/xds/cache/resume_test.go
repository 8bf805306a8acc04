package cache_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// had returns what a client says it holds when it reconnects: names subscribed,
// and resources as name and text.
func (m *mesh) had(subscribed []string, nameText ...string) *xdstest.State {
	m.Helper()
	s := &xdstest.State{Subscribed: map[string]bool{}, Resources: map[string]xdstest.Resource{}}
	for _, name := range subscribed {
		s.Subscribed[name] = true
	}
	for _, r := range m.resources(nameText...) {
		s.Resources[r.Name] = xdstest.Resource{Version: r.Version, Body: r.Body}
	}
	return s
}

// A client that reconnects is sent what changed and told what is gone, nothing
// else (XDS-41, XDS-R22): by wildcard, by name, and both mixed as Envoy does for
// on-demand clusters on the same stream (XDS-R2).
func TestResume(t *testing.T) {
	named := []string{"same", "changed", "gone", "new"}
	received, removed := map[string]int{"changed": 1, "new": 1}, map[string]int{"gone": 1}
	for _, test := range []struct {
		name              string
		kind              cache.Kind
		subscribed        []string
		received, removed map[string]int
	}{
		{name: "clusters", kind: cache.WildcardCluster, subscribed: []string{"*"}, received: received, removed: removed},
		{name: "clusters and names", kind: cache.WildcardCluster, subscribed: []string{"*", "same", "gone"}, received: received, removed: removed},
		{name: "listeners", kind: cache.Listener, subscribed: []string{"*"}, received: received, removed: removed},
		{name: "secrets", kind: cache.Secret, subscribed: named, received: received, removed: removed},
		{name: "on-demand clusters", kind: cache.OnDemandCluster, subscribed: named, received: received, removed: removed},
		// An assignment that is gone is answered with an empty one (XDS-D5).
		{name: "endpoints", kind: cache.Endpoints, subscribed: named, received: map[string]int{"changed": 1, "new": 1, "gone": 1}, removed: map[string]int{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, func(m *mesh) {
				m.set(test.kind, "same", "1", "changed", "2", "new", "1")
				c, _ := m.open(options{node: "n1", service: serviceOf(test.kind)})
				m.must(c.Resume(test.kind.TypeURL(), m.had(test.subscribed, "same", "1", "changed", "1", "gone", "1")))
				m.remove(key(test.kind, "gone"))                                     // the consumer's answer to the demand
				if test.kind == cache.WildcardCluster || test.kind == cache.Secret { // what removals wait for
					m.must(c.Subscribe(resource.ListenerType))
				}
				if test.kind == cache.Secret {
					m.must(c.Subscribe(resource.ClusterType))
				}
				if test.kind == cache.Endpoints { // what assignments wait for
					m.must(c.Subscribe(resource.ClusterType))
					m.must(m.onDemand().Resume(resource.ClusterType, m.had(nil)))
				}
				state := c.State(test.kind.TypeURL())
				if diff := cmp.Diff(test.received, state.Received); diff != "" {
					t.Errorf("received (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(test.removed, state.Removed); diff != "" {
					t.Errorf("removed (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func serviceOf(kind cache.Kind) cache.Service {
	if kind == cache.OnDemandCluster {
		return cache.OnDemand
	}
	return cache.ADS
}

// While the content is not complete nobody is answered and nothing is removed;
// afterwards a client that reconnected is sent the difference (XDS-42, XDS-R21,
// XDS-D12, MESH-14).
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mesh{T: t, Cache: cache.New(cache.Config{})}
		ads, od := m.ads(), m.onDemand()
		m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1", "gone", "1")))
		m.must(ads.Resume(resource.ListenerType, m.had([]string{"*"}, "l", "1")))
		m.must(ads.Resume(resource.EndpointType, m.had([]string{"s"}, "s", "1")))
		m.must(od.Resume(resource.ClusterType, m.had([]string{"s", "t"}, "s", "1", "t", "1")))
		m.set(cache.WildcardCluster, "a", "1")
		m.remove(key(cache.OnDemandCluster, "t"))
		time.Sleep(time.Minute)
		m.got(ads, 0)
		m.got(od, 0)
		if !m.Status().Held {
			t.Error("status does not say that answers are held")
		}
		m.set(cache.Listener, "l", "2")
		m.setService("s", "1", "2")
		m.Release()
		synctest.Wait()
		n := m.got(ads, 0, "cluster", "endpoints +s", "listener +l", "cluster -gone")
		m.got(od, 0, "cluster -t")

		m.Hold()
		m.set(cache.Listener, "l", "3")
		n = m.got(ads, n)
		m.Release()
		synctest.Wait()
		m.got(ads, n, "listener +l")
	})
}

// A listener or cluster that is gone while an Envoy comes back, and is there again before
// the Envoy was told, keeps its secret: what Envoy only holds it asks for once.
func TestResumeKeepsSecretInUse(t *testing.T) {
	kinds := []cache.Kind{cache.WildcardCluster, cache.Listener}
	for i, user := range kinds {
		other := kinds[1-i]
		bubble(t, func(m *mesh) {
			c := m.ads()
			m.must(c.Resume(resource.SecretType, m.had([]string{"s"}, "s", "1")))
			m.remove(key(cache.Secret, "s")) // the consumer's answer to the demand
			m.must(c.Subscribe(other.TypeURL()))
			m.got(c, 0, other.String())
			m.set(user, "u", "1")
			m.set(cache.Secret, "s", "1")
			m.must(c.Resume(user.TypeURL(), m.had([]string{"*"}, "u", "1")))
			m.got(c, 1, user.String())

			c.SetJudge(withholdAll)
			m.remove(key(user, "u"), key(cache.Secret, "s"))
			m.got(c, 2, user.String()+" -u")
			m.release(c, user)
			m.got(c, 3, "secret -s")
		})
	}
}

// A client that reconnects keeps what nobody has answered for yet: its names are
// demanded and stay as they are until the consumer knows (XDS-D12).
func TestResumeWaitsForConsumer(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od := m.ads(), m.onDemand()
		m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"})))
		m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
		m.must(ads.Resume(resource.EndpointType, m.had([]string{"a"}, "a", "1")))
		m.demanded("+endpoints/a", "+on-demand-cluster/a")
		m.setService("a", "1", "1")
		m.got(od, 0)
		n := m.got(ads, 0, "cluster")
		m.setService("a", "1", "2")
		m.got(ads, n, "endpoints +a")
	})
}

// A cluster that is sent after a reconnect is followed by its load assignment,
// though the client says that it has that: Envoy asks for it before or after the
// cluster came, and never again (XDS-R23).
func TestAssignmentFollowsAfterReconnect(t *testing.T) {
	const cds, eds = "cluster", "endpoints"
	for _, order := range [][]string{{cds, eds}, {eds, cds}} {
		for _, wildcard := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v wildcard %v", order, wildcard), func(t *testing.T) {
				bubble(t, func(m *mesh) {
					kind, names := cache.WildcardCluster, []string{"*"}
					if !wildcard {
						kind, names = cache.OnDemandCluster, []string{"a", "b"}
					}
					m.set(kind, "a", "2", "b", "1")
					m.set(cache.Endpoints, "a", "1", "b", "1")
					main := m.ads()
					clusters := main
					if !wildcard {
						clusters = m.onDemand()
						m.must(main.Subscribe(resource.ClusterType))
					}
					for _, step := range order {
						if step == cds {
							m.must(clusters.Resume(resource.ClusterType, m.had(names, "a", "1", "b", "1")))
						} else {
							m.must(main.Resume(resource.EndpointType, m.had([]string{"a", "b"}, "a", "1", "b", "1")))
						}
					}
					if got := main.State(resource.EndpointType).Received; got["a"] != 1 || got["b"] != 0 {
						t.Errorf("assignments sent %v, want a alone", got)
					}
				})
			})
		}
	}
}

// After a reconnect, clusters that are gone are removed only when the listeners
// that may name them are settled, in whatever order the client asks.
func TestResumeRemovesClustersLast(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.WildcardCluster, "a", "1")
		m.set(cache.Listener, "l", "2")
		c, _ := m.open(options{judge: withholdAll})
		m.must(c.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1", "gone", "1")))
		m.got(c, 0, "cluster")
		m.release(c, cache.WildcardCluster)
		m.got(c, 1)
		m.must(c.Resume(resource.ListenerType, m.had([]string{"*"}, "l", "1")))
		m.got(c, 1, "listener +l")
		m.release(c, cache.Listener)
		m.got(c, 2, "cluster -gone")
	})
}

// A cluster that came back after a reconnect and goes again waits for what was
// changed before it, not for what came later.
func TestResumedClusterGoesAgain(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.Listener, "l", "1")
		c := m.ads()
		m.must(c.Resume(resource.ClusterType, m.had([]string{"*"}, "back", "1")))
		m.set(cache.WildcardCluster, "back", "2")
		m.must(c.Subscribe(resource.ListenerType))
		m.holds(c, cache.WildcardCluster, "back", "2")
		c.SetJudge(withholdAll)
		n := len(c.Order())
		m.set(cache.WildcardCluster, "other", "1")
		m.remove(key(cache.WildcardCluster, "back"))
		m.set(cache.Listener, "l", "2")
		m.release(c, cache.WildcardCluster)
		m.got(c, n, "cluster +other", "cluster -back", "listener +l")
	})
}

// The version of the same content is the same in every process, so a restart
// sends nothing again (XDS-R22, I5).
func TestVersionIsStable(t *testing.T) {
	if got, want := text(t, "a", "x").Version, "fbc601aefa01f869"; got != want {
		t.Errorf("version %s, want %s as ever", got, want)
	}
	if text(t, "a", "x").Version == text(t, "a", "y").Version {
		t.Error("other content has the same version")
	}
}

// A name that an Envoy has from both sources, and that the next registrar gives on
// demand alone, is not taken from it: Envoy has one cluster of a name, whoever gave it,
// and would not ask for it again (dataplane decision 5). Whichever stream comes first.
func TestResumeKeepsWhatIsOnDemand(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("on-demand stream late %v", late), func(t *testing.T) {
			bubble(t, func(m *mesh) {
				m.setService("a", "1", "1")
				ads := m.ads()
				var od *xdstest.Client
				resume := func() {
					od = m.onDemand()
					m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
				}
				if !late {
					resume()
				}
				m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1", "gone", "1")))
				m.must(ads.Resume(resource.ListenerType, m.had([]string{"*"})))
				synctest.Wait()
				if !late {
					m.got(ads, 0, "cluster", "cluster -gone", "listener")
					m.got(od, 0)
					return
				}
				m.got(ads, 0, "cluster", "cluster -a -gone", "listener")
				resume()
				synctest.Wait()
				m.got(od, 0, "cluster +a")
			})
		})
	}
}

// What the Envoy keeps so is what the on-demand stream is to have, whatever that said of an
// earlier stream.
func TestResumeKeepsOneVersion(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.setService("a", "2", "1")
		ads, od := m.ads(), m.onDemand()
		m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "2")))
		m.got(od, 0)
		m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1")))
		m.must(ads.Resume(resource.ListenerType, m.had([]string{"*"})))
		m.got(ads, 0, "cluster", "listener")
		m.got(od, 0, "cluster +a")
	})
}

// Likewise, while nobody has said what the name is on demand: its removal waits for that. If
// it is sent after all, as nobody says so in time, the cluster is given again, though the
// Envoy had just that.
func TestResumeWaitsForWhatIsOnDemand(t *testing.T) {
	for _, inTime := range []bool{false, true} {
		t.Run(fmt.Sprintf("said in time %v", inTime), func(t *testing.T) {
			bubble(t, func(m *mesh) {
				ads, od := m.ads(), m.onDemand()
				m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
				m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"}, "a", "1")))
				m.must(ads.Resume(resource.ListenerType, m.had([]string{"*"})))
				synctest.Wait()
				n := m.got(ads, 0, "cluster", "listener")
				if inTime {
					m.setService("a", "1", "1")
					time.Sleep(time.Minute)
					m.got(ads, n)
					m.got(od, 0)
					return
				}
				time.Sleep(time.Minute)
				m.got(ads, n, "cluster -a")
				m.setService("a", "1", "1")
				m.got(od, 0, "cluster +a")
			})
		})
	}
}

// A load assignment that came to mean another port or service does not reach an Envoy
// before its cluster does: neither while the response before that is unacknowledged, nor
// when the Envoy came back with the old cluster and has not asked for it yet (I1).
func TestAssignmentWaitsForUnsentCluster(t *testing.T) {
	t.Run("of every Envoy", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			ads := m.ads()
			m.must(ads.Subscribe(resource.ClusterType))
			m.set(cache.WildcardCluster, "a", "1")
			m.must(ads.Subscribe(resource.EndpointType, "a"))
			m.set(cache.Endpoints, "a", "1")
			synctest.Wait()
			ads.SetJudge(func(*discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict { return xdstest.Withhold() })
			m.set(cache.WildcardCluster, "b", "1")
			n := len(ads.Order())
			m.set(cache.WildcardCluster, "a", "2")
			m.set(cache.Endpoints, "a", "2")
			m.got(ads, n)
			m.must(ads.Release(resource.ClusterType))
			synctest.Wait()
			m.got(ads, n, "cluster +a", "endpoints +a")
		})
	})
	t.Run("of a late stream", func(t *testing.T) {
		bubble(t, func(m *mesh) {
			m.setService("a", "2", "2")
			ads := m.ads()
			m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"})))
			m.must(ads.Resume(resource.EndpointType, m.had([]string{"a"}, "a", "1")))
			synctest.Wait()
			n := m.got(ads, 0, "cluster")
			od := m.onDemand()
			m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
			synctest.Wait()
			m.got(od, 0, "cluster +a")
			m.got(ads, n, "endpoints +a")
		})
	})
}

// Nor does it while nobody has said what the cluster is that the Envoy came back with.
func TestAssignmentWaitsForUnsaidCluster(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od := m.ads(), m.onDemand()
		m.must(od.Resume(resource.ClusterType, m.had([]string{"a"}, "a", "1")))
		m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"})))
		m.must(ads.Resume(resource.EndpointType, m.had([]string{"a"}, "a", "1")))
		n := m.got(ads, 0, "cluster")
		m.set(cache.Endpoints, "a", "2")
		m.got(ads, n)
		m.set(cache.OnDemandCluster, "a", "2")
		m.got(od, 0, "cluster +a")
		m.got(ads, n, "endpoints +a")
	})
}

// An Envoy of which a cluster warms asks for no clusters before that has its load
// assignment. So one that comes back like this gets what it has nothing of at once,
// whoever gave it the cluster; what it has waits, as it may come to mean something else.
func TestResumeWhileClusterWarms(t *testing.T) {
	for _, test := range []struct {
		name   string
		resume func(m *mesh, od *xdstest.Client) error
	}{
		{"cluster of an earlier stream", func(m *mesh, od *xdstest.Client) error {
			return od.Resume(resource.ClusterType, m.had([]string{"cold"}, "cold", "1"))
		}},
		{"cluster of this stream", func(_ *mesh, od *xdstest.Client) error {
			return od.Subscribe(resource.ClusterType, "cold")
		}},
		{"on-demand stream is late", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, func(m *mesh) {
				m.setService("cold", "1", "1")
				m.set(cache.Endpoints, "known", "2")
				if test.resume != nil {
					m.must(test.resume(m, m.onDemand()))
				}
				ads := m.ads()
				m.must(ads.Resume(resource.EndpointType, m.had([]string{"cold", "known"}, "known", "1")))
				n := m.got(ads, 0, "endpoints +cold")
				m.must(ads.Resume(resource.ClusterType, m.had([]string{"*"})))
				m.must(m.onDemand().Resume(resource.ClusterType, m.had(nil)))
				m.got(ads, n, "cluster", "endpoints +known")
			})
		})
	}
}
