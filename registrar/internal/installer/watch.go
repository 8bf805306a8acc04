package installer

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
)

// rewatchAfter is how long a watch that failed is not tried again; polling goes on.
const rewatchAfter = time.Minute

// watch tells about changes in folders, by the kernel's notices. It may fail at any
// time (CNI-14); who uses it polls as well.
type watch struct {
	dirs   []string
	open   func() (*fsnotify.Watcher, error)
	errs   prometheus.Counter
	log    *slog.Logger
	now    *fsnotify.Watcher // nil while there is none
	seen   map[string]fs.FileInfo
	failed time.Time
	why    error
}

// ensure watches the folders that are there now: one that was removed and made
// again is another one, of which the kernel would say nothing.
func (w *watch) ensure(now time.Time) {
	if w.now == nil {
		if !w.failed.IsZero() && now.Sub(w.failed) < rewatchAfter {
			return
		}
		opened, err := w.open()
		if err != nil {
			w.fail(now, err)
			return
		}
		w.now, w.seen, w.why = opened, make(map[string]fs.FileInfo), nil
	}
	for _, dir := range w.dirs {
		info, err := os.Stat(dir)
		if err != nil {
			continue // the caller makes it, or says why it cannot
		}
		if old := w.seen[dir]; old != nil && os.SameFile(old, info) {
			continue
		}
		if err := w.now.Add(dir); err != nil {
			w.fail(now, err)
			return
		}
		w.seen[dir] = info
	}
}

// fail gives the watch up for a while.
func (w *watch) fail(now time.Time, err error) {
	w.errs.Inc()
	w.failed, w.why = now, err
	w.log.Warn("folders are polled, not watched: raise fs.inotify.max_user_instances and max_user_watches", "error", err)
	w.close()
}

func (w *watch) close() {
	if w.now != nil {
		_ = w.now.Close() // nothing is to be saved
		w.now = nil
	}
}

// events and errors are nil, and so never ready, while there is no watch.
func (w *watch) events() chan fsnotify.Event {
	if w.now == nil {
		return nil
	}
	return w.now.Events
}

func (w *watch) errors() chan error {
	if w.now == nil {
		return nil
	}
	return w.now.Errors
}

// failedWith takes an error of the watch. Lost notices are no reason to give it up.
func (w *watch) failedWith(now time.Time, err error) {
	if errors.Is(err, fsnotify.ErrEventOverflow) {
		w.errs.Inc()
		return
	}
	w.fail(now, err)
}
