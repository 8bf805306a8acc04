package forward

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// idleTimeout is shorter than what resolvers allow (RFC 7766, 6.2.3, speaks
	// of seconds), so that a connection is rarely found closed.
	idleTimeout = 3 * time.Second
	// maxIdle bounds the idle connections to all resolvers together.
	maxIdle = 64
)

// idlePool keeps TCP connections to resolvers for a moment. Without it, clients
// that only speak TCP would leave one port in TIME_WAIT for every query.
type idlePool struct {
	mu     sync.Mutex
	closed bool
	conns  map[netip.AddrPort][]*idleConn
	n      int
}

type idleConn struct {
	net.Conn
	expire *time.Timer
}

func newIdlePool() *idlePool { return &idlePool{conns: map[netip.AddrPort][]*idleConn{}} }

// get returns an idle connection, or a new one.
func (p *idlePool) get(ctx context.Context, server netip.AddrPort) (conn net.Conn, reused bool, err error) {
	if c := p.take(server); c != nil {
		return c.Conn, true, nil
	}
	var d net.Dialer
	fresh, err := d.DialTCP(ctx, "tcp", netip.AddrPort{}, server)
	if err != nil {
		return nil, false, err
	}
	return fresh, false, nil
}

// take removes the connection that was used last: the others may expire.
func (p *idlePool) take(server netip.AddrPort) *idleConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.conns[server]
	if len(list) == 0 {
		return nil
	}
	c := list[len(list)-1]
	c.expire.Stop()
	p.removeLocked(server, len(list)-1)
	return c
}

// put takes over a connection on which nothing is outstanding.
func (p *idlePool) put(server netip.AddrPort, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.n >= maxIdle {
		_ = conn.Close()
		return
	}
	c := &idleConn{Conn: conn}
	c.expire = time.AfterFunc(idleTimeout, func() { p.drop(server, c) })
	p.conns[server] = append(p.conns[server], c)
	p.n++
}

func (p *idlePool) drop(server netip.AddrPort, c *idleConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.conns[server] {
		if other == c {
			p.removeLocked(server, i)
			_ = c.Close()
			return
		}
	}
}

func (p *idlePool) removeLocked(server netip.AddrPort, i int) {
	list := p.conns[server]
	copy(list[i:], list[i+1:])
	list[len(list)-1] = nil
	if list = list[:len(list)-1]; len(list) == 0 {
		delete(p.conns, server)
	} else {
		p.conns[server] = list
	}
	p.n--
}

func (p *idlePool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for server, list := range p.conns {
		for _, c := range list {
			c.expire.Stop()
			_ = c.Close()
		}
		delete(p.conns, server)
	}
	p.n = 0
}
