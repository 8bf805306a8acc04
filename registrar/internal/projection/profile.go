package projection

import (
	"encoding/binary"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// profile is what a pod declares: its ports with their health, and its default. The
// pods of a service have few profiles between them, so it is interned per service,
// and every count over the pods is a sum over the profiles.
type profile struct {
	key   string
	def   uint16
	ports []model.PortStatus
	// healthy: at least one port is, which makes the endpoint HEALTHY.
	healthy bool
	// pods is how many records of the service have this profile.
	pods int
}

// profileKey writes the identity of a profile into buf.
func profileKey(buf []byte, def uint16, ports []model.PortStatus) []byte {
	buf = binary.BigEndian.AppendUint16(buf[:0], def)
	for _, p := range ports {
		buf = binary.BigEndian.AppendUint16(buf, p.Number)
		buf = append(buf, byte(p.Protocol), byte(p.Health))
	}
	return buf
}

// newProfile returns a profile that shares nothing with its argument.
func newProfile(key string, def uint16, ports []model.PortStatus) *profile {
	p := &profile{key: key, def: def, ports: append([]model.PortStatus(nil), ports...)}
	for _, s := range ports {
		p.healthy = p.healthy || s.Health == model.Healthy
	}
	return p
}

// status returns what the profile says about a port.
func (p *profile) status(number uint16) (model.PortStatus, bool) {
	for _, s := range p.ports {
		if s.Number == number {
			return s, true
		}
	}
	return model.PortStatus{}, false
}

// callable says whether a pod of this profile is in the set of a cluster of this
// port and wire class, and with what health: it lists the port, speaks the class, and
// the port is healthy or draining (contract 4.3).
func (p *profile) callable(number uint16, class port.Class) (model.Health, bool) {
	s, ok := p.status(number)
	if !ok || class == port.ClassNone || s.Protocol.Class() != class || s.Health == model.Unhealthy {
		return model.Unhealthy, false
	}
	return s.Health, true
}

// portSet is a small ascending set of port numbers.
type portSet []uint16

// add puts n in.
func (s *portSet) add(n uint16) {
	i := 0
	for i < len(*s) && (*s)[i] < n {
		i++
	}
	if i < len(*s) && (*s)[i] == n {
		return
	}
	*s = append(*s, 0)
	copy((*s)[i+1:], (*s)[i:])
	(*s)[i] = n
}

// addAll puts every port of p in; a nil profile has none.
func (s *portSet) addAll(p *profile) {
	if p == nil {
		return
	}
	for _, status := range p.ports {
		s.add(status.Number)
	}
}

// addChanged puts in the ports that the two profiles say different things about.
func (s *portSet) addChanged(a, b *profile) {
	if a == b {
		return
	}
	for _, x := range a.ports {
		if y, ok := b.status(x.Number); !ok || x != y {
			s.add(x.Number)
		}
	}
	for _, y := range b.ports {
		if _, ok := a.status(y.Number); !ok {
			s.add(y.Number)
		}
	}
}
