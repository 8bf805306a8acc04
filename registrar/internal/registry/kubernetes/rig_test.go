package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/bbolt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/registrytest"
	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

const patience = registrytest.Patience

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// cluster is a real API server that knows ServiceEndpoints.
type cluster struct {
	server *apiservertest.Server
	admin  *clientset.Clientset
	raw    *dynamic.DynamicClient
	// objects speaks as the administrator, with the backend's own client.
	objects *client
}

// newCluster starts one with the namespace "shop", and what of registrar/deploy is
// named.
func newCluster(tb testing.TB, manifests ...string) *cluster {
	tb.Helper()
	c := &cluster{server: apiservertest.Start(tb)}
	var err error
	c.admin, err = clientset.NewForConfig(c.server.Admin())
	must(tb, err)
	c.raw, err = dynamic.NewForConfig(c.server.Admin())
	must(tb, err)
	c.objects, err = newClient(c.server.Admin())
	must(tb, err)
	tb.Cleanup(c.objects.close)
	for _, name := range append([]string{"crd/endpoint.aether.io_serviceendpoints.yaml"}, manifests...) {
		c.install(tb, name)
	}
	c.namespace(tb, "shop")
	await(tb, "the API server serves ServiceEndpoints", func() bool {
		_, err := c.objects.list(tb.Context(), metav1.ListOptions{})
		return err == nil
	})
	return c
}

// install applies one file of registrar/deploy.
func (c *cluster) install(tb testing.TB, name string) {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join("../../../deploy", name))
	must(tb, err)
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		object := &unstructured.Unstructured{}
		must(tb, yaml.Unmarshal([]byte(document), &object.Object))
		gvk := object.GroupVersionKind()
		resource := strings.ToLower(gvk.Kind) + "s"
		resource = strings.Replace(resource, "policys", "policies", 1)
		_, err := c.raw.Resource(schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: resource}).
			Create(tb.Context(), object, metav1.CreateOptions{})
		must(tb, err)
	}
}

func (c *cluster) namespace(tb testing.TB, name string) {
	tb.Helper()
	_, err := c.admin.CoreV1().Namespaces().Create(tb.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		must(tb, err)
	}
}

// list returns the objects by name.
func (c *cluster) list(tb testing.TB) map[string]v1alpha1.ServiceEndpoint {
	tb.Helper()
	list, err := c.objects.list(tb.Context(), metav1.ListOptions{})
	must(tb, err)
	objects := map[string]v1alpha1.ServiceEndpoint{}
	for _, object := range list.(*v1alpha1.ServiceEndpointList).Items {
		objects[object.Name] = object
	}
	return objects
}

// awaitObjects waits until the API server has exactly this many objects.
func (c *cluster) awaitObjects(tb testing.TB, n int) map[string]v1alpha1.ServiceEndpoint {
	tb.Helper()
	var objects map[string]v1alpha1.ServiceEndpoint
	await(tb, fmt.Sprintf("%d objects", n), func() bool {
		objects = c.list(tb)
		return len(objects) == n
	})
	return objects
}

