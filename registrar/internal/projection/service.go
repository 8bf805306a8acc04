package projection

import (
	"net/netip"
	"slices"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// service is the state of one service, with or without endpoints.
type service struct {
	key model.ServiceKey
	// flatName is the one-label spelling, "" if the namespace is not flat; longName the
	// two-label one. Both with the domain.
	flatName, longName string

	// records are the attached ones. They are in order of address unless unsorted.
	records  []*record
	unsorted bool
	// naming counts all records that name the service, attached or not.
	naming   int
	profiles map[string]*profile

	// accounts are the SPIFFE IDs that a pod of the service ever had, sorted. They
	// stay while the service is known, so that a pod that goes changes no cluster (I4).
	accounts []string
	// lastIdentity is the identity last added to accounts: most pods have the same.
	lastIdentity model.Identity

	// known: the service is in the catalogue. The fields below have a meaning then.
	known bool
	// virgin: it became known in the settling that is under way, so nothing of it can
	// be with Envoy yet.
	virgin bool
	// ports and def are the table: the advertised union and the default port, as of the
	// last settling with endpoints.
	ports []port.Port
	def   port.Port
	// bare is the port that the cluster named by the service's bare name stands for, as
	// Envoy has it or is being told. Number 0: there is no such cluster, and a portless
	// request is refused.
	bare port.Port
	// flat: the clusters carry the flat name.
	flat bool
	// refuseBare: while Splitting, the bare name is refused instead of led to bare.
	refuseBare bool
	step       Step
	token      uint64
	// retired are cluster names that Envoy must not keep (I2), sorted.
	retired []string
	// idleSince is when the last endpoint went; zero while there is one.
	idleSince time.Time
	// overdue: it is to be forgotten as soon as it has settled.
	overdue bool

	// touched are the ports whose endpoint sets may differ since the last Change.
	touched portSet
}

// bareName returns the name that the service's clusters carry: F of contract 2.
func (s *service) bareName() string {
	if s.flat {
		return s.flatName
	}
	return s.longName
}

// wanted is what the bare cluster should stand for: the default port, or nothing
// if that is not an HTTP port.
func (s *service) wanted() port.Port {
	if s.def.Protocol.Class() != port.ClassHTTP {
		return port.Port{}
	}
	return s.def
}

// protocol returns the decided protocol of an advertised port.
func (s *service) protocol(number uint16) (port.Protocol, bool) {
	i, ok := slices.BinarySearchFunc(s.ports, number, func(p port.Port, n uint16) int { return int(p.Number) - int(n) })
	if !ok {
		return port.Unknown, false
	}
	return s.ports[i].Protocol, true
}

// serves says whether the service has a port of this wire class.
func (s *service) serves(number uint16, class port.Class) bool {
	p, ok := s.protocol(number)
	return ok && p.Class() == class
}

// intern returns the profile for these ports, the existing one if there is one. It is
// not counted before attach.
func (s *service) intern(buf []byte, def uint16, ports []model.PortStatus) *profile {
	if p, ok := s.profiles[string(buf)]; ok {
		return p
	}
	return newProfile(string(buf), def, ports)
}

// hold counts one pod more for p and returns the interned equal of p.
func (s *service) hold(p *profile) *profile {
	if known, ok := s.profiles[p.key]; ok {
		p = known
	} else {
		if s.profiles == nil {
			s.profiles = map[string]*profile{}
		}
		s.profiles[p.key] = p
	}
	p.pods++
	return p
}

// drop counts one pod less for p.
func (s *service) drop(p *profile) {
	p.pods--
	if p.pods == 0 {
		delete(s.profiles, p.key)
	}
}

// attach makes r one of the service's endpoints. sorted keeps the order at once;
// without it the order is made when it is needed, which suits a first sync.
func (s *service) attach(r *record, sorted bool) {
	r.profile = s.hold(r.profile)
	r.attached = true
	s.touched.addAll(r.profile)
	s.idleSince, s.overdue = time.Time{}, false
	if !sorted || s.unsorted {
		s.unsorted = true
		s.records = append(s.records, r)
		return
	}
	i, _ := s.search(r.addr)
	s.records = slices.Insert(s.records, i, r)
}

// detach is the reverse of attach.
func (s *service) detach(r *record, now time.Time) {
	s.sort()
	if i, ok := s.search(r.addr); ok {
		s.records = slices.Delete(s.records, i, i+1)
	}
	s.touched.addAll(r.profile)
	s.drop(r.profile)
	r.attached = false
	if len(s.records) == 0 {
		s.records = nil
		s.idleSince = now
	}
}

// search finds an address among the sorted records; attached records never share one.
func (s *service) search(a netip.Addr) (int, bool) {
	return slices.BinarySearchFunc(s.records, a, func(r *record, a netip.Addr) int { return r.addr.Compare(a) })
}

// sort brings the records into the order of their addresses.
func (s *service) sort() {
	if s.unsorted {
		slices.SortFunc(s.records, func(a, b *record) int { return a.addr.Compare(b.addr) })
		s.unsorted = false
	}
}

// pin adds the account of a pod and reports whether it is new.
func (s *service) pin(id model.Identity) bool {
	if id == s.lastIdentity {
		return false
	}
	s.lastIdentity = id
	return insert(&s.accounts, id.SPIFFE())
}

// insert puts v into a sorted list and reports whether it was not there.
func insert(list *[]string, v string) bool {
	i, found := slices.BinarySearch(*list, v)
	if !found {
		*list = slices.Insert(*list, i, v)
	}
	return !found
}

// refresh brings the table up to date with the records. A service without endpoints
// keeps the one it had. shape: the table differs; clusters: some cluster's bytes do.
func (s *service) refresh() (shape, clusters bool) {
	if len(s.records) == 0 {
		return false, false
	}
	d := decide(s.profiles)
	if d.def == s.def && slices.Equal(d.ports, s.ports) {
		return false, false
	}
	for _, p := range d.ports {
		if old, ok := s.protocol(p.Number); ok && old != p.Protocol {
			clusters = true
			s.touched.add(p.Number)
		}
	}
	s.ports, s.def = d.ports, d.def
	// The bare cluster follows its port's protocol as long as it is an HTTP one.
	if p, ok := s.protocol(s.bare.Number); ok && p.Class() == port.ClassHTTP {
		s.bare.Protocol = p
	}
	return true, clusters
}
