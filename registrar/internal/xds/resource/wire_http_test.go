package resource_test

import (
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

func TestWireFirst(t *testing.T) {
	m := newMesh(t)
	client := m.addPodAs("client", "client", "client", "")
	pay := m.addPod("pay", "payments", "8080 9090=h2 5432=tcp")
	pay.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo("8080"))
	pay.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo("9090"))
	m.setService(service{name: "payments", ports: "8080 9090=h2 5432=tcp", vip: vipRanges[0].Addr().Next()})
	m.setEndpoints("payments.aether.internal", pay)
	m.setEndpoints("payments.aether.internal:9090", pay)
	m.xds.Sync()
	c := client.http1(t)
	for _, a := range []string{"payments.aether.internal", "payments.aether.internal:8080", "payments.aether.internal:9090", "payments.aether.internal:7777", "ghost.aether.internal", "evil.com", "payments.aether.internal:5432"} {
		got := m.call(c, a)
		t.Logf("%s: %d %+v %s", a, got.status, got.seen, got.body)
	}
	t.Log(m.xds.OnDemandStreams())
}
