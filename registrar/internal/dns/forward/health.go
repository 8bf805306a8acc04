package forward

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// failuresToDemote is how many failures in a row make a resolver the last
	// choice. One lost datagram is not enough.
	failuresToDemote = 3
	// demotion is how long; then one query finds out whether it is back.
	demotion = 10 * time.Second
	// maxRemembered bounds the memory when the lists of resolvers change for ever.
	maxRemembered = 4096
)

// health remembers which resolvers fail, so that a dead first one does not cost
// every look-up its tryInterval. It only orders: every resolver stays in use.
type health struct {
	now     func() time.Time
	mu      sync.Mutex
	servers map[netip.AddrPort]*serverHealth
}

type serverHealth struct {
	failures int
	until    time.Time
}

func newHealth(now func() time.Time) *health {
	return &health{now: now, servers: map[netip.AddrPort]*serverHealth{}}
}

// order returns the resolvers with those that fail at the end.
func (h *health) order(servers []netip.AddrPort) []netip.AddrPort {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	out := make([]netip.AddrPort, 0, len(servers))
	var demoted []netip.AddrPort
	for _, s := range servers {
		if e := h.servers[s]; e != nil && now.Before(e.until) {
			demoted = append(demoted, s)
			continue
		}
		out = append(out, s)
	}
	return append(out, demoted...)
}

func (h *health) failed(server netip.AddrPort) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.servers[server]
	if e == nil {
		if len(h.servers) >= maxRemembered {
			clear(h.servers)
		}
		e = &serverHealth{}
		h.servers[server] = e
	}
	// The count stays: when the time is over, one more failure is enough.
	if e.failures++; e.failures >= failuresToDemote {
		e.until = h.now().Add(demotion)
	}
}

func (h *health) answered(server netip.AddrPort) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.servers, server)
}
