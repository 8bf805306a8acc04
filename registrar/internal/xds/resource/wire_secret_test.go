package resource_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// upstream is a cluster that all Envoys get unasked, with this trust domain.
func upstream(tb testing.TB, service, trustDomain string) *clusterv3.Cluster {
	tb.Helper()
	c, err := resource.Cluster(resource.ServiceCluster{
		Name: service + "." + domain, SNI: portText(8080), Protocol: port.HTTP,
		Identities: []string{"spiffe://" + trustDomain + "/ns/default/sa/" + service}, TrustDomain: trustDomain,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// paymentsAndClient are a mesh with a pod that serves payments and one that calls.
func paymentsAndClient(t *testing.T) (m *mesh, server, client *meshPod) {
	t.Helper()
	m = newMesh(t)
	client = m.addPod("client", "client", "")
	server = m.addPod("payments-1", "payments", "8080")
	server.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	m.setService(service{name: "payments", ports: "8080"})
	m.setEndpoints("payments."+domain, server)
	m.xds.Sync()
	return m, server, client
}

// A cluster whose secret never comes holds up the others for the source's time-out
// and no longer: without one Envoy would take no cluster any more (XDS-39).
func TestWireMissingSecret(t *testing.T) {
	m, server, client := paymentsAndClient(t)
	m.xds.Withhold(resource.BundleSecret("ghost.internal"))
	m.xds.Set(upstream(t, "ghost", "ghost.internal"))
	m.setEndpoints("ghost."+domain, server)
	m.xds.Set(upstream(t, "payments", trustDomain))
	m.xds.Sync()
	if got := m.call(client.http1(t), "payments."+domain); got.status != 200 || got.seen.Server != "8080" {
		t.Errorf("beside the cluster without a secret: got %d from %q", got.status, got.seen.Server)
	}
	if asked := m.xds.Asked()["payments."+domain]; asked != 0 {
		t.Errorf("the cluster was asked for %d times: it had not come unasked", asked)
	}
}

// A cluster that is taken away and comes again has its secrets each time (XDS-40).
func TestWireClusterAgain(t *testing.T) {
	m, _, client := paymentsAndClient(t)
	for i := range 10 {
		m.xds.Set(upstream(t, "payments", trustDomain))
		m.xds.Sync()
		if got := m.call(client.http1(t), "payments."+domain); got.status != 200 || got.seen.Server != "8080" {
			t.Errorf("time %d: got %d from %q", i, got.status, got.seen.Server)
		}
		m.xds.Remove(wiretest.TypeCluster, "payments."+domain)
		m.xds.Sync()
	}
	if asked := m.xds.Asked()["payments."+domain]; asked != 0 {
		t.Errorf("the cluster was asked for %d times: it had not come unasked", asked)
	}
}

// A pod's certificate is there before its first connection: nothing is asked for then,
// over HTTP and TCP, also while the registrar is away. The caller is the pod all the same.
func TestWireCertificateHeld(t *testing.T) {
	m := newMesh(t)
	server := m.addPod("server", "payments", "8080 5432=tcp")
	server.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	server.ServeTCP(t, "127.0.0.1:5432", func(c *net.TCPConn) { _, _ = io.WriteString(c, "hello") })
	vip := netip.MustParseAddrPort("198.18.0.10:5432")
	m.setService(service{name: "payments", ports: "8080 5432=tcp", vip: vip.Addr()})
	m.setEndpoints("payments."+domain, server)
	m.setEndpoints(vip.String(), server)
	pods := map[string]*meshPod{}
	for _, name := range []string{"first", "web", "raw"} {
		pods[name] = m.addPod(name, name, "")
		m.lab.RedirectTCP(pods[name].Pod, vipRanges, vip)
	}
	// The clusters are warm by another pod of another account.
	if got := m.call(pods["first"].http1(t), "payments."+domain); got.status != 200 {
		t.Fatalf("the first pod: got %d", got.status)
	}
	if got := m.greeting(pods["first"], vip.String()); got != "hello" {
		t.Fatalf("the first pod over TCP: got %q", got)
	}
	m.xds.Sync()
	m.xds.Stop()
	got := m.call(pods["web"].http1(t), "payments."+domain)
	if xfcc := got.seen.Header.Get("X-Forwarded-Client-Cert"); got.status != 200 || !hasURI(xfcc, pods["web"].spec.Identity.SPIFFE()) {
		t.Errorf("without the registrar: got %d from the caller %q", got.status, xfcc)
	}
	if got := m.greeting(pods["raw"], vip.String()); got != "hello" {
		t.Errorf("over TCP without the registrar: got %q", got)
	}
	m.xds.Restart()
}

// Certificates and the clusters that hold them come and go in any order, also while Envoy
// still fetches one and while connections are made; the Envoy lives, and in the end every
// pod calls with its own.
func TestWireCertificatesComeAndGo(t *testing.T) {
	m, _, client := paymentsAndClient(t)
	r := rand.New(rand.NewPCG(1, 1))
	pods := []*meshPod{client}
	for i := range 3 {
		pods = append(pods, m.addPod(fmt.Sprint("other", i), fmt.Sprint("other", i), ""))
	}
	stop := make(chan struct{})
	var calls sync.WaitGroup
	for _, p := range pods {
		calls.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = try(p.http1(t), "payments."+domain)
				}
			}
		})
	}
	for range 300 {
		id := pods[r.IntN(len(pods))].spec.Identity
		chain, key := m.ca.Issue(id.SPIFFE())
		switch r.IntN(6) {
		case 0, 1:
			m.xds.Set(resource.CertificateCluster(id, chain))
		case 2:
			m.xds.Remove(wiretest.TypeCluster, resource.CertificateClusterName(id))
		case 3, 4:
			m.xds.Set(resource.SVID(id, chain, key)[1])
		case 5:
			m.xds.Remove(wiretest.TypeSecret, resource.OutboundSecret(id))
		}
		if r.IntN(4) == 0 {
			m.xds.Sync()
		}
	}
	close(stop)
	calls.Wait()
	for _, p := range pods {
		m.setPod(p)
	}
	m.xds.Sync()
	for _, p := range pods {
		got := m.call(p.http1(t), "payments."+domain)
		if xfcc := got.seen.Header.Get("X-Forwarded-Client-Cert"); got.status != 200 || !hasURI(xfcc, p.spec.Identity.SPIFFE()) {
			t.Errorf("%s: got %d from the caller %q", p.spec.ID, got.status, xfcc)
		}
	}
}