// await polls: nothing tells it.
func await(tb testing.TB, what string, met func() bool) {
	tb.Helper()
	deadline := time.Now().Add(patience)
	for !met() {
		if time.Now().After(deadline) {
			tb.Fatalf("still not: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// node is one registrar's backend, which can be stopped and started on its state.
type node struct {
	*Backend

	name    string
	config  *rest.Config
	db      *bbolt.DB
	log     *logBuffer
	metrics *prometheus.Registry
	wait    time.Duration
	domain  string // of trust
	leaving atomic.Bool
}

// newNode starts a backend, which is closed at the end.
func newNode(tb testing.TB, name string, config *rest.Config) *node {
	tb.Helper()
	db, err := bbolt.Open(filepath.Join(tb.TempDir(), "state.db"), 0o600, &bbolt.Options{Timeout: time.Second, NoSync: true})
	must(tb, err)
	n := &node{name: name, config: config, db: db, wait: time.Hour, domain: "aether.internal"}
	n.start(tb)
	tb.Cleanup(func() {
		_ = n.Close()
		_ = db.Close()
		if tb.Failed() {
			tb.Logf("%s: %v\n%s", name, n.Health(), n.log.String())
		}
	})
	return n
}

// start opens the backend, as a new process would.
func (n *node) start(tb testing.TB) {
	tb.Helper()
	n.log, n.metrics = &logBuffer{}, prometheus.NewRegistry()
	var err error
	n.Backend, err = Open(Options{
		Config: n.config, Node: n.name, TrustDomain: n.domain, DB: n.db, Patience: n.wait, Metrics: n.metrics, Leaving: n.leaving.Load,
		ServiceRanges: model.Ranges{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fd70:6f72:746f::/64")},
		Log:           slog.New(slog.NewTextHandler(n.log, nil)),
		MeshName:      func(k model.ServiceKey) string { return k.Name + "." + k.Namespace + ".aether.internal" },
	})
	must(tb, err)
}

// restart stops the backend and starts it on the same state.
func (n *node) restart(tb testing.TB) {
	tb.Helper()
	must(tb, n.Close())
	n.start(tb)
}

// value returns the sum of a metric over the labels that are given as NAME=VALUE.
func (n *node) value(tb testing.TB, name string, labels ...string) float64 {
	tb.Helper()
	families, err := n.metrics.Gather()
	must(tb, err)
	var sum float64
	for _, f := range families {
		for _, m := range f.GetMetric() {
			has := map[string]bool{}
			for _, l := range m.GetLabel() {
				has[l.GetName()+"="+l.GetValue()] = true
			}
			fits := f.GetName() == name
			for _, l := range labels {
				fits = fits && has[l]
			}
			if fits {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// writes counts the writes that succeeded.
func (n *node) writes(tb testing.TB) float64 {
	tb.Helper()
	return n.value(tb, "portolan_registry_api_writes_total", "result=ok")
}

// settled waits until the API server has everything of this node.
func (n *node) settled(tb testing.TB) {
	tb.Helper()
	await(tb, n.name+" has written everything", func() bool { return n.condition().unwritten == 0 })
}

// fresh waits until the backend reads the API server.
func (n *node) fresh(tb testing.TB) {
	tb.Helper()
	await(tb, n.name+" reads the API server", func() bool { return !n.condition().stale() })
}

// endpoint returns a record of a node's pod; its object is pod-<uid>.
func endpoint(node, uid string, generation uint64) model.Endpoint {
	ep := registrytest.Endpoint(sandbox(uid)+"-eth0", generation)
	ep.Node, ep.PodName = node, "pod-"+uid
	return ep
}

// sandbox returns a container ID that begins with hexadecimal digits.
func sandbox(uid string) string { return fmt.Sprintf("%x%064d", uid, 0)[:64] }

// uidOf returns the UID of the record of endpoint.
func uidOf(uid string) string { return sandbox(uid) + "-eth0" }

// key returns where the object of endpoint is.
func key(uid string) types.NamespacedName { return keyOf(endpoint("", uid, 1)) }

// logBuffer takes a log from several goroutines.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// cable is a TCP relay to the API server that can be cut: what a node sees of a
// broken network while other nodes work.
type cable struct {
	tb     testing.TB
	config *rest.Config
	target string
	at     string

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]struct{}
}

func newCable(tb testing.TB, config *rest.Config) *cable {
	tb.Helper()
	u, err := url.Parse(config.Host)
	must(tb, err)
	// The certificate is for the server's address: the relay has it too, on a port of
	// its own.
	c := &cable{tb: tb, config: rest.CopyConfig(config), target: u.Host, at: net.JoinHostPort(u.Hostname(), "0"), conns: map[net.Conn]struct{}{}}
	c.mend()
	c.at = c.listener.Addr().String()
	c.config.Host = "https://" + c.at
	tb.Cleanup(c.cut)
	return c
}

// cut ends all connections and refuses new ones.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listener != nil {
		_ = c.listener.Close()
	}
	c.listener = nil
	for conn := range c.conns {
		_ = conn.Close()
	}
	clear(c.conns)
}

// mend accepts connections again.
func (c *cable) mend() {
	l, err := net.Listen("tcp", c.at)
	must(c.tb, err)
	c.mu.Lock()
	c.listener = l
	c.mu.Unlock()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go c.relay(conn)
		}
	}()
}

func (c *cable) relay(conn net.Conn) {
	far, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", c.target)
	if err != nil {
		_ = conn.Close()
		return
	}
	c.mu.Lock()
	if c.listener == nil {
		_, _ = conn.Close(), far.Close()
	}
	c.conns[conn], c.conns[far] = struct{}{}, struct{}{}
	c.mu.Unlock()
	var both sync.WaitGroup
	for _, ends := range [][2]net.Conn{{conn, far}, {far, conn}} {
		both.Go(func() {
			_, _ = io.Copy(ends[0], ends[1])
			_, _ = conn.Close(), far.Close()
		})
	}
	both.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.conns, conn)
	delete(c.conns, far)
}
