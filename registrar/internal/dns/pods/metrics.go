package pods

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
)

// Metrics counts what happens between the pods and us. No label carries a name,
// an address or a pod.
type Metrics struct {
	udp, tcp     outcomes
	overload     prometheus.Counter
	panics       prometheus.Counter
	writeErrors  prometheus.Counter
	conns        prometheus.Gauge
	refusedConns prometheus.Counter
	openErrors   prometheus.Counter
	aliveErrors  prometheus.Counter
	serving      prometheus.Gauge
	captured     prometheus.Gauge
}

// outcomes has one counter for each outcome of a query.
type outcomes map[responder.Outcome]prometheus.Counter

func (o *outcomes) count(outcome responder.Outcome) { (*o)[outcome].Inc() }

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	queries := f.NewCounterVec(prometheus.CounterOpts{
		Name: "portolan_dns_queries_total",
		Help: "Queries from pods by transport and what was decided about them.",
	}, []string{"transport", "outcome"})
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	return &Metrics{
		udp:          newOutcomes(queries, "udp"),
		tcp:          newOutcomes(queries, "tcp"),
		overload:     counter("portolan_dns_overload_total", "Queries answered SERVFAIL because too many of their pod were waiting for upstream resolvers."),
		panics:       counter("portolan_dns_panics_total", "Queries dropped because they made the parser panic."),
		writeErrors:  counter("portolan_dns_write_errors_total", "Answers that could not be sent to their client."),
		conns:        gauge("portolan_dns_tcp_connections", "Open TCP connections from pods."),
		refusedConns: counter("portolan_dns_tcp_refused_total", "TCP connections closed at once because their pod had too many."),
		openErrors:   counter("portolan_dns_open_errors_total", "Attempts to open the sockets of a pod that failed."),
		aliveErrors:  counter("portolan_dns_capture_errors_total", "Refreshes of a pod's capture of port 53 that failed."),
		serving:      gauge("portolan_dns_pods_serving", "Pods in which DNS is served."),
		captured:     gauge("portolan_dns_pods_captured", "Pods whose capture of port 53 is kept alive."),
	}
}

func newOutcomes(queries *prometheus.CounterVec, transport string) outcomes {
	o := outcomes{}
	for _, outcome := range []responder.Outcome{
		responder.Dropped, responder.Forwarded, responder.Answered, responder.NoData,
		responder.NameError, responder.Refused, responder.Malformed, responder.Unsupported,
	} {
		o[outcome] = queries.WithLabelValues(transport, string(outcome))
	}
	return o
}
