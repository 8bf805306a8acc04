package forward_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
)

// What forwarding adds to a query: the resolver does nothing but turn it round.
func BenchmarkExchange(b *testing.B) {
	server := packetServer(b, func(q []byte, _ net.Addr, reply func([]byte)) {
		q[2] |= 0x80
		reply(q)
	})
	raw := query(b, "example.com.", dns.TypeA)
	b.Run("direct", func(b *testing.B) {
		conn, err := net.Dial("udp", server.String())
		if err != nil {
			b.Fatal(err)
		}
		defer conn.Close()
		buf := make([]byte, 512)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := conn.Write(raw); err != nil {
				b.Fatal(err)
			}
			if _, err := conn.Read(buf); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("forwarded", func(b *testing.B) {
		f := newForwarder(b, nil)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := f.Exchange(b.Context(), forward.Request{Query: raw, Upstreams: []netip.AddrPort{server}}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
