package attach

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// silentAfter is how long nobody may listen on an advertised port of a Ready pod before
	// the pod's owner is told: an application may open a port some time after it is Ready.
	silentAfter = time.Minute
	// together is how much sooner a port is told of with another one: ports that one fault
	// closes are not seen to close at one time.
	together = time.Second
)

// silentPort is an advertised port of a Ready pod on which nobody listens.
type silentPort struct {
	since time.Time
	told  bool
}

// silentPod is a pod that has such ports, as it is now.
type silentPod struct {
	workload *model.Workload
	// has and def are the ports that the pod has, and its default port.
	has []port.Port
	def uint16
	// ports are ascending.
	ports    []uint16
	misbound []string
}

// silences are the ports on which nobody listens, by the UID of their pod's object.
type silences map[string]map[uint16]silentPort

// wakeSilence has watchSilence look. It does not wait.
func (m *Manager) wakeSilence() {
	select {
	case m.changed <- struct{}{}:
	default: // it looks already
	}
}

// watchSilence tells the owners of Ready pods of ports that they advertise and on which
// nobody listens, until ctx ends.
func (m *Manager) watchSilence(ctx context.Context) {
	known := silences{}
	timer := time.NewTimer(silentAfter)
	defer timer.Stop()
	for {
		if wait, ok := m.lookForSilence(known); ok {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-m.changed:
		case <-timer.C:
		}
	}
}

// lookForSilence brings known up to date and tells of what has lasted. It returns when to
// look next if nothing changes; ok is false when there is nothing to wait for.
func (m *Manager) lookForSilence(known silences) (wait time.Duration, ok bool) {
	pods, now := m.silentPods(), m.cfg.Now()
	for uid := range known {
		if _, still := pods[uid]; !still {
			delete(known, uid)
			m.note(model.Workload{ObjectUID: uid}, sideListeners)
		}
	}
	for uid, pod := range pods {
		if known[uid] == nil {
			known[uid] = map[uint16]silentPort{}
		}
		left, waits := m.tellSilence(pod, known[uid], now)
		if waits && (!ok || left < wait) {
			wait, ok = left, true
		}
	}
	return wait, ok
}

// tellSilence is lookForSilence of one pod.
func (m *Manager) tellSilence(pod silentPod, ports map[uint16]silentPort, now time.Time) (wait time.Duration, ok bool) {
	maps.DeleteFunc(ports, func(p uint16, _ silentPort) bool { return !slices.Contains(pod.ports, p) })
	due := false
	for _, p := range pod.ports {
		s, was := ports[p]
		if !was {
			s.since = now
		}
		ports[p] = s
		due = due || !s.told && now.Sub(s.since) >= silentAfter
	}
	var told []uint16
	for _, p := range pod.ports {
		s := ports[p]
		lasted := now.Sub(s.since)
		s.told = s.told || due && lasted >= silentAfter-together
		ports[p] = s
		switch left := silentAfter - lasted; {
		case s.told:
			told = append(told, p)
		case !ok || left < wait:
			wait, ok = left, true
		}
	}
	switch {
	case len(told) == 0:
		m.note(*pod.workload, sideListeners)
	case due:
		m.judge(*pod.workload, sideListeners, pod.problem(told))
	default: // of fewer ports than was told, which is no news
		m.note(*pod.workload, sideListeners, pod.problem(told))
	}
	return wait, ok
}

// silentPods returns the Ready pods on whose ports nobody listens, by the UID of their
// object. Of a pod that has two attachments, as when its sandbox was made anew, a port
// counts on which nobody listens in either. Without an orchestrator there are none: nobody
// says when a pod should listen, and there is no owner to tell.
func (m *Manager) silentPods() map[string]silentPod {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]silentPod{}
	for _, a := range m.pods {
		if a.workload == nil || a.leaving {
			continue
		}
		uid, ports := a.workload.ObjectUID, a.silentPorts()
		if other, ok := out[uid]; ok {
			ports = slices.DeleteFunc(ports, func(p uint16) bool { return !slices.Contains(other.ports, p) })
		}
		out[uid] = silentPod{workload: a.workload, has: a.pod.Ports, def: a.pod.Default, ports: ports, misbound: a.state.Misbound}
	}
	maps.DeleteFunc(out, func(_ string, p silentPod) bool { return len(p.ports) == 0 })
	return out
}

