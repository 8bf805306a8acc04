package dns

import (
	"context"
	"log/slog"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

const (
	// saveInterval is the shortest time between two writes of the table: a burst
	// of changes costs two, whatever its size.
	saveInterval = time.Second
	// saveRetry is the pause after a write that failed.
	saveRetry = 5 * time.Second
)

// saver keeps the table on disk, from one goroutine, beside everything else: no
// acknowledgement waits for a disk. What a crash loses, the registrar sends again.
type saver struct {
	file    table.File
	table   *table.Table
	metrics *metrics
	log     *slog.Logger
	// wake has room for one: there is something to save.
	wake chan struct{}
	// failed: the last write did. Only run uses it.
	failed bool
}

func newSaver(file table.File, t *table.Table, m *metrics, log *slog.Logger) *saver {
	return &saver{file: file, table: t, metrics: m, log: log, wake: make(chan struct{}, 1)}
}

// changed makes run write the table soon. It never blocks.
func (s *saver) changed() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run writes until ctx ends, and then once more what is not written yet.
func (s *saver) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			select {
			case <-s.wake:
				s.save()
			default:
			}
			return
		case <-s.wake:
		}
		pause := saveInterval
		if !s.save() {
			s.changed()
			pause = saveRetry
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (s *saver) save() bool {
	if err := s.file.Save(s.table.Message()); err != nil {
		s.metrics.saveErrors.Inc()
		s.failed = true
		s.log.Error("table not saved; a restart of mesh DNS would serve an older one until the registrar connects", "error", err)
		return false
	}
	s.metrics.saves.Inc()
	if s.failed {
		s.log.Info("table is saved again", "file", s.file.Path)
	}
	s.failed = false
	return true
}
