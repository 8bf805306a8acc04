package projection

import (
	"slices"

	"github.com/portolan-mesh/portolan/api/port"
)

// vote is what the pods of a service say about one port.
type vote struct {
	number uint16
	// pods and healthy count the endpoints, and the HEALTHY ones, that advertise it.
	pods, healthy int
	// declared and declaredHealthy count those that declare it their default.
	declared, declaredHealthy int
	// by and byHealthy count them by protocol.
	by, byHealthy [port.TCP + 1]int
}

// decision is the table of a service while it has endpoints.
type decision struct {
	// ports is the advertised union, ascending, with the protocol decided for each.
	ports []port.Port
	// def is the default port.
	def port.Port
	// votes has one entry per port, in the order of ports.
	votes []vote
}

// decide applies the rules of contract 2 to what the pods declare. An endpoint is
// HEALTHY if any of its ports is. There is at least one profile.
func decide(profiles map[string]*profile) decision {
	var votes []vote
	anyHealthy := false
	for _, p := range profiles {
		anyHealthy = anyHealthy || p.healthy
		for _, s := range p.ports {
			i, found := slices.BinarySearchFunc(votes, s.Number, func(v vote, n uint16) int { return int(v.number) - int(n) })
			if !found {
				votes = slices.Insert(votes, i, vote{number: s.Number})
			}
			votes[i].count(p, s.Protocol)
		}
	}
	d := decision{votes: votes, ports: make([]port.Port, len(votes))}
	best := -1
	for i := range votes {
		d.ports[i] = port.Port{Number: votes[i].number, Protocol: votes[i].protocol()}
		if votes[i].defaultScore(anyHealthy).declared > 0 && (best < 0 || votes[i].beats(&votes[best], anyHealthy)) {
			best = i
		}
	}
	d.def = d.ports[best]
	return d
}

// count adds the pods of profile p, whose port this is.
func (v *vote) count(p *profile, protocol port.Protocol) {
	if protocol > port.TCP {
		protocol = port.Unknown
	}
	v.pods += p.pods
	v.by[protocol] += p.pods
	if p.healthy {
		v.healthy += p.pods
		v.byHealthy[protocol] += p.pods
	}
	if p.def == v.number {
		v.declared += p.pods
		if p.healthy {
			v.declaredHealthy += p.pods
		}
	}
}

// score is what decides the default port: how many advertise it, then how many
// declare it.
type score struct{ advertise, declared int }

// defaultScore counts HEALTHY endpoints only, or all while there is no HEALTHY one.
func (v *vote) defaultScore(anyHealthy bool) score {
	if anyHealthy {
		return score{advertise: v.healthy, declared: v.declaredHealthy}
	}
	return score{advertise: v.pods, declared: v.declared}
}

// beats says whether v goes before o as the default port. Votes are compared in
// ascending order of their numbers, so a tie keeps the lower one.
func (v *vote) beats(o *vote, anyHealthy bool) bool {
	a, b := v.defaultScore(anyHealthy), o.defaultScore(anyHealthy)
	if a.advertise != b.advertise {
		return a.advertise > b.advertise
	}
	return a.declared > b.declared
}

// protocol decides what the port speaks, the same way as the default: by the HEALTHY
// endpoints that advertise it, or all while none of those is HEALTHY. First the wire
// class, so that the most endpoints stay in; then the protocol within the class; ties
// go to the lower in the order http, h2, tcp. A protocol unknown to this version has
// no vote: its endpoints are left out, and the port is unroutable only if nobody
// advertises it with a known one (contract 3, MESH-8).
func (v *vote) protocol() port.Protocol {
	by := v.byHealthy
	if by[port.HTTP]+by[port.H2]+by[port.TCP] == 0 {
		by = v.by
	}
	web, tcp := by[port.HTTP]+by[port.H2], by[port.TCP]
	switch {
	case web == 0 && tcp == 0:
		return port.Unknown
	case tcp > web:
		return port.TCP
	case by[port.H2] > by[port.HTTP]:
		return port.H2
	}
	return port.HTTP
}

// leftOut counts the endpoints that advertise the port in another wire class than
// the decided one, and those among them whose protocol is unknown.
func (v *vote) leftOut(decided port.Protocol) (other, unknown int) {
	for p := port.HTTP; p <= port.TCP; p++ {
		if p.Class() != decided.Class() {
			other += v.by[p]
		}
	}
	return other, v.by[port.Unknown]
}
