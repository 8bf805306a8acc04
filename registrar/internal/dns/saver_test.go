package dns

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// startSaver returns a saver that runs in the folder until stop.
func startSaver(t *testing.T, dir string) (s *saver, reg *prometheus.Registry, stop func()) {
	t.Helper()
	tb := table.New()
	if _, err := tb.Apply(table.Change{Full: true, Settings: &table.Settings{Domain: "aether.internal"}}); err != nil {
		t.Fatal(err)
	}
	reg = prometheus.NewRegistry()
	s = newSaver(table.File{Path: filepath.Join(dir, "dns.json")}, tb,
		newMetrics(reg, tb, forward.NewLimiter(forward.DefaultLimits())), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(ctx)
	}()
	return s, reg, func() {
		cancel()
		<-done
	}
}

// A change is on disk soon, a burst of changes costs one write a second, and
// what is not written yet is when the process stops. Times are of a fake clock.
func TestSaver(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s, reg, stop := startSaver(t, dir)
		saves := func() float64 { return metric(t, reg, "portolan_dns_table_saves_total") }
		synctest.Wait()
		if got := saves(); got != 0 {
			t.Errorf("%v saves without a change", got)
		}
		s.changed()
		synctest.Wait()
		if got := saves(); got != 1 {
			t.Errorf("%v saves right after a change, want 1", got)
		}
		for range 300 {
			s.changed()
			time.Sleep(10 * time.Millisecond)
		}
		if got := saves(); got < 3 || got > 4 {
			t.Errorf("%v saves in 3 s, want 3 or 4", got)
		}
		stop()
	})
	// Again and again: what is chosen when both happen is up to chance.
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			s, reg, stop := startSaver(t, dir)
			s.changed()
			synctest.Wait()
			s.changed()
			stop()
			if got := metric(t, reg, "portolan_dns_table_saves_total"); got != 2 {
				t.Errorf("%v saves with one at the stop, want 2", got)
			}
		})
	}
}

// A disk that refuses is tried again, and never in a hurry.
func TestSaverRetries(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "missing")
	synctest.Test(t, func(t *testing.T) {
		s, reg, stop := startSaver(t, dir)
		s.changed()
		time.Sleep(12 * time.Second)
		if got := metric(t, reg, "portolan_dns_table_save_errors_total"); got != 3 {
			t.Errorf("%v failed saves in 12 s, want 3", got)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		if got := metric(t, reg, "portolan_dns_table_saves_total"); got != 1 {
			t.Errorf("%v saves when the disk is back, want 1", got)
		}
		stop()
	})
}
