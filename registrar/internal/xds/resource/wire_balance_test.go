package resource_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/wiretest"
)

// replicas is a service with n pods on one port, and a client.
func replicas(t *testing.T, n int) (m *mesh, client *http.Client, pods []*meshPod) {
	t.Helper()
	m = newMesh(t)
	client = m.addPod("client", "client", "").http1(t)
	for i := range n {
		p := m.addPod(fmt.Sprint("p", i), "payments", "8080")
		p.ServeHTTP(t, "127.0.0.1:8080", ticker(p.spec.ID))
		pods = append(pods, p)
	}
	m.setService(service{name: "payments", ports: "8080"})
	return m, client, pods
}

// assign publishes endpoints for the service of replicas and returns who answers n
// requests.
func (m *mesh) assign(client *http.Client, n int, endpoints ...resource.Endpoint) map[string]int {
	m.Helper()
	m.xds.Set(resource.Endpoints(resource.LoadAssignment{
		Name: "payments.aether.internal", Endpoints: endpoints, Self: model.Locality{Region: "r1", Zone: "a"},
	}))
	m.xds.Sync()
	got := make(map[string]int)
	for range n {
		a := m.call(client, "payments.aether.internal")
		if a.status != 200 {
			got[fmt.Sprint(a.status)]++
			continue
		}
		got[a.seen.Server]++
	}
	return got
}

func (p *meshPod) endpoint() resource.Endpoint {
	return resource.Endpoint{Addr: netip.AddrPortFrom(p.Addr, resource.InboundPort), Weight: 1}
}

// Endpoints that drain get nothing new while there is another, whatever their share,
// and nothing when there is none: that is a 503 (XDS-56, T7). What they have goes on.
func TestWireDraining(t *testing.T) {
	m, client, pods := replicas(t, 5)
	endpoints := make([]resource.Endpoint, 0, 5)
	for _, p := range pods {
		endpoints = append(endpoints, p.endpoint())
	}
	m.assign(client, 10, endpoints...)
	var streams []*tick
	for range 10 {
		streams = append(streams, m.openTick(client, "payments.aether.internal"))
	}
	for i := range 4 {
		endpoints[i].Draining = true
	}
	if got := m.assign(client, 50, endpoints...); !maps.Equal(got, map[string]int{"p4": 50}) {
		t.Errorf("one of five healthy: got %v", got)
	}
	endpoints[4].Draining = true
	if got := m.assign(client, 10, endpoints...); !maps.Equal(got, map[string]int{"503": 10}) {
		t.Errorf("all drain: got %v", got)
	}
	if got := m.assign(client, 10); !maps.Equal(got, map[string]int{"503": 10}) {
		t.Errorf("none: got %v", got)
	}
	for _, s := range streams {
		if err := s.beat(); err != nil {
			t.Error(err)
		}
		if err := s.end(); err != nil {
			t.Error(err)
		}
	}
}

// Pods are rolled under load: drained, their application stopped, their listener
// removed, started again. No request fails, on pooled connections of either protocol
// (XDS-57, MESH-31, contract 4.6).
func TestWireRoll(t *testing.T) {
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	pods := []*meshPod{m.addPod("p0", "payments", "8080 9090=h2"), m.addPod("p1", "payments", "8080 9090=h2")}
	start := func(p *meshPod) []*http.Server {
		return []*http.Server{
			p.ServeHTTP(t, "127.0.0.1:8080", wiretest.Echo(p.spec.ID)),
			p.ServeHTTP(t, "127.0.0.1:9090", wiretest.Echo(p.spec.ID)),
		}
	}
	servers := [][]*http.Server{start(pods[0]), start(pods[1])}
	clusters := []string{"payments.aether.internal", "payments.aether.internal:9090"}
	publish := func(endpoints ...resource.Endpoint) {
		for _, cluster := range clusters {
			m.xds.Set(resource.Endpoints(resource.LoadAssignment{Name: cluster, Endpoints: endpoints}))
		}
		m.xds.Sync()
	}
	m.setService(service{name: "payments", ports: "8080 9090=h2"})
	publish(pods[0].endpoint(), pods[1].endpoint())

	stop := make(chan struct{})
	var load sync.WaitGroup
	var requests atomic.Int64
	for _, c := range []*http.Client{client.http1(t), client.h2c(t)} {
		for _, cluster := range clusters {
			load.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					got, err := try(c, cluster, func(r *http.Request) { r.Method = http.MethodPost })
					if err != nil || got.status != http.StatusOK {
						t.Errorf("%s: got %d, %v after %d requests", cluster, got.status, err, requests.Load())
						return
					}
					requests.Add(1)
				}
			})
		}
	}
	for round := range 6 {
		i := round % 2
		going, staying := pods[i], pods[1-i]
		draining := going.endpoint()
		draining.Draining = true
		publish(draining, staying.endpoint())
		// Who shuts down while a request is on its way costs it a 503; see README.
		m.awaitIdle(t, going)
		for _, s := range servers[i] {
			if err := s.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		}
		publish(staying.endpoint())
		m.xds.Remove(wiretest.TypeListener, resource.InboundListener(going.spec.ID))
		m.xds.Sync()
		m.setPod(going)
		servers[i] = start(going)
		m.xds.Sync()
		publish(going.endpoint(), staying.endpoint())
	}
	close(stop)
	load.Wait()
	t.Logf("%d requests", requests.Load())
}

