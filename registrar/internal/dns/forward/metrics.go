package forward

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics counts what happens between us and the upstream resolvers. No label
// carries a name or an address.
type Metrics struct {
	seconds   prometheus.Histogram
	exhausted prometheus.Counter
	truncated prometheus.Counter
	failures  struct{ timeout, network, rcode prometheus.Counter }
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	m := &Metrics{
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Name:    "portolan_dns_upstream_seconds",
			Help:    "Time until a forwarded query was answered.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}),
		exhausted: f.NewCounter(prometheus.CounterOpts{
			Name: "portolan_dns_upstream_exhausted_total",
			Help: "Forwarded queries that no upstream resolver answered.",
		}),
		truncated: f.NewCounter(prometheus.CounterOpts{
			Name: "portolan_dns_upstream_truncated_total",
			Help: "Truncated answers that were asked for again over TCP.",
		}),
	}
	failures := f.NewCounterVec(prometheus.CounterOpts{
		Name: "portolan_dns_upstream_failures_total",
		Help: "Tries that a resolver did not answer in time (timeout), that failed (network), or that it refused (rcode).",
	}, []string{"reason"})
	m.failures.timeout = failures.WithLabelValues("timeout")
	m.failures.network = failures.WithLabelValues("network")
	m.failures.rcode = failures.WithLabelValues("rcode")
	return m
}
