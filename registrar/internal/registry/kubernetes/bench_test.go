package kubernetes

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// follow gives every event to sink until the benchmark ends, and returns once the
// list is complete.
func follow(b *testing.B, n *node, sink func(registry.Event)) {
	b.Helper()
	complete, ended := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(b.Context())
	go func() {
		defer close(ended)
		_ = n.Watch(ctx, func(ev registry.Event) {
			if ev.Kind == registry.Complete {
				close(complete)
			}
			sink(ev)
		})
	}()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	<-complete
}

// quantile of durations that are sorted.
func quantile(sorted []time.Duration, q float64) float64 {
	return float64(sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Microseconds()) / 1000
}

// BenchmarkWriteToWatch is how long a change takes from Publish on one node to the
// sink of another, one change at a time.
func BenchmarkWriteToWatch(b *testing.B) {
	c := newCluster(b)
	n1, n2 := newNode(b, "n1", c.server.Admin()), newNode(b, "n2", c.server.Admin())
	seen := make(chan uint64, 1)
	follow(b, n2, func(ev registry.Event) {
		if ev.Kind == registry.Upsert {
			seen <- ev.Generation
		}
	})
	follow(b, n1, func(registry.Event) {})
	ep := endpoint("n1", "a", 1)
	must(b, n1.Publish(b.Context(), ep))
	<-seen
	var took []time.Duration
	for b.Loop() {
		ep.Generation++
		ep.Weight = 1 + uint32(ep.Generation%1000)
		start := time.Now()
		must(b, n1.Publish(b.Context(), ep))
		if g := <-seen; g != ep.Generation {
			b.Fatalf("saw generation %d, want %d", g, ep.Generation)
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(quantile(took, 0.5), "p50-ms")
	b.ReportMetric(quantile(took, 0.99), "p99-ms")
}

const many = 10_000

// fill puts many endpoints of 100 other nodes into the API server, by all writers of
// one backend: a node for this once.
func fill(b *testing.B, c *cluster) {
	b.Helper()
	var filling sync.WaitGroup
	for w := range writers {
		filling.Go(func() {
			for i := w; i < many; i += writers {
				object, err := objectOf(synthetic(i, 1), "")
				must(b, err)
				_, err = c.objects.apply(b.Context(), object)
				must(b, err)
			}
		})
	}
	filling.Wait()
}

// synthetic returns the i-th of many records.
func synthetic(i int, generation uint64) model.Endpoint {
	ep := endpoint(fmt.Sprintf("node-%d", i%100), fmt.Sprint(i), generation)
	ep.Service.Name = fmt.Sprintf("service-%d", i%500)
	ep.Identity.Account = ep.Service.Name
	ep.PodName = fmt.Sprintf("%s-7d9c5b8f6d-%05d", ep.Service.Name, i)
	ep.PodUID = fmt.Sprintf("4c0b6ad5-0000-4000-8000-%012d", i)
	ep.Addresses = []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}
	ep.Ports, ep.Metadata = ep.Ports[1:], nil
	return ep
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkMany is what 10,000 endpoints of other nodes cost a reader: memory once
// they are read, how long a start reads them, and the processor time of 1,000
// changes, beyond what the writer of the benchmark takes, at 100 a second. It takes
// longer than a benchmark's time, and so runs once.
func BenchmarkMany(b *testing.B) {
	c := newCluster(b)
	fill(b, c)
	generation := uint64(1)
	change := func() time.Duration {
		generation++
		before := cpu()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for i := range 1000 {
			<-tick.C
			ep := synthetic(i*7, generation)
			ep.Ports[0].Health = model.Health(generation % 2)
			object, err := objectOf(ep, "")
			must(b, err)
			_, err = c.objects.apply(b.Context(), object)
			must(b, err)
		}
		return cpu() - before
	}
	alone := change()
	before := heap()
	start := time.Now()
	n := newNode(b, "n1", c.server.Admin())
	last := make(chan struct{}, 1)
	follow(b, n, func(ev registry.Event) {
		if ev.Kind == registry.Upsert && ev.Generation == 3 && ev.UID == uidOf(fmt.Sprint(999*7)) {
			last <- struct{}{}
		}
	})
	read := time.Since(start)
	if got := n.Stats().Records; got != many {
		b.Fatalf("%d are read", got)
	}
	must(b, n.local.Flush())
	used := heap() - before
	with := change()
	<-last
	b.ReportMetric(float64(used)/many, "B/endpoint")
	b.ReportMetric(float64(read.Milliseconds()), "start-ms")
	b.ReportMetric((with - alone).Seconds(), "cpu-s/1000changes")
	b.ReportMetric(alone.Seconds(), "writer-cpu-s/1000changes")
	b.ReportMetric(0, "ns/op")
	runtime.KeepAlive(n)
}
