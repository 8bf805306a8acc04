package dns_test

import (
	"testing"

	mdns "github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// What a look-up costs a pod, through the real redirection: a mesh name, another
// name by way of mesh DNS, and, to compare, that name asked directly, without the
// mesh. Each client has one socket and waits for each answer.
func BenchmarkResolve(b *testing.B) {
	s := newScene(b)
	plain := dnstest.NewNamespace(b)
	netnstest.Connect(b, "eth1",
		netnstest.End{In: plain.Namespace, Addrs: []string{"10.0.1.2/24"}}, netnstest.End{In: s.outside.Namespace, Addrs: []string{"10.0.1.53/24"}})
	direct := dnstest.NewResolver(b, s.outside, "10.0.1.53:53")
	s.start(b, nil)
	s.serve(b)
	for _, bm := range []struct {
		name, question, want string
		in                   *dnstest.Namespace
		server               string
	}{
		{name: "direct", question: "example.com", want: fromUpstream, in: plain, server: direct.Addr.String()},
		{name: "mesh", question: "payments.aether.internal", want: payments4, in: s.pod, server: real4},
		{name: "forwarded", question: "example.com", want: fromUpstream, in: s.pod, server: real4},
	} {
		for _, network := range []string{"udp4", "tcp4"} {
			b.Run(bm.name+"/"+network[:3], func(b *testing.B) {
				conn, err := bm.in.Dial(b, network, bm.server)
				if err != nil {
					b.Fatal(err)
				}
				q := dnstest.Question(bm.question, mdns.TypeA)
				ask(b, conn, q, dnstest.Patience)
				for b.Loop() {
					if got := ask(b, conn, q, dnstest.Patience); got != bm.want {
						b.Fatal(got)
					}
				}
			})
		}
	}
}
