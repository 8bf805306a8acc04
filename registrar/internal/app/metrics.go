package app

import "github.com/prometheus/client_golang/prometheus"

// registerGauges adds the numbers that no part registers by itself.
func (d *daemon) registerGauges() error {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	for _, c := range []prometheus.Collector{
		gauge("portolan_registry_endpoints", "Records of the registry.", func() float64 { return float64(d.backend.Stats().Records) }),
		gauge("portolan_registry_unsaved", "Changes of the registry that are not on disk yet.", func() float64 { return float64(d.backend.Stats().Unsaved) }),
		gauge("portolan_registry_failed_writes", "Writes of the registry that failed since the start.", func() float64 { return float64(d.backend.Stats().FailedWrites) }),
		gauge("portolan_services", "Services that are known.", func() float64 { return float64(d.publisher.Count()) }),
		gauge("portolan_unknown_names", "Names that lead nowhere and are remembered.", func() float64 { return float64(d.publisher.Asked()) }),
		gauge("portolan_contested_addresses", "Addresses that pods of several nodes claim; one of them has it.", func() float64 { return float64(d.publisher.Contested()) }),
		gauge("portolan_ready", "1 while a pod could be added.", func() float64 {
			if d.missing() == "" {
				return 1
			}
			return 0
		}),
	} {
		if err := d.metrics.Register(c); err != nil {
			return err
		}
	}
	return nil
}
