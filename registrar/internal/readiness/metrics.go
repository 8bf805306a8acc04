package readiness

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a Watcher: totals only, never a label per pod.
type metrics struct {
	polls, errors, seconds, notices prometheus.Counter
}

// register makes the metrics and hands them to reg unless that is nil.
func (x *metrics) register(reg prometheus.Registerer, w *Watcher) error {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	x.polls = counter("portolan_readiness_polls_total", "Polls of pods' listen tables.")
	x.errors = counter("portolan_readiness_poll_errors_total", "Polls that could not read the listen table.")
	x.seconds = counter("portolan_readiness_poll_seconds_total", "Time spent in reading listen tables.")
	x.notices = counter("portolan_readiness_changes_total", "Changes of pods' listeners that were told.")
	if reg == nil {
		return nil
	}
	pods := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_readiness_pods", Help: "Pods whose listen table is watched."}, func() float64 {
		w.mu.Lock()
		defer w.mu.Unlock()
		return float64(len(w.pods))
	})
	for _, c := range []prometheus.Collector{x.polls, x.errors, x.seconds, x.notices, pods} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register readiness metrics: %w", err)
		}
	}
	return nil
}

// polled counts one poll.
func (x *metrics) polled(cost time.Duration, err error) {
	x.polls.Inc()
	x.seconds.Add(cost.Seconds())
	if err != nil {
		x.errors.Inc()
	}
}
