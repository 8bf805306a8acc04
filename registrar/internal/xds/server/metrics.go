package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// collector reads the cache's numbers when it is scraped. Labels are the type of
// resource and the service of a stream, never a name (XDS-76).
type collector struct {
	cache *cache.Cache

	held, streams, resources, subscriptions, pending       *prometheus.Desc
	responses, sent, acknowledged, rejected, gatesTimedOut *prometheus.Desc
}

var _ prometheus.Collector = (*collector)(nil)

func newCollector(c *cache.Cache) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("portolan_xds_"+name, help, labels, nil)
	}
	return &collector{
		cache:         c,
		held:          desc("held", "1 while no stream is answered because the content is not complete."),
		streams:       desc("streams", "Streams that are connected.", "service"),
		resources:     desc("resources", "Resources held for Envoy.", "type"),
		subscriptions: desc("subscriptions", "Names that streams subscribe to.", "type"),
		pending:       desc("pending_resources", "Resources to be sent to or acknowledged by a stream.", "type"),
		responses:     desc("responses_total", "Responses sent.", "type"),
		sent:          desc("sent_resources_total", "Resources and removals sent.", "type"),
		acknowledged:  desc("acknowledged_responses_total", "Responses that Envoy acknowledged.", "type"),
		rejected:      desc("rejected_responses_total", "Responses that Envoy rejected.", "type"),
		gatesTimedOut: desc("gate_timeouts_total", "Responses sent before what must come first was acknowledged.", "type"),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.held, c.streams, c.resources, c.subscriptions, c.pending,
		c.responses, c.sent, c.acknowledged, c.rejected, c.gatesTimedOut,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	m := c.cache.Metrics()
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	held := 0
	if m.Held {
		held = 1
	}
	gauge(c.held, held)
	for _, service := range cache.Services() {
		gauge(c.streams, m.Streams[service], service.String())
	}
	for _, kind := range cache.Kinds() {
		label := kind.String()
		gauge(c.resources, m.Gauges[kind].Held, label)
		gauge(c.subscriptions, m.Gauges[kind].Named, label)
		gauge(c.pending, m.Gauges[kind].Pending, label)
		n := m.Counters[kind]
		for d, total := range map[*prometheus.Desc]uint64{
			c.responses: n.Responses, c.sent: n.Resources, c.acknowledged: n.Acknowledged,
			c.rejected: n.Rejected, c.gatesTimedOut: n.GateTimeouts,
		} {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(total), label)
		}
	}
}
