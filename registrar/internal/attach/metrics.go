package attach

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// The outcomes of an ADD, the label of portolan_attach_adds_total.
const (
	outcomeMeshed   = "meshed"
	outcomeUnmeshed = "unmeshed"
	outcomeRefused  = "refused"
	outcomeNotReady = "not_ready"
	outcomeFailed   = "failed"
)

// metrics are totals and present numbers, never a label per pod (XDS-76).
type metrics struct {
	adds      *prometheus.CounterVec
	proof     prometheus.Histogram
	detached  prometheus.Counter
	unknown   prometheus.Counter
	recovered prometheus.Counter
}

func (x *metrics) register(reg prometheus.Registerer, m *Manager) error {
	x.adds = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "portolan_attach_adds_total", Help: "ADDs by outcome: meshed, unmeshed, refused (bad annotation or argument), not_ready (try again), failed.",
	}, []string{"outcome"})
	x.proof = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "portolan_attach_proof_seconds", Help: "Time from the decision to the last proof of an ADD.",
		Buckets: prometheus.ExponentialBuckets(0.002, 2, 12),
	})
	x.detached = prometheus.NewCounter(prometheus.CounterOpts{Name: "portolan_attach_detached_total", Help: "Attachments that were taken down, by DEL, GC, the spool or a sweep."})
	x.unknown = prometheus.NewCounter(prometheus.CounterOpts{Name: "portolan_attach_unknown_annotations_total", Help: "Annotation keys under the mesh's prefixes that nothing reads."})
	x.recovered = prometheus.NewCounter(prometheus.CounterOpts{Name: "portolan_attach_recovered_total", Help: "Running pods taken in without an ADD: lost records and pods that had started unmeshed."})
	if reg == nil {
		return nil
	}
	attached := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_attach_attachments", Help: "Pods attached to this node."}, func() float64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		return float64(len(m.pods))
	})
	missed := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "portolan_attach_missed", Help: "Running pods that should be meshed and are not."}, func() float64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		return float64(len(m.missed))
	})
	for _, c := range []prometheus.Collector{x.adds, x.proof, x.detached, x.unknown, x.recovered, attached, missed} {
		if err := reg.Register(c); err != nil {
			return fmt.Errorf("register attach metrics: %w", err)
		}
	}
	return nil
}

// outcome names what became of an ADD.
func outcome(meshed bool, err error) string {
	switch {
	case err == nil && meshed:
		return outcomeMeshed
	case err == nil:
		return outcomeUnmeshed
	}
	switch KindOf(err) {
	case BadInput:
		return outcomeRefused
	case NotReady:
		return outcomeNotReady
	case NotFound, Internal:
	}
	return outcomeFailed
}