// awaitIdle waits until no caller has a request on its way to the pod, and gives it no
// new one.
func (m *mesh) awaitIdle(t *testing.T, p *meshPod) {
	t.Helper()
	host := "::" + p.endpoint().Addr.String()
	total, active := host+"::rq_total::", host+"::rq_active::"
	last := ""
	wiretest.Eventually(t, "no request goes to "+p.spec.ID, func() bool {
		busy, now := false, ""
		for line := range strings.Lines(m.envoy.Get("/clusters")) {
			line = strings.TrimSpace(line)
			if strings.Contains(line, total) {
				now += line
			}
			busy = busy || strings.Contains(line, active) && !strings.HasSuffix(line, "::0")
		}
		same := now == last
		last = now
		return same && !busy && now != ""
	})
}

// The near ones are called, the far ones only when no near one is left; weights
// divide the requests (contract 1).
func TestWireLocality(t *testing.T) {
	m, client, pods := replicas(t, 4)
	zone, region, away := pods[0].endpoint(), pods[1].endpoint(), pods[2].endpoint()
	zone.Locality = model.Locality{Region: "r1", Zone: "a"}
	region.Locality = model.Locality{Region: "r1", Zone: "b"}
	away.Locality = model.Locality{Region: "r2", Zone: "a"}
	for _, step := range []struct {
		endpoints []resource.Endpoint
		want      string
	}{
		{[]resource.Endpoint{away, zone, region}, "p0"},
		{[]resource.Endpoint{away, region}, "p1"},
		{[]resource.Endpoint{away}, "p2"},
	} {
		if got := m.assign(client, 20, step.endpoints...); !maps.Equal(got, map[string]int{step.want: 20}) {
			t.Errorf("got %v, want all from %s", got, step.want)
		}
	}
	zone.Draining = true
	if got := m.assign(client, 20, away, zone, region); !maps.Equal(got, map[string]int{"p1": 20}) {
		t.Errorf("the near one drains: got %v", got)
	}
	heavy, light := pods[0].endpoint(), pods[3].endpoint()
	heavy.Weight = 3
	// Each of Envoy's two workers has its own round.
	if got := m.assign(client, 400, heavy, light); got["p0"] < 270 || got["p0"] > 330 || got["p0"]+got["p3"] != 400 {
		t.Errorf("weights 3 and 1: got %v", got)
	}
}

