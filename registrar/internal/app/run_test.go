package app

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	clientgo "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/podsource"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// patience bounds every wait; it matters only when something is broken.
const patience = 30 * time.Second

// runner is `registrar run` in this process, without Envoy, mesh DNS and plugin.
type runner struct {
	cfg runConfig
	*daemon

	mu      sync.Mutex
	records map[string]model.Endpoint // of the registry, by UID
	news    chan struct{}             // closed at the next event, and another one then
}

// newRunner is one that has not started yet; pods are attached to its node. make it
// before the parts are made: that opens the state.
func newRunner(t *testing.T, pods func(cfg runConfig) []model.Pod) *runner {
	t.Helper()
	r := &runner{records: map[string]model.Endpoint{}, news: make(chan struct{})}
	dir := t.TempDir()
	at := func(flag, name string) string { return "--" + flag + "=" + filepath.Join(dir, name) }
	flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
	r.cfg.flags(flags)
	err := flags.Parse([]string{
		"--node-name=node1", "--http-address=127.0.0.1:0", "--dns-upstream=127.0.0.1", "--sweep-interval=1h",
		at("cni-socket", "run/cni/cni.sock"), at("xds-socket", "run/xds.sock"), at("dns-socket", "run/dns.sock"), at("admin-socket", "run/admin.sock"),
		at("netns-dir", "run/portolan/netns"), at("spool-dir", "run/portolan/spool"), at("state-dir", "state"),
	})
	vip4, vip6, incomplete := r.cfg.Mesh.complete()
	r.cfg.Identity.complete(r.cfg.Registry)
	if err := errors.Join(err, incomplete, os.MkdirAll(filepath.Join(dir, "run"), 0o700), os.MkdirAll(filepath.Join(dir, "state"), 0o700)); err != nil {
		t.Fatal(err)
	}
	storePods(t, r.cfg.StateDir, pods(r.cfg)...)
	r.daemon, err = newDaemon(t.Context(), r.cfg, []netip.Prefix{vip4, vip6}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// start runs it until the test ends, and returns when it takes pods.
func (r *runner) start(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	wg.Go(func() { _ = r.backend.Watch(ctx, r.take) })
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	eventually(t, "it takes pods", func() bool {
		conn, err := net.Dial("unix", r.cfg.CNISocket)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return stop
}

// eventually polls what no event tells.
func eventually(t *testing.T, what string, met func() bool) {
	t.Helper()
	for bound := time.Now().Add(patience); !met(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(bound) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func (r *runner) take(ev registry.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch ev.Kind {
	case registry.Upsert:
		r.records[ev.UID] = ev.Endpoint
	case registry.Delete:
		delete(r.records, ev.UID)
	case registry.Complete:
	}
	close(r.news)
	r.news = make(chan struct{})
}

// awaitRecords waits until what the registry has is as wanted.
func (r *runner) awaitRecords(t *testing.T, what string, met func(map[string]model.Endpoint) bool) {
	t.Helper()
	bound := time.NewTimer(patience)
	defer bound.Stop()
	for {
		r.mu.Lock()
		ok, news := met(r.records), r.news
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-news:
		case <-bound.C:
			r.mu.Lock()
			defer r.mu.Unlock()
			t.Fatalf("%s: the registry has %+v", what, r.records)
		}
	}
}

// pod is a pod of payments with a network namespace, as attach stores it.
func pod(id, address, netns string) model.Pod {
	return model.Pod{
		Key: model.AttachmentKey{ContainerID: id, IfName: "eth0"}, Netns: netns, RuntimeNetns: netns,
		Addresses: []netip.Addr{netip.MustParseAddr(address)}, Namespace: "default", Name: "payments-" + id,
		Service:  model.ServiceKey{Namespace: "default", Name: "payments"},
		Identity: model.Identity{TrustDomain: defaultDomain, Namespace: "default", Account: "payments"},
		Default:  8080, Ports: []port.Port{{Number: 8080, Protocol: port.HTTP}}, Weight: 1,
	}
}

// record is what a registrar has published of a pod.
func record(p model.Pod, zone string) model.Endpoint {
	return model.Endpoint{
		UID: p.Key.String(), Generation: 1, Service: p.Service, Identity: p.Identity, Addresses: p.Addresses, Default: p.Default, Weight: 1,
		Locality: model.Locality{Region: "eu", Zone: zone},
		Ports:    []model.PortStatus{{Port: p.Ports[0], Health: model.Healthy}},
	}
}

func publish(t *testing.T, r *runner, records ...model.Endpoint) {
	t.Helper()
	for _, ep := range records {
		if err := r.backend.Publish(t.Context(), ep); err != nil {
			t.Fatal(err)
		}
	}
}

// MESH-41, contract 5: after a reboot the run folder is gone, and with it every network
// namespace that is stored: the attachments go before anybody is answered, all of them,
// with their records, and the next start finds none. Without a reboot that many ghosts are
// not believed. A record that nobody is attached for goes either way.
func TestStartAfterReboot(t *testing.T) {
	for name, rebooted := range map[string]bool{"reboot": true, "restart": false} {
		t.Run(name, func(t *testing.T) {
			var pods []model.Pod
			r := newRunner(t, func(cfg runConfig) []model.Pod {
				for _, id := range []string{"c1", "c2", "c3", "c4"} {
					p := pod(id, "10.1.0.1"+id[1:], filepath.Join(cfg.NetnsDir, id+"-eth0"))
					p.RuntimeNetns = filepath.Join(t.TempDir(), id) // the runtime's folder is there
					pods = append(pods, p)
				}
				return pods
			})
			want := []string{}
			if !rebooted {
				write(t, filepath.Join(filepath.Dir(r.cfg.NetnsDir), "registrar.started"), "")
				want = []string{"c1-eth0", "c2-eth0", "c3-eth0", "c4-eth0"}
			}
			for _, p := range append(pods, pod("stray", "10.1.0.9", "")) {
				publish(t, r, record(p, ""))
			}
			stop := r.start(t)
			got := []string{}
			for _, p := range r.pods.Pods() {
				got = append(got, p.Key.String())
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("attached (-want +got):\n%s", d)
			}
			r.awaitRecords(t, "after the start", func(records map[string]model.Endpoint) bool {
				if len(records) != len(want) {
					return false
				}
				return !slices.ContainsFunc(want, func(uid string) bool { _, ok := records[uid]; return !ok })
			})
			stop()
			if left := attachedPods(t, r.cfg.StateDir); len(left) != len(want) {
				t.Errorf("the next start finds %d attachments, want %d", len(left), len(want))
			}
		})
	}
}

// The metric says how many addresses pods of several nodes claim now.
func TestContestedAddresses(t *testing.T) {
	r := newRunner(t, func(runConfig) []model.Pod { return nil })
	r.start(t)
	contested := func() float64 {
		families, err := r.metrics.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "portolan_contested_addresses" {
				return f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		t.Fatal("no such metric")
		return 0
	}
	theirs, claim := record(pod("theirs", "10.2.0.1", ""), ""), record(pod("claim", "10.2.0.1", ""), "")
	theirs.Node, claim.Node = "node2", "node3"
	publish(t, r, theirs)
	if n := contested(); n != 0 {
		t.Errorf("%v before there is a claim", n)
	}
	publish(t, r, claim)
	eventually(t, "one address is contested", func() bool { return contested() == 1 })
	if err := r.backend.Withdraw(t.Context(), theirs.UID, 2); err != nil {
		t.Fatal(err)
	}
	eventually(t, "none is", func() bool { return contested() == 0 })
}

// Contract 3: the API server does not say where the node is when its registrar starts, and
// not when it is asked again; once it does, the registrar prefers what is near, and its own
// pods' records say where they are.
func TestPlaceIsLearnedLate(t *testing.T) {
	var known atomic.Bool
	var asked atomic.Int32
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/api/v1/nodes/node1" {
			http.NotFound(w, q)
			return
		}
		asked.Add(1)
		if !known.Load() {
			http.Error(w, "not yet", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kind": "Node", "apiVersion": "v1", "metadata": {"name": "node1", "labels":
			{"topology.kubernetes.io/region": "eu", "topology.kubernetes.io/zone": "north"}}}`))
	}))
	t.Cleanup(api.Close)
	netns := netnstest.New(t)
	r := newRunner(t, func(runConfig) []model.Pod { return []model.Pod{pod("c1", "10.1.0.2", netns.Path)} })
	r.cluster = joined(t, api.URL)
	if err := r.locate(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.start(t)
	publish(t, r, record(pod("n", "10.2.0.1", ""), "north"), record(pod("s", "10.2.0.2", ""), "south"))
	conn, err := xdstest.Dial("unix://" + r.cfg.XDSSocket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	envoy, err := conn.ADS(t.Context(), xdstest.Options{Node: &corev3.Node{Id: "node1", UserAgentName: "envoy"}})
	if err == nil {
		err = envoy.Subscribe(resourcev3.EndpointType, "payments.aether.internal")
	}
	if err != nil {
		t.Fatal(err)
	}
	awaitPriorities(t, envoy, map[string]uint32{"north": 0, "south": 0})
	before := asked.Load()
	r.awaitRecords(t, "its place is not known", func(records map[string]model.Endpoint) bool {
		own, ok := records["c1-eth0"]
		return ok && own.Locality == model.Locality{}
	})
	eventually(t, "it is asked for in vain once more", func() bool { return asked.Load() > before })
	known.Store(true)
	awaitPriorities(t, envoy, map[string]uint32{"north": 0, "south": 1})
	r.awaitRecords(t, "its place is known", func(records map[string]model.Endpoint) bool {
		return records["c1-eth0"].Locality == model.Locality{Region: "eu", Zone: "north"}
	})
}

// joined is a cluster whose API server is at a URL.
func joined(t *testing.T, url string) *cluster {
	t.Helper()
	config := &rest.Config{Host: url}
	client, err := clientgo.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	namespaces, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	source, err := podsource.New(podsource.Config{Client: client, Namespaces: namespaces, Node: "node1", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{client: client, source: source, reporter: podsource.NewReporter(client, "node1")}
}

// awaitPriorities waits until the load assignment of payments has its zones with these
// priorities.
func awaitPriorities(t *testing.T, envoy *xdstest.Client, want map[string]uint32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var got map[string]uint32
	err := envoy.WaitFor(ctx, resourcev3.EndpointType, func(s *xdstest.State) bool {
		la := &endpointv3.ClusterLoadAssignment{}
		if r, ok := s.Resources["payments.aether.internal"]; !ok || r.Body.UnmarshalTo(la) != nil {
			return false
		}
		got = map[string]uint32{}
		for _, l := range la.GetEndpoints() {
			got[l.GetLocality().GetZone()] = l.GetPriority()
		}
		return cmp.Equal(got, want)
	})
	if err != nil {
		t.Fatalf("priorities %v, want %v: %v", got, want, err)
	}
}
