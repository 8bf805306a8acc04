package projection

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// minHostBits and maxHostBits bound the IPv4 range: /30 has two addresses, /8 has
	// sixteen million.
	minHostBits = 2
	maxHostBits = 24
)

// vipPool gives every service one virtual address per family (dataplane decision 8).
// Both families share the host part, the offset into the range, so one number is
// what is allocated. The first and the last offset of the range are never given: as
// network and broadcast address they would surprise tools.
//
// The wanted offset is a hash of the service's key; if another service holds or held
// it, the next free one is taken. What is guaranteed:
//
//   - an address belongs to one service, and a service keeps its own, also over a
//     restart (Entry) and over its absence, until the address is given away;
//   - a service whose wanted offset is free gets it, whatever else exists, so
//     without collisions the addresses are a function of the keys alone;
//   - services that appear between two reads of the Engine, as all do at the first
//     sync, are served in the order of their keys: their order of arrival does not
//     matter. Of two that collide at different times, the earlier keeps the offset;
//   - addresses never given before go first. One that a forgotten service had is
//     given again only when none is left, and only if it was released before the
//     time told by setReusable.
type vipPool struct {
	v4, v6 netip.Prefix
	base4  uint32
	size   uint32 // offsets 1..size may be given
	slots  map[uint32]vipSlot
	byKey  map[model.ServiceKey]uint32
	// reusable: what was released before it may be given again.
	reusable time.Time
}

// vipSlot is an offset that was given.
type vipSlot struct {
	key model.ServiceKey
	// released is when its service was forgotten; zero while it is known.
	released time.Time
}

// validateRanges checks the two ranges of virtual addresses.
func validateRanges(v4, v6 netip.Prefix) error {
	if !v4.IsValid() || !v4.Addr().Is4() {
		return fmt.Errorf("virtual IPv4 range %s is no IPv4 prefix; use one such as 198.18.0.0/15", v4)
	}
	bits := 32 - v4.Bits()
	if bits < minHostBits || bits > maxHostBits {
		return fmt.Errorf("virtual IPv4 range %s: the prefix length must be %d to %d", v4, 32-maxHostBits, 32-minHostBits)
	}
	if !v6.IsValid() || !v6.Addr().Is6() || v6.Addr().Is4In6() {
		return fmt.Errorf("virtual IPv6 range %s is no IPv6 prefix; use one such as fd70:6f72:746f::/64", v6)
	}
	if 128-v6.Bits() < bits {
		return fmt.Errorf("virtual IPv6 range %s is smaller than the IPv4 range %s", v6, v4)
	}
	for _, p := range []netip.Prefix{v4, v6} {
		if p != p.Masked() {
			return fmt.Errorf("virtual range %s has bits set behind its prefix; use %s", p, p.Masked())
		}
	}
	return nil
}

// newVIPPool returns an empty pool; the ranges were checked by validateRanges.
func newVIPPool(v4, v6 netip.Prefix) *vipPool {
	base := v4.Addr().As4()
	return &vipPool{
		v4: v4, v6: v6,
		base4: binary.BigEndian.Uint32(base[:]),
		size:  1<<(32-v4.Bits()) - 2,
		slots: map[uint32]vipSlot{},
		byKey: map[model.ServiceKey]uint32{},
	}
}

// restore gives key the offset of a saved address. It reports false for an address
// outside the ranges, as after a change of flags, and an error if another key has it.
func (p *vipPool) restore(key model.ServiceKey, v4 netip.Addr, released time.Time) (bool, error) {
	if own, ok := p.byKey[key]; ok {
		return false, fmt.Errorf("it is saved twice, with offsets %d and that of %s", own, v4)
	}
	offset, ok := p.offset(v4)
	if !ok || !v4.Is4() {
		return false, nil
	}
	if slot, taken := p.slots[offset]; taken {
		return false, fmt.Errorf("address %s belongs to both %s and %s", v4, slot.key, key)
	}
	p.slots[offset] = vipSlot{key: key, released: released}
	p.byKey[key] = offset
	return true, nil
}

