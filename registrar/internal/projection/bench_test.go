package projection

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// fleet returns the records of a fleet with three ports per pod, every string and slice
// of its own, as they come from a decoder.
func fleet(services, podsPer int) []model.Endpoint {
	out := make([]model.Endpoint, 0, services*podsPer)
	for s := range services {
		for i := range podsPer {
			n := s*podsPer + i
			p := pod(fmt.Sprintf("%064x-eth0", n), fmt.Sprintf("ns%d/service-%d", s%10, s), "10.0.0.1", "5432=tcp+ 8080*+ 9090=h2+")
			p.Addresses = []netip.Addr{netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})}
			p.Locality = model.Locality{Region: "region-1", Zone: fmt.Sprintf("zone-%d", n%3)}
			p.PodName, p.Node = fmt.Sprintf("service-%d-%d", s, i), fmt.Sprintf("node-%d", n%1000)
			out = append(out, p)
		}
	}
	return out
}

// loaded returns an engine with a fleet.
func loaded(tb testing.TB, pods []model.Endpoint) *Engine {
	tb.Helper()
	e, err := New(testConfig(), nil, t0)
	if err != nil {
		tb.Fatal(err)
	}
	for _, p := range pods {
		if err := e.Upsert(p, t0); err != nil {
			tb.Fatal(err)
		}
	}
	e.Synced()
	e.TakeDirty()
	return e
}

// One endpoint changes its health: upsert, settle, and the two load assignments that
// changed. The cost is that of its service, whatever else there is.
func BenchmarkEndpointChange(b *testing.B) {
	for _, n := range []int{100, 10_000, 100_000} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			pods := fleet(n/100, 100)
			e := loaded(b, pods)
			changed := pods[len(pods)/2]
			name := changed.Service.Name + "." + changed.Service.Namespace + "." + domain
			healths := [2][]model.PortStatus{
				pod("", "a/a", "10.0.0.1", "5432=tcp+ 8080*- 9090=h2-").Ports, pod("", "a/a", "10.0.0.1", "5432=tcp+ 8080*+ 9090=h2+").Ports,
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				changed.Generation++
				changed.Ports = healths[i%2]
				if err := e.Upsert(changed, t0); err != nil {
					b.Fatal(err)
				}
				if c := e.TakeDirty(); len(c) != 1 || len(c[0].Ports) != 2 {
					b.Fatal(c)
				}
				for _, n := range []string{name, name + ":9090"} {
					if _, ok := e.Cluster(n); !ok {
						b.Fatal(n)
					}
				}
			}
		})
	}
}

// The same in a service of many pods: what the load assignment itself costs.
func BenchmarkLargeService(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("pods=%d", n), func(b *testing.B) {
			pods := fleet(1, n)
			e := loaded(b, pods)
			b.ReportAllocs()
			for b.Loop() {
				if c, ok := e.Cluster("service-0.ns0." + domain); !ok || len(c.Endpoints) != n {
					b.Fatal(len(c.Endpoints))
				}
			}
		})
	}
}

// The route table's part of every service.
func BenchmarkShapes(b *testing.B) {
	e := loaded(b, fleet(10_000, 1))
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for k := range e.Services() {
			v, _ := e.Shape(k)
			n += len(v.VirtualHosts)
		}
		if n != 30_000 {
			b.Fatal(n)
		}
	}
}

// The first sync, in the order of UIDs.
func BenchmarkFirstSync(b *testing.B) {
	for _, shape := range [][2]int{{1_000, 100}, {1, 100_000}} {
		b.Run(fmt.Sprintf("services=%d/pods=%d", shape[0], shape[1]), func(b *testing.B) {
			pods := fleet(shape[0], shape[1])
			for b.Loop() {
				loaded(b, pods)
			}
		})
	}
}

// A request for a name that leads nowhere, at the cap.
func BenchmarkResolveUnknown(b *testing.B) {
	e := loaded(b, fleet(1_000, 1))
	for i := range DefaultUnknownCap {
		e.Resolve(fmt.Sprintf("ghost-%d.%s", i, domain))
	}
	b.ReportAllocs()
	for b.Loop() {
		if a := e.Resolve("one-more.aether.internal:9090"); a.Kind != Refused {
			b.Fatal(a.Kind)
		}
	}
}

// O(changed): what one change of an endpoint allocates does not depend on how many other
// services there are.
func TestEndpointChangeIsFlat(t *testing.T) {
	allocs := func(services int) float64 {
		pods := fleet(services, 10)
		e := loaded(t, pods)
		changed := pods[len(pods)/2]
		healths := [2][]model.PortStatus{
			pod("", "a/a", "10.0.0.1", "5432=tcp+ 8080*- 9090=h2-").Ports, pod("", "a/a", "10.0.0.1", "5432=tcp+ 8080*+ 9090=h2+").Ports,
		}
		return testing.AllocsPerRun(100, func() {
			changed.Generation++
			changed.Ports = healths[changed.Generation%2]
			if err := e.Upsert(changed, t0); err != nil {
				t.Fatal(err)
			}
			if c := e.TakeDirty(); len(c) != 1 || c[0].Shape {
				t.Fatal(c)
			}
		})
	}
	if few, many := allocs(10), allocs(2_000); many > few {
		t.Errorf("%v allocations among 10 services, %v among 2,000", few, many)
	}
}

// The memory of a pod stays small: at 100,000 pods with three ports each, all in, with
// 100 and with 10 pods per service.
func TestMemoryPerEndpoint(t *testing.T) {
	const limit = 500
	for _, podsPer := range []int{100, 10} {
		if perPod := memoryPerEndpoint(t, podsPer); perPod > limit {
			t.Errorf("%d pods per service: %d bytes per pod, the limit is %d", podsPer, perPod, limit)
		}
	}
}

// The same as a figure.
func BenchmarkMemoryPerEndpoint(b *testing.B) {
	for _, podsPer := range []int{100, 10} {
		b.Run(fmt.Sprintf("pods=%d", podsPer), func(b *testing.B) {
			for b.Loop() {
				b.ReportMetric(float64(memoryPerEndpoint(b, podsPer)), "bytes/endpoint")
			}
		})
	}
}

// memoryPerEndpoint is what an engine keeps for each of 100,000 pods, in bytes.
func memoryPerEndpoint(tb testing.TB, podsPer int) uint64 {
	tb.Helper()
	const n = 100_000
	var before, after runtime.MemStats
	pods := fleet(n/podsPer, podsPer)
	// What the engine keeps of the record is counted as its own.
	var uids uint64
	for _, p := range pods {
		uids += uint64(len(p.UID) + 16 - len(p.UID)%16)
	}
	runtime.GC()
	runtime.ReadMemStats(&before)
	e := loaded(tb, pods)
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(e)
	runtime.KeepAlive(pods)
	return (after.HeapAlloc - before.HeapAlloc + uids) / n
}
