package kubernetes

import "github.com/prometheus/client_golang/prometheus"

// metrics of one Backend.
type metrics struct {
	// writes counts calls that change the API server, by verb and result. The calls
	// of one pod's life are bounded by what it goes through, so their rate is too.
	writes *prometheus.CounterVec
	// putBack counts objects that were put back because somebody else took or
	// changed them, ghosts those that were deleted because they had no pod.
	putBack, ghosts prometheus.Counter
	// relists counts complete lists.
	relists prometheus.Counter
}

func newMetrics() metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "portolan_registry_api_writes_total", Help: "Writes of ServiceEndpoints to the Kubernetes API.",
		}, []string{"verb", "result"}),
		putBack: counter("portolan_registry_put_back_total", "ServiceEndpoints of this node that somebody else changed or deleted and that were put back."),
		ghosts:  counter("portolan_registry_ghosts_total", "ServiceEndpoints of this node that had no pod and were deleted."),
		relists: counter("portolan_registry_lists_total", "Complete lists of ServiceEndpoints that were read."),
	}
}

// register adds the metrics of b to r; nil leaves them out.
func (b *Backend) register(r prometheus.Registerer) error {
	if r == nil {
		return nil
	}
	gauge := func(name, help string, value func(condition) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return value(b.condition()) })
	}
	for _, c := range []prometheus.Collector{
		b.metrics.writes, b.metrics.putBack, b.metrics.ghosts, b.metrics.relists,
		gauge("portolan_registry_stale", "1 while endpoints of other nodes may be outdated: the Kubernetes API is away, or has not given a complete list.", func(c condition) float64 {
			if c.stale() {
				return 1
			}
			return 0
		}),
		gauge("portolan_registry_unwritten", "ServiceEndpoints of this node that the Kubernetes API does not have as they are.", func(c condition) float64 { return float64(c.unwritten) }),
		gauge("portolan_registry_refused", "ServiceEndpoints of this node that the Kubernetes API refuses.", func(c condition) float64 { return float64(c.refused) }),
		gauge("portolan_registry_unusable_objects", "ServiceEndpoints that cannot be read, or claim a UID of others, and are left out.", func(c condition) float64 { return float64(c.unusable) }),
	} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}
