package projection

import (
	"fmt"
	"net/netip"
	"slices"
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
	since      int64 // unix nanoseconds; see outranks
	addr       netip.Addr
	service    *service
	// profile has the ports and their health; nil for a pure client.
	profile  *profile
	metadata map[string]string
	locality unique.Handle[model.Locality]
	// node is the pod's, which its registrar alone may write records of.
	node   unique.Handle[string]
	weight uint32
	// local: the pod is of this node.
	local bool
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

// outranks says whether r owns the address that both have: a pod of this node, of which
// this registrar itself knows that it lives; else the pod that was added later, whatever
// order their records came in (XDS-12). The UID breaks ties.
//
// What other nodes say is their word alone, since too: a node that is taken over can
// claim any address, and nobody but the pod's own node knows better. There the pod keeps
// its address. An address that is used again is nobody's by then on the node that it was
// used on: DEL withdraws the record before the address is free. Rejected: whoever came
// first keeps the address, which depends on the order of events and lets a node claim the
// addresses of pods that are still to come; the nodes' pod CIDRs, which many networks do
// not keep to and which needs the right to read every node.
func (r *record) outranks(o *record) bool {
	if r.local != o.local {
		return r.local
	}
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
	// contested are the addresses that pods of several nodes claimed when somebody asked
	// last; changed are those to look at when somebody asks again. A claim that is taken
	// back and made again in between is no news.
	contested, changed map[netip.Addr]struct{}
}

// Contest is an address that pods of several nodes claim: one was used again before the
// former pod's record went, or a node claims what is not its own. Owner has it; Other gets
// no requests while the owner's record is there.
type Contest struct {
	Addr         netip.Addr
	Owner, Other Claim
}

// Claim is one who claims an address.
type Claim struct {
	UID     string
	Node    string
	Service model.ServiceKey
}

func (r *record) claim() Claim {
	return Claim{UID: r.uid, Node: r.node.Value(), Service: r.service.key}
}

// rival is one of another node than the owner's that claims the address; nil if there is
// none.
func (t *addressTable) rival(a netip.Addr) *record {
	for _, r := range t.shadow[a] {
		if r.node != t.owner[a].node {
			return r
		}
	}
	return nil
}

// contest looks whether the address is claimed from several nodes now.
func (t *addressTable) contest(a netip.Addr) {
	_, was := t.contested[a]
	if is := t.rival(a) != nil; is != was {
		t.changed[a] = struct{}{}
	}
}

// takeContests returns the addresses that are contested and were not when it was called
// before, in their order.
func (t *addressTable) takeContests() []Contest {
	var news []Contest
	for a := range t.changed {
		r := t.rival(a)
		_, was := t.contested[a]
		switch {
		case r == nil:
			delete(t.contested, a)
		case !was:
			t.contested[a] = struct{}{}
			news = append(news, Contest{Addr: a, Owner: t.owner[a].claim(), Other: r.claim()})
		}
	}
	clear(t.changed)
	slices.SortFunc(news, func(a, b Contest) int { return a.Addr.Compare(b.Addr) })
	return news
}

// claim gives r its address, if nobody outranks it. lost is the former owner.
func (t *addressTable) claim(r *record) (owns bool, lost *record) {
	cur := t.owner[r.addr]
	if cur == nil {
		t.owner[r.addr] = r
		return true, nil
	}
	defer t.contest(r.addr)
	if !r.outranks(cur) {
		t.shadow[r.addr] = append(t.shadow[r.addr], r)
		return false, nil
	}
	t.owner[r.addr] = r
	t.shadow[r.addr] = append(t.shadow[r.addr], cur)
	return true, cur
}

// release takes r out. next is the record that owns the address now, if r owned it.
func (t *addressTable) release(r *record) (next *record) {
	rest := t.shadow[r.addr]
	if len(rest) > 0 {
		defer t.contest(r.addr)
	}
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
