package podsource

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	failures *prometheus.CounterVec
}

func (m *metrics) register(r prometheus.Registerer, s *Source) error {
	m.failures = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "portolan_pod_source_watch_failures_total", Help: "Failed watches of the API server.",
	}, []string{"what"})
	if r == nil {
		return nil
	}
	pods := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "portolan_pod_source_pods", Help: "Pods of this node that the API server told of.",
	}, func() float64 { return float64(s.count()) })
	for _, c := range []prometheus.Collector{m.failures, pods} {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("register the metrics of the pod source: %w", err)
		}
	}
	return nil
}
