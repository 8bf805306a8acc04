package identity_test

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

const benchIdentities = 10_000

// running returns a manager with a file store in dir that runs until the stop
// function is called.
func running(b *testing.B, dir string) (*identity.Manager, func()) {
	b.Helper()
	store, err := identity.OpenFileStore(filepath.Join(dir, "svids"), time.Now, quiet())
	if err != nil {
		b.Fatal(err)
	}
	m, err := identity.NewManager(identity.ManagerConfig{Signer: openCA(b, dir, time.Now), Node: "n1", Store: store, Log: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = m.Run(ctx) }()
	return m, func() { cancel(); <-done }
}

func ensureAll(b *testing.B, m *identity.Manager) {
	b.Helper()
	for i := range benchIdentities {
		if _, err := m.Ensure(context.Background(), account(fmt.Sprintf("a%d", i))); err != nil {
			b.Fatal(err)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// BenchmarkEnsure10000 has 10,000 identities signed, stored and delivered.
func BenchmarkEnsure10000(b *testing.B) {
	for range b.N {
		m, stop := running(b, b.TempDir())
		before := heap()
		b.ResetTimer()
		ensureAll(b, m)
		b.StopTimer()
		b.ReportMetric(benchIdentities/b.Elapsed().Seconds(), "svids/s")
		b.ReportMetric(float64(int64(heap()-before))/benchIdentities, "heapB/svid")
		stop()
	}
}

// BenchmarkRestart10000 takes 10,000 identities over from the store.
func BenchmarkRestart10000(b *testing.B) {
	dir := b.TempDir()
	m, stop := running(b, dir)
	ensureAll(b, m)
	stop()
	b.ResetTimer()
	for range b.N {
		m, stop := running(b, dir)
		ensureAll(b, m)
		stop()
	}
	b.ReportMetric(float64(b.N)*benchIdentities/b.Elapsed().Seconds(), "svids/s")
}