// A node died: its address swallows packets. Requests fail over after the connect
// timeout, none fails, and soon the address is left out, so that no request runs into the
// timeout any more, long before the registry knows.
func TestWireBlackHole(t *testing.T) {
	m, client, pods := replicas(t, 2)
	hole := m.lab.AddPod()
	if out, err := hole.Run(t.Context(), "nft", "add table ip hole; add chain ip hole in { type filter hook input priority 0; policy drop; }"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dead := resource.Endpoint{Addr: netip.AddrPortFrom(hole.Addr, resource.InboundPort), Weight: 1}
	if got := m.assign(client, 30, pods[0].endpoint(), pods[1].endpoint(), dead); got["p0"]+got["p1"] != 30 {
		t.Errorf("got %v", got)
	}
	wiretest.Eventually(t, "the dead host is left out", func() bool {
		m.call(client, "payments.aether.internal")
		return m.envoy.Stat("cluster.payments_aether_internal.outlier_detection.ejections_active") == 1
	})
	m.call(client, "payments.aether.internal") // the worker has heard of it, too
	timeouts := func() int64 { return m.envoy.Stat("cluster.payments_aether_internal.upstream_cx_connect_timeout") }
	before := timeouts()
	for range 20 {
		if got := m.call(client, "payments.aether.internal"); got.status != 200 {
			t.Errorf("got %d", got.status)
		}
	}
	if n := timeouts() - before; before == 0 || n != 0 {
		t.Errorf("%d connections timed out before the dead host was left out, and %d after", before, n)
	}
}

// A node dies while its connections are in use: Envoy gives up a request in flight after
// some 15 s, and the kernel would after a quarter of an hour, on HTTP/1.1, HTTP/2 and
// TCP. Nobody here waits for long enough to see that.
func TestWireNodeDies(t *testing.T) {
	t.Parallel() // it waits for the kernel's timeout
	m := newMesh(t)
	client := m.addPod("client", "client", "")
	p := m.addPod("p", "payments", "8080 9090=h2 5432=tcp")
	vip := netip.MustParseAddrPort("198.18.0.10:5432")
	p.ServeHTTP(t, "127.0.0.1:8080", ticker("p"))
	p.ServeHTTP(t, "127.0.0.1:9090", ticker("p"))
	p.ServeTCP(t, "127.0.0.1:5432", func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	m.setService(service{name: "payments", ports: "8080 9090=h2 5432=tcp", vip: vip.Addr()})
	for _, cluster := range []string{"payments.aether.internal", "payments.aether.internal:9090", vip.String()} {
		m.setEndpoints(cluster, p)
	}
	m.lab.RedirectTCP(client.Pod, vipRanges, vip)
	m.xds.Sync()
	c := client.http1(t)
	c.Timeout = time.Minute
	streams := []*tick{m.openTick(c, "payments.aether.internal"), m.openTick(c, "payments.aether.internal:9090")}
	raw, err := client.DialContext(t.Context(), "tcp", vip.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = raw.Close() }()
	_ = raw.SetDeadline(time.Now().Add(time.Minute))
	echo := func() error {
		if _, err := io.WriteString(raw, "x"); err != nil {
			return err
		}
		_, err := io.ReadFull(raw, make([]byte, 1))
		return err
	}
	beats := []func() error{streams[0].beat, streams[1].beat, echo}
	for i, beat := range beats {
		if err := beat(); err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
	}
	if out, err := p.Run(t.Context(), "ip", "link", "set", "eth0", "down"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var wg sync.WaitGroup
	for i, beat := range beats {
		wg.Go(func() {
			err := beat()
			if timeout, ok := errors.AsType[net.Error](err); err == nil || ok && timeout.Timeout() {
				t.Errorf("stream %d: %v, want that Envoy ends it", i, err)
			}
		})
	}
	wg.Wait()
}

// The only host of a service is never left out: it may be back any moment.
func TestWireOnlyHost(t *testing.T) {
	m, client, _ := replicas(t, 0)
	gone := m.lab.AddPod()
	only := resource.Endpoint{Addr: netip.AddrPortFrom(gone.Addr, resource.InboundPort), Weight: 1}
	if got := m.assign(client, 20, only); !maps.Equal(got, map[string]int{"503": 20}) {
		t.Errorf("got %v", got)
	}
	if n := m.envoy.Stat("cluster.payments_aether_internal.outlier_detection.ejections_active"); n != 0 {
		t.Errorf("%d hosts are left out", n)
	}
}

// 5xx of applications leave nobody out: how a service answers is its own affair.
func TestWireErrorsAreNotOutliers(t *testing.T) {
	m, client, pods := replicas(t, 2)
	bad := m.addPod("bad", "payments", "8080")
	bad.ServeHTTP(t, "127.0.0.1:8080", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	got := m.assign(client, 120, pods[0].endpoint(), pods[1].endpoint(), bad.endpoint())
	if got["503"] < 30 || got["p0"] < 30 || got["p1"] < 30 {
		t.Errorf("got %v, want a third each", got)
	}
}
