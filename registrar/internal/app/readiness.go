package app

import (
	"log/slog"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/readiness"
)

// listenTables implements attach.Readiness over the readiness watcher.
type listenTables struct {
	*readiness.Watcher
	log *slog.Logger
}

// openTable opens the listen table of a pod's network namespace.
func openTable(netns string) (readiness.Table, error) { return listen.Open(netns) }

// Watch implements attach.Readiness. A table that cannot be read says nothing:
// what was seen last stands (contract 4.8).
func (l listenTables) Watch(pod model.Pod, fn func(attach.PortState)) error {
	spec := readiness.Spec{Netns: pod.Netns, Inbound: len(pod.Ports) > 0}
	for _, p := range pod.Ports {
		spec.Ports = append(spec.Ports, p.Number)
	}
	return l.Watcher.Watch(pod.Key, spec, func(s readiness.State) {
		if s.Err != nil {
			l.log.Warn("listen table of a pod cannot be read", "attachment", pod.Key.String(), "error", s.Err)
			return
		}
		out := attach.PortState{
			Inbound: s.Inbound, OutboundHTTP: s.OutboundHTTP, OutboundTCP: s.OutboundTCP, Listening: s.Listening,
		}
		for _, m := range s.Misbound {
			out.Misbound = append(out.Misbound, m.String())
		}
		fn(out)
	})
}
