package installer

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of an Installer.
type metrics struct {
	chained                                               prometheus.Gauge
	confWrites, reinsertions, copies, errors, watchErrors prometheus.Counter
}

// register makes the metrics and hands them to reg unless that is nil.
func (x *metrics) register(reg prometheus.Registerer) error {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	x.chained = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "portolan_cni_chained", Help: "1 if the network configuration that the runtime loads has the plugin in its chain.",
	})
	x.confWrites = counter("portolan_cni_conf_writes_total", "Network configurations written.")
	x.reinsertions = counter("portolan_cni_reinsertions_total", "Times that the plugin's entry was gone and put back.")
	x.copies = counter("portolan_cni_binary_copies_total", "Times that the plugin's binary was put in place.")
	x.errors = counter("portolan_cni_install_errors_total", "Attempts to install that failed.")
	x.watchErrors = counter("portolan_cni_watch_errors_total", "Failures of the watch of the CNI folders; they are polled then.")
	if reg == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{x.chained, x.confWrites, x.reinsertions, x.copies, x.errors, x.watchErrors} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register installer metrics: %w", err)
		}
	}
	return nil
}
