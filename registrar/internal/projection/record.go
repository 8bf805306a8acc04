package projection

import (
	"fmt"
	"net/netip"
	"time"
	"unique"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// record is what is kept of one pod: only what a view needs, with everything that
// many pods have in common interned. It is the unit of memory (about 300 bytes with
// its place in the maps), so fields are added with care.
type record struct {
	uid        string
	generation uint64
	since      int64 // unix nanoseconds; of two records with one address the later owns it
	addr       netip.Addr
	service    *service
	// profile has the ports and their health; nil for a pure client.
	profile  *profile
	metadata map[string]string
	locality unique.Handle[model.Locality]
	weight   uint32
	// attached: the record counts for its service. A pure client does not, nor does a
	// record whose address belongs to a newer one.
	attached bool
	// sync is the Engine's sync in which the record was last seen.
	sync uint32
}

// validateEndpoint refuses a record that cannot be projected: a fault of its writer.
func validateEndpoint(ep model.Endpoint) error {
	switch {
	case ep.UID == "":
		return fmt.Errorf("it has no UID")
	case !authority.ValidLabel(ep.Service.Name) || !authority.ValidLabel(ep.Service.Namespace):
		return fmt.Errorf("service %q is not two DNS labels", ep.Service)
	case ep.Identity.TrustDomain == "" || ep.Identity.Account == "":
		return fmt.Errorf("identity %q is incomplete", ep.Identity.SPIFFE())
	case ep.Identity.Namespace != ep.Service.Namespace:
		// Pinning it would let a workload of one namespace answer for another's service.
		return fmt.Errorf("identity %q is not of the service's namespace %q", ep.Identity.SPIFFE(), ep.Service.Namespace)
	case len(ep.Addresses) == 0 || !ep.Addresses[0].IsValid() || ep.Addresses[0].Zone() != "":
		return fmt.Errorf("it has no usable address")
	case ep.Weight < 1 || ep.Weight > 65535:
		return fmt.Errorf("weight %d is not in 1-65535", ep.Weight)
	}
	hasDefault := len(ep.Ports) == 0
	for i, p := range ep.Ports {
		if p.Number == 0 || i > 0 && ep.Ports[i-1].Number >= p.Number {
			return fmt.Errorf("ports are not ascending from 1 at %d", p.Number)
		}
		hasDefault = hasDefault || p.Number == ep.Default
	}
	if !hasDefault {
		return fmt.Errorf("default port %d is not among its ports", ep.Default)
	}
	return nil
}

// outranks says whether r owns the address that both have: the pod that was added
// later, whatever order their records came in (XDS-12). The UID breaks ties.
func (r *record) outranks(o *record) bool {
	if r.since != o.since {
		return r.since > o.since
	}
	return r.uid > o.uid
}

// addressTable says which record owns an address. An address has one owner; the
// others that claim it, dead pods whose removal is on its way, are shadowed.
type addressTable struct {
	owner  map[netip.Addr]*record
	shadow map[netip.Addr][]*record
}

// claim gives r its address, if nobody outranks it. lost is the former owner.
func (t *addressTable) claim(r *record) (owns bool, lost *record) {
	cur := t.owner[r.addr]
	if cur != nil && !r.outranks(cur) {
		t.shadow[r.addr] = append(t.shadow[r.addr], r)
		return false, nil
	}
	t.owner[r.addr] = r
	if cur != nil {
		t.shadow[r.addr] = append(t.shadow[r.addr], cur)
	}
	return true, cur
}

// release takes r out. next is the record that owns the address now, if r owned it.
func (t *addressTable) release(r *record) (next *record) {
	rest := t.shadow[r.addr]
	if t.owner[r.addr] != r {
		for i := range rest {
			if rest[i] == r {
				rest[i] = rest[len(rest)-1]
				t.setShadow(r.addr, rest[:len(rest)-1])
				break
			}
		}
		return nil
	}
	if len(rest) == 0 {
		delete(t.owner, r.addr)
		return nil
	}
	best := 0
	for i := range rest {
		if rest[i].outranks(rest[best]) {
			best = i
		}
	}
	next = rest[best]
	rest[best] = rest[len(rest)-1]
	t.setShadow(r.addr, rest[:len(rest)-1])
	t.owner[r.addr] = next
	return next
}

func (t *addressTable) setShadow(a netip.Addr, rest []*record) {
	if len(rest) == 0 {
		delete(t.shadow, a)
		return
	}
	t.shadow[a] = rest
}

// graveyard remembers deleted records for a while, so that an update which was on
// its way when the record was deleted does not bring it back (XDS-47).
type graveyard struct {
	generation map[string]uint64
	order      []grave // by time of death
}

type grave struct {
	uid        string
	generation uint64
	died       time.Time
}

// bury remembers that uid is dead up to generation.
func (g *graveyard) bury(uid string, generation uint64, now time.Time) {
	if known, ok := g.generation[uid]; ok && known >= generation {
		return
	}
	g.generation[uid] = generation
	g.order = append(g.order, grave{uid: uid, generation: generation, died: now})
}

// dead says whether a record of this generation must stay dead.
func (g *graveyard) dead(uid string, generation uint64) bool {
	known, ok := g.generation[uid]
	return ok && generation <= known
}

// expire forgets what died before limit and returns when the next one died.
func (g *graveyard) expire(limit time.Time) (next time.Time) {
	n := 0
	for n < len(g.order) && !g.order[n].died.After(limit) {
		if d := g.order[n]; g.generation[d.uid] == d.generation {
			delete(g.generation, d.uid)
		}
		n++
	}
	g.order = append([]grave(nil), g.order[n:]...)
	if len(g.order) == 0 {
		return time.Time{}
	}
	return g.order[0].died
}
