package readiness

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
)

// The mesh's own ports in a pod's netns (contract 7).
const (
	inboundPort      = 15008
	outboundHTTPPort = 15001
	outboundTCPPort  = 15002
)

// Spec is what to watch of a pod.
type Spec struct {
	// Netns is the path of the pod's network namespace.
	Netns string
	// Ports are the ports that the pod serves.
	Ports []uint16
	// Inbound: the pod has an inbound listener. A pure client has none.
	Inbound bool
}

// expected are the ports that listen when all is well: no more than a look-up is
// needed then.
func (s Spec) expected() []uint16 {
	out := []uint16{outboundHTTPPort, outboundTCPPort}
	if s.Inbound {
		out = append(out, inboundPort)
	}
	return append(out, s.Ports...)
}

// State is what a pod's listen table says. It is a value that nobody changes.
type State struct {
	// Inbound: 15008 listens at every IPv4 address of the pod.
	Inbound bool
	// OutboundHTTP and OutboundTCP: 127.0.0.1:15001 and 127.0.0.1:15002 listen.
	OutboundHTTP, OutboundTCP bool
	// Listening are the pod's ports that the app hop reaches, ascending.
	Listening []uint16
	// Misbound are the pod's ports that listen only where the app hop does not
	// reach them, ascending by port.
	Misbound []Misbound
	// Err says why the table could not be read. The rest is then as it was last
	// seen, or empty when it was never read: whoever holds something better keeps
	// it (contract 4.8).
	Err error
}

// Misbound is a port that listens only where the mesh cannot reach it.
type Misbound struct {
	// Port is one of the pod's.
	Port uint16
	// Addrs are the addresses it listens at, ascending.
	Addrs []netip.Addr
}

// String returns the port and its addresses, for people.
func (m Misbound) String() string {
	addrs := make([]string, len(m.Addrs))
	for i, a := range m.Addrs {
		addrs[i] = a.String()
	}
	return fmt.Sprintf("%d (only on %s)", m.Port, strings.Join(addrs, ", "))
}

// Equal reports whether both say the same.
func (s State) Equal(o State) bool {
	return s.sameListeners(o) && errorText(s.Err) == errorText(o.Err) &&
		slices.EqualFunc(s.Misbound, o.Misbound, func(a, b Misbound) bool { return a.Port == b.Port && slices.Equal(a.Addrs, b.Addrs) })
}

// sameListeners compares what traffic depends on.
func (s State) sameListeners(o State) bool {
	return s.Inbound == o.Inbound && s.OutboundHTTP == o.OutboundHTTP && s.OutboundTCP == o.OutboundTCP && slices.Equal(s.Listening, o.Listening)
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// observation is the set of watched listeners that are there: the pod's ports that
// the app hop reaches, and the mesh's ports.
type observation map[uint16]bool

// observe looks for what a pod of these ports has.
func observe(s listen.Snapshot, ports []uint16) observation {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	out := observation{
		inboundPort:      s.Everywhere(inboundPort),
		outboundHTTPPort: s.Bound(netip.AddrPortFrom(loopback, outboundHTTPPort)),
		outboundTCPPort:  s.Bound(netip.AddrPortFrom(loopback, outboundTCPPort)),
	}
	for _, p := range ports {
		out[p] = s.Listens(p)
	}
	return out
}

// has reports whether all of the ports are there.
func (o observation) has(ports []uint16) bool {
	return !slices.ContainsFunc(ports, func(p uint16) bool { return !o[p] })
}

// add takes over what the other has.
func (o observation) add(other observation) {
	for p, there := range other {
		o[p] = o[p] || there
	}
}

// misbound lists the ports that are bound where the app hop does not get.
func misbound(s listen.Snapshot, ports []uint16) []Misbound {
	var out []Misbound
	for _, p := range ports {
		if addrs := s.OnlyOn(p); addrs != nil {
			out = append(out, Misbound{p, addrs})
		}
	}
	return out
}
