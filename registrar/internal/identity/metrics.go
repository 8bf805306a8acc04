package identity

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of a Manager: totals only, never a label per identity.
type metrics struct {
	ok, refused, failed, reused prometheus.Counter
}

// register makes the metrics and hands them to reg unless that is nil.
func (x *metrics) register(reg prometheus.Registerer, m *Manager) error {
	signatures := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "portolan_identity_signatures_total",
		Help: "Requests to the signer by their result: ok, refused (useless to repeat) or error (the signer is away).",
	}, []string{"result"})
	x.ok, x.refused, x.failed = signatures.WithLabelValues("ok"), signatures.WithLabelValues("refused"), signatures.WithLabelValues("error")
	x.reused = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "portolan_identity_reused_total",
		Help: "Certificates taken from the store instead of being signed again.",
	})
	if reg == nil {
		return nil
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	for _, c := range []prometheus.Collector{
		signatures,
		x.reused,
		gauge("portolan_identity_svids", "Identities in use on this node.", func() float64 {
			m.mu.Lock()
			defer m.mu.Unlock()
			used := 0
			for _, e := range m.entries {
				if !e.lingers() {
					used++
				}
			}
			return float64(used)
		}),
		gauge("portolan_identity_roots", "Roots in the trust bundle.", func() float64 {
			return float64(len(m.Bundle().Roots))
		}),
		gauge("portolan_identity_soonest_expiry_timestamp_seconds", "Unix time when the first certificate in use expires; 0 without any.", func() float64 {
			t := m.soonestExpiry()
			if t.IsZero() {
				return 0
			}
			return float64(t.Unix())
		}),
	} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register identity metrics: %w", err)
		}
	}
	return nil
}

// signed counts one request to the signer.
func (x *metrics) signed(err error) {
	switch {
	case err == nil:
		x.ok.Inc()
	case errors.Is(err, ErrRefused):
		x.refused.Inc()
	default:
		x.failed.Inc()
	}
}
