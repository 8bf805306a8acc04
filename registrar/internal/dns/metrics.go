package dns

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// metrics counts what happens to the table.
type metrics struct {
	revisions  prometheus.Counter
	refused    prometheus.Counter
	sessions   prometheus.Counter
	connected  prometheus.Gauge
	saves      prometheus.Counter
	saveErrors prometheus.Counter
	corrupt    prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, t *table.Table, l *forward.Limiter) *metrics {
	f := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_dns_names", Help: "Mesh names in the table."}, func() float64 {
		names, _ := t.Size()
		return float64(names)
	})
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_dns_pods", Help: "Pods in the table."}, func() float64 {
		_, n := t.Size()
		return float64(n)
	})
	f.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_dns_forwarding", Help: "Queries that wait for an upstream resolver now."}, func() float64 {
		return float64(l.InFlight())
	})
	return &metrics{
		revisions:  counter("portolan_dns_table_revisions_total", "Revisions of the table that were applied."),
		refused:    counter("portolan_dns_table_refused_total", "Revisions of the table that were refused."),
		sessions:   counter("portolan_dns_table_sessions_total", "Sessions of registrars that took the table over."),
		connected:  f.NewGauge(prometheus.GaugeOpts{Name: "portolan_dns_table_connected", Help: "1 while a registrar owns the table, 0 while the last table is served on."}),
		saves:      counter("portolan_dns_table_saves_total", "Times the table was written to disk."),
		saveErrors: counter("portolan_dns_table_save_errors_total", "Times the table could not be written to disk."),
		corrupt:    counter("portolan_dns_table_corrupt_total", "Table files that were not usable and were set aside."),
	}
}

// clientMetrics are those of the registrar's end.
type clientMetrics struct {
	connected  prometheus.Gauge
	reconnects prometheus.Counter
}

func newClientMetrics(reg prometheus.Registerer) *clientMetrics {
	f := promauto.With(reg)
	return &clientMetrics{
		connected: f.NewGauge(prometheus.GaugeOpts{
			Name: "portolan_mesh_dns_connected", Help: "1 while the mesh-DNS process has the whole table of this registrar.",
		}),
		reconnects: f.NewCounter(prometheus.CounterOpts{
			Name: "portolan_mesh_dns_reconnects_total", Help: "Connections to the mesh-DNS process that ended or failed.",
		}),
	}
}