// take gives key an address: its own if it had one, else a free one. evicted is the
// forgotten service that loses its claim, if that was the only way. ok is false when
// the pool has nothing to give.
func (p *vipPool) take(key model.ServiceKey) (evicted model.ServiceKey, ok bool) {
	if offset, own := p.byKey[key]; own {
		p.slots[offset] = vipSlot{key: key}
		return model.ServiceKey{}, true
	}
	var offset uint32
	if len(p.slots) < int(p.size) {
		offset, ok = p.probe(key, func(_ vipSlot, given bool) bool { return !given })
	}
	if !ok {
		offset, ok = p.probe(key, func(s vipSlot, _ bool) bool {
			return !s.released.IsZero() && s.released.Before(p.reusable)
		})
		if !ok {
			return model.ServiceKey{}, false
		}
		evicted = p.slots[offset].key
		delete(p.byKey, evicted)
	}
	p.slots[offset] = vipSlot{key: key}
	p.byKey[key] = offset
	return evicted, true
}

// probe returns the first offset from key's wanted one on that fits.
func (p *vipPool) probe(key model.ServiceKey, fits func(s vipSlot, given bool) bool) (uint32, bool) {
	wanted := wantedOffset(key, p.size)
	for i := range p.size {
		offset := 1 + (wanted-1+i)%p.size
		if slot, given := p.slots[offset]; fits(slot, given) {
			return offset, true
		}
	}
	return 0, false
}

// wantedOffset is a hash of key in 1..size. It is part of what survives an upgrade:
// never change it.
func wantedOffset(key model.ServiceKey, size uint32) uint32 {
	sum := sha256.Sum256([]byte(key.String()))
	return 1 + uint32(binary.BigEndian.Uint64(sum[:8])%uint64(size))
}

// release keeps the address of a forgotten service for it.
func (p *vipPool) release(key model.ServiceKey, now time.Time) {
	if offset, ok := p.byKey[key]; ok {
		p.slots[offset] = vipSlot{key: key, released: now}
	}
}

// releasedAt is when key's address was released; ok is false if key has none or is known.
func (p *vipPool) releasedAt(key model.ServiceKey) (at time.Time, ok bool) {
	slot := p.slots[p.byKey[key]]
	return slot.released, slot.key == key && !slot.released.IsZero()
}

// addrs returns key's addresses, invalid ones if it has none.
func (p *vipPool) addrs(key model.ServiceKey) (v4, v6 netip.Addr) {
	offset, ok := p.byKey[key]
	if !ok {
		return netip.Addr{}, netip.Addr{}
	}
	var a4 [4]byte
	binary.BigEndian.PutUint32(a4[:], p.base4+offset)
	a6 := p.v6.Addr().As16()
	host := binary.BigEndian.Uint32(a6[12:]) + offset
	binary.BigEndian.PutUint32(a6[12:], host)
	return netip.AddrFrom4(a4), netip.AddrFrom16(a6)
}

// offset returns the host part of an address of either range that may be given.
func (p *vipPool) offset(a netip.Addr) (uint32, bool) {
	var offset uint32
	switch {
	case p.v4.Contains(a):
		b := a.As4()
		offset = binary.BigEndian.Uint32(b[:]) - p.base4
	case p.v6.Contains(a):
		b, base := a.As16(), p.v6.Addr().As16()
		if [12]byte(b[:12]) != [12]byte(base[:12]) {
			return 0, false
		}
		offset = binary.BigEndian.Uint32(b[12:]) - binary.BigEndian.Uint32(base[12:])
	}
	return offset, offset >= 1 && offset <= p.size
}

// contains says whether a lies in one of the ranges, given or not.
func (p *vipPool) contains(a netip.Addr) bool { return p.v4.Contains(a) || p.v6.Contains(a) }

// owner returns the known service that has address a.
func (p *vipPool) owner(a netip.Addr) (model.ServiceKey, bool) {
	offset, ok := p.offset(a)
	if !ok {
		return model.ServiceKey{}, false
	}
	slot, given := p.slots[offset]
	return slot.key, given && slot.released.IsZero()
}
