package readiness

import (
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// reportInterval is the least time between two notices that change nothing for
// traffic, misbound ports and read errors, and between two dumps of a table to
// find them.
const reportInterval = time.Second

// notQueued is the index of a pod that is polled or forgotten.
const notQueued = -1

// pod is one watched attachment.
type pod struct {
	key  model.AttachmentKey
	spec Spec
	box  *mailbox
	// expected are the ports that listen when all is well, lookup those that are
	// asked for.
	expected, lookup []uint16

	// Guarded by Watcher.mu.
	due    time.Time
	index  int  // in the queue, or notQueued
	kicked bool // poll again as soon as the present poll is over
	gone   bool

	// mu guards the rest; it is held while the table is read.
	mu    sync.Mutex
	table Table // nil when closed, or to be opened again
	// closed: the namespace must not be opened again.
	closed   bool
	schedule schedule
	dampers  map[uint16]*damper
	misbound []Misbound // of the last dump
	dumpAt   time.Time  // when the table may be dumped again
	last     State
	reported time.Time // when last was put in the mailbox; zero before the first
}

// newPod returns a pod to be polled at once. It owns table.
func newPod(key model.AttachmentKey, spec Spec, table Table, fn func(State)) *pod {
	spec.Ports = slices.Clone(spec.Ports)
	slices.Sort(spec.Ports)
	spec.Ports = slices.Compact(spec.Ports)
	now := time.Now()
	p := &pod{
		key: key, spec: spec, box: newMailbox(fn),
		expected: spec.expected(), lookup: Spec{Ports: spec.Ports, Inbound: true}.expected(),
		due: now, index: notQueued,
		table: table, schedule: newSchedule(now), dampers: map[uint16]*damper{},
	}
	for _, port := range p.lookup {
		p.dampers[port] = &damper{}
	}
	return p
}

// poll reads the table once and returns the state to tell, if there is news, and
// when to poll next.
func (p *pod) poll(w *Watcher, now time.Time) (news *State, next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, now
	}
	begin := time.Now()
	state, err := p.look(w, now)
	cost := time.Since(begin)
	w.metrics.polled(cost, err)
	if err != nil {
		p.closeTable(w.log)
		state = p.last
		state.Err = err
	}
	first := p.reported.IsZero()
	urgent := first || !state.sameListeners(p.last)
	if urgent && !first {
		p.schedule.changed(now)
	}
	if urgent || !state.Equal(p.last) && now.Sub(p.reported) >= reportInterval {
		if err != nil && p.last.Err == nil {
			w.log.Warn("cannot read a pod's listen table; its last state stays", "attachment", p.key.String(), "error", err)
		}
		p.last, p.reported = state, now
		news = &state
	}
	return news, p.schedule.next(now, cost)
}

// look asks for the pod's listeners and passes the answer through the dampers. The
// whole table, which costs more the more pods there are, is dumped only while
// something is missing, to find what is bound wrongly.
func (p *pod) look(w *Watcher, now time.Time) (State, error) {
	if err := p.open(w); err != nil {
		return State{}, err
	}
	found, err := p.table.Lookup(p.lookup)
	if err != nil {
		return State{}, err
	}
	seen := observe(found, p.spec.Ports)
	// Something else on 127.0.0.1:15008 hides the mesh's listener from a look-up.
	hidden := found.Listens(inboundPort) && !seen[inboundPort]
	if missing := !seen.has(p.expected); hidden || missing && !now.Before(p.dumpAt) {
		dump, err := p.table.Read()
		if err != nil {
			return State{}, err
		}
		// A dump of a table that changes may miss a socket (listen.Table.Read), so it
		// only adds to what was looked up.
		seen.add(observe(dump, p.spec.Ports))
		p.misbound, p.dumpAt = misbound(dump, p.spec.Ports), now.Add(reportInterval)
	}
	return p.state(seen, now), nil
}

// state is what to tell of what is seen.
func (p *pod) state(seen observation, now time.Time) State {
	damped := func(port uint16) bool { return p.dampers[port].update(seen[port], now) }
	s := State{Inbound: damped(inboundPort), OutboundHTTP: damped(outboundHTTPPort), OutboundTCP: damped(outboundTCPPort)}
	for _, port := range p.spec.Ports {
		if damped(port) {
			s.Listening = append(s.Listening, port)
		}
	}
	for _, m := range p.misbound {
		if !seen[m.Port] {
			s.Misbound = append(s.Misbound, m)
		}
	}
	return s
}

// open opens the table again after an error.
func (p *pod) open(w *Watcher) (err error) {
	if p.table == nil {
		p.table, err = w.cfg.Open(p.spec.Netns)
	}
	return err
}

// close lets the namespace go for good.
func (p *pod) close(log *slog.Logger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.closeTable(log)
}

func (p *pod) closeTable(log *slog.Logger) {
	if p.table == nil {
		return
	}
	if err := p.table.Close(); err != nil {
		log.Warn("cannot close a pod's listen table; its network namespace may stay", "attachment", p.key.String(), "error", err)
	}
	p.table = nil
}