// silentPorts returns the ports that would be called if somebody listened, ascending. The
// caller holds mu.
func (a *attachment) silentPorts() []uint16 {
	if !a.proven || a.unread || a.health() != model.Healthy || a.ending() != model.Living {
		return nil
	}
	var out []uint16
	for _, p := range a.pod.Ports {
		if !slices.Contains(a.state.Listening, p.Number) && !slices.Contains(a.unproven, p.Number) {
			out = append(out, p.Number)
		}
	}
	slices.Sort(out)
	return out
}

// problem says that nobody listens on ports, with the annotation that advertises them. What
// is seen instead comes last: a text that is too long loses its end.
func (p silentPod) problem(ports []uint16) Problem {
	numbers := make([]string, len(ports))
	for i, n := range ports {
		numbers[i] = fmt.Sprint(n)
	}
	what := "port " + numbers[0]
	if last := len(numbers) - 1; last > 0 {
		what = "ports " + strings.Join(numbers[:last], ", ") + " and " + numbers[last]
	}
	what = "nobody listens on " + what + " where the mesh delivers, so no request is sent there"
	var message string
	key := p.advertising(ports)
	value, set := p.workload.Annotations[key]
	switch {
	case !p.asAnnotated():
		message = fmt.Sprintf("the pod has the ports %s, not those that its annotations say now: %s; %sname in %s %s",
			annotation.Quote(portList(p.has)), what, listen, annotation.KeyPorts, onlyServed)
	case set:
		message = (&annotation.Error{Key: key, Value: value, Problem: what, Remedy: listen + "name there " + onlyServed}).Error()
	default:
		// A label asked for the mesh: the owner may never have heard of the annotation.
		message = fmt.Sprintf("the pod has no annotation of its ports, so it advertises %s: %s; %sname in %s %s",
			annotation.Quote(portList(p.has)), what, listen, annotation.KeyPorts, onlyServed)
	}
	if len(p.misbound) > 0 {
		message += "; somebody listens on " + strings.Join(p.misbound, ", ")
	}
	return Problem{Reason: reasonSilent, Message: message}
}

// The remedy for a port on which nobody listens, before and after the key to write to.
const (
	listen     = "listen on 127.0.0.1, 0.0.0.0 or dual-stack ::, or "
	onlyServed = "only ports that the pod serves, or \"none\""
)

// asAnnotated reports whether the pod has the ports that its annotations say now. A running
// pod keeps what it has when they are edited to what is not valid, or taken away.
func (p silentPod) asAnnotated() bool {
	says := maps.Clone(p.workload.Annotations)
	maps.DeleteFunc(says, func(key, _ string) bool { return key != annotation.KeyPort && key != annotation.KeyPorts })
	cfg, err := annotation.Parse(says)
	return err == nil && cfg.Default == p.def && slices.Equal(cfg.Ports, p.has)
}

// advertising returns the key of the annotation that advertises ports.
func (p silentPod) advertising(ports []uint16) string {
	_, single := p.workload.Annotations[annotation.KeyPort]
	_, list := p.workload.Annotations[annotation.KeyPorts]
	if single && (!list || slices.Equal(ports, []uint16{p.def})) {
		return annotation.KeyPort
	}
	return annotation.KeyPorts
}

// portList returns ports as the annotation spells them.
func portList(ports []port.Port) string {
	out := make([]string, len(ports))
	for i, p := range ports {
		out[i] = fmt.Sprint(p.Number)
		if p.Protocol != port.HTTP {
			out[i] += "=" + p.Protocol.String()
		}
	}
	return strings.Join(out, ",")
}
