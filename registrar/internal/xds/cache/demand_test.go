package cache_test

import (
	"testing"
	"testing/synctest"

	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// ready reports whether DemandReady delivers.
func (m *mesh) ready() bool {
	select {
	case <-m.DemandReady():
		return true
	default:
		return false
	}
}

// A name that is asked for and not held is reported once, whoever asks how often,
// and is dropped when the last stream gave it up.
func TestDemand(t *testing.T) {
	bubble(t, func(m *mesh) {
		x, closeX := m.open(options{service: cache.OnDemand})
		y, closeY := m.open(options{service: cache.OnDemand})
		m.ready()
		m.must(x.Subscribe(resource.ClusterType, "b", "a"))
		m.must(y.Subscribe(resource.ClusterType, "a"))
		m.must(x.Subscribe(resource.ClusterType, "a"))
		if !m.ready() || m.ready() {
			t.Error("DemandReady does not deliver once")
		}
		m.demanded("+on-demand-cluster/a", "+on-demand-cluster/b")
		m.must(x.Subscribe(resource.ClusterType, "a"))
		m.demanded()
		if diff := cmp.Diff([]string{"a", "b"}, m.Demanded(cache.OnDemandCluster)); diff != "" {
			t.Errorf("demanded (-want +got):\n%s", diff)
		}
		m.must(x.Unsubscribe(resource.ClusterType, "a"))
		m.demanded()
		closeY()
		m.demanded("-on-demand-cluster/a")
		closeX()
		m.demanded("-on-demand-cluster/b")
		if got := m.Demanded(cache.OnDemandCluster); len(got) != 0 {
			t.Errorf("demanded %v with no stream", got)
		}
	})
}

// What was answered, or given up, before anybody took it is not reported; what
// was dropped and asked for again is not reported as dropped.
func TestDemandTakenBack(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.SecretType, "a", "b"))
		m.set(cache.Secret, "a", "1")
		m.must(c.Unsubscribe(resource.SecretType, "b"))
		m.demanded("-secret/b")
		m.must(c.Unsubscribe(resource.SecretType, "a"))
		m.must(c.Subscribe(resource.SecretType, "a"))
		m.demanded()
	})
}

// A name that was given after the demand for it was taken stays when the answer is that
// there is nothing; one that was not is answered so.
func TestAbsent(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.SecretType, "a", "b"))
		m.demanded("+secret/a", "+secret/b")
		m.set(cache.Secret, "a", "1")
		n := m.got(c, 0, "secret +a")
		m.Apply(cache.Batch{Absent: []cache.Key{key(cache.Secret, "a"), key(cache.Secret, "b")}})
		synctest.Wait()
		m.got(c, n, "secret -b")
		m.holds(c, cache.Secret, "a", "1")
	})
}

// A name that left is demanded anew by its next asker and answered without any
// timer, whatever was said of it before (XDS-48, MESH-22).
func TestDemandAgainAfterEviction(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.onDemand()
		for _, text := range []string{"1", "2"} {
			m.must(c.Subscribe(resource.ClusterType, "a"))
			m.demanded("+on-demand-cluster/a")
			m.set(cache.OnDemandCluster, "a", text)
			m.holds(c, cache.OnDemandCluster, "a", text)
			m.must(c.Unsubscribe(resource.ClusterType, "a"))
			m.demanded("-on-demand-cluster/a")
			if diff := cmp.Diff([]cache.Key{key(cache.OnDemandCluster, "a")}, m.Evict(key(cache.OnDemandCluster, "a"))); diff != "" {
				t.Errorf("evicted (-want +got):\n%s", diff)
			}
		}
	})
}

// Evict takes nothing away from a stream that has asked again in the meantime
// (XDS-D4), nor anything that is given unasked.
func TestEvictSparesSubscribed(t *testing.T) {
	bubble(t, func(m *mesh) {
		m.set(cache.OnDemandCluster, "a", "1")
		m.set(cache.WildcardCluster, "w", "1")
		c := m.onDemand()
		m.must(c.Subscribe(resource.ClusterType, "a"))
		if got := m.Evict(key(cache.OnDemandCluster, "a"), key(cache.WildcardCluster, "w")); len(got) != 0 {
			t.Errorf("evicted %v, want none", got)
		}
		m.got(c, 0, "cluster +a")
		if !m.Subscribed(key(cache.OnDemandCluster, "a")) || m.Subscribed(key(cache.WildcardCluster, "w")) {
			t.Error("Subscribed is wrong")
		}
	})
}

// An assignment that is gone is answered with an empty one, never as removed,
// and the real one replaces it (XDS-D5, XDS-35).
func TestAbsentAssignmentIsEmpty(t *testing.T) {
	bubble(t, func(m *mesh) {
		c := m.ads()
		m.must(c.Subscribe(resource.EndpointType, "a", "b"))
		m.set(cache.Endpoints, "a", "1")
		m.remove(key(cache.Endpoints, "a"), key(cache.Endpoints, "b"))
		const empty = "(type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment)"
		m.holds(c, cache.Endpoints, "a", empty, "b", empty)
		m.set(cache.Endpoints, "b", "2")
		m.holds(c, cache.Endpoints, "a", empty, "b", "2")
		if got := c.State(resource.EndpointType).Removed; len(got) != 0 {
			t.Errorf("removed %v, want none", got)
		}
		if got := m.Metrics().Gauges[cache.Endpoints].Held; got != 1 {
			t.Errorf("%d held, want the real one alone", got)
		}
	})
}
