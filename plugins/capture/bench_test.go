package capture_test

import (
	"net/netip"
	"testing"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// A pod's ADD programs a fresh namespace.
func BenchmarkApplyFresh(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		n := nettest.New(b)
		b.StartTimer()
		if err := capture.Apply(n.Path, dual()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		n.Unmount(b)
		b.StartTimer()
	}
}

// A repair or a retry programs a namespace that has the table.
func BenchmarkApplyAgain(b *testing.B) {
	n := nettest.New(b)
	for b.Loop() {
		if err := capture.Apply(n.Path, dual()); err != nil {
			b.Fatal(err)
		}
	}
}

// CHECK, and the registrar's reconciliation of every pod.
func BenchmarkVerify(b *testing.B) {
	n := nettest.New(b)
	if err := capture.Apply(n.Path, dual()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := capture.Verify(n.Path, dual()); err != nil {
			b.Fatal(err)
		}
	}
}

// The mesh-DNS process does this for every pod, every other second.
func BenchmarkRefresh(b *testing.B) {
	n := nettest.New(b)
	if err := capture.Apply(n.Path, dual()); err != nil {
		b.Fatal(err)
	}
	alive, err := capture.OpenAlive(n.Path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = alive.Close() })
	for b.Loop() {
		if err := alive.Refresh(); err != nil {
			b.Fatal(err)
		}
	}
}

// The registrar does this for every pod when a service's TCP ports change.
func BenchmarkSetTCPPorts(b *testing.B) {
	n := nettest.New(b)
	if err := capture.Apply(n.Path, dual()); err != nil {
		b.Fatal(err)
	}
	var sets [2][]netip.AddrPort
	for i := range 1001 {
		p := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), 5432)
		if i < 1000 {
			sets[0] = append(sets[0], p)
		}
		sets[1] = append(sets[1], p)
	}
	for i := 0; b.Loop(); i++ {
		if err := capture.SetTCPPorts(n.Path, sets[i%2]); err != nil {
			b.Fatal(err)
		}
	}
}
