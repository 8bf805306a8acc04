package server

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// patience bounds the wait for an event that must come.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a cache that is served on a unix socket.
type fixture struct {
	testing.TB
	*cache.Cache
	registry *prometheus.Registry
	path     string
	stop     func()
}

// serve serves c until the test ends or stop is called.
func serve(tb testing.TB, c *cache.Cache) *fixture {
	tb.Helper()
	return serveAt(tb, filepath.Join(tb.TempDir(), "xds", "xds.sock"), Config{Cache: c})
}

func serveAt(tb testing.TB, path string, cfg Config) *fixture {
	tb.Helper()
	f := &fixture{TB: tb, Cache: cfg.Cache, registry: prometheus.NewPedanticRegistry(), path: path}
	cfg.Registerer = f.registry
	l, err := unixsocket.Listen(tb.Context(), unixsocket.Config{Path: path, UID: unixsocket.Keep, GID: unixsocket.Keep})
	if err != nil {
		tb.Fatal(err)
	}
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	f.stop = f.start(s, l)
	return f
}

func (f *fixture) start(s *Server, l net.Listener) (stop func()) {
	f.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			f.Errorf("serve: %v", err)
		}
	}
	f.Cleanup(stop)
	return stop
}

// dial connects a client that lives as long as the test.
func (f *fixture) dial() *xdstest.Conn {
	f.Helper()
	conn, err := xdstest.Dial("unix://" + f.path)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (f *fixture) ads(conn *xdstest.Conn, judge xdstest.Judge) *xdstest.Client {
	f.Helper()
	client, err := conn.ADS(f.Context(), xdstest.Options{Node: &corev3.Node{Id: "n1"}, Judge: judge})
	if err != nil {
		f.Fatal(err)
	}
	return client
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// waitFor waits until a client's state is as ok says.
func (f *fixture) waitFor(c *xdstest.Client, typeURL string, ok func(*xdstest.State) bool) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	f.must(c.WaitFor(ctx, typeURL, ok))
}

// has tells whether a client holds just these resources.
func has(names ...string) func(*xdstest.State) bool {
	return func(s *xdstest.State) bool {
		if len(s.Resources) != len(names) || len(s.Responses) == 0 {
			return false
		}
		for _, name := range names {
			if _, ok := s.Resources[name]; !ok {
				return false
			}
		}
		return true
	}
}

// set applies resources of one kind, all with the same content.
func (f *fixture) set(kind cache.Kind, content string, names ...string) {
	f.Helper()
	var list []cache.Resource
	for _, name := range names {
		r, err := cache.NewResource(name, wrapperspb.String(content))
		f.must(err)
		list = append(list, r)
	}
	f.Apply(cache.Batch{Set: map[cache.Kind][]cache.Resource{kind: list}})
}

// answer says of everything that is demanded that it does not exist, until the
// test ends.
func (f *fixture) answer() {
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			case <-f.DemandReady():
				d := f.TakeDemand()
				f.Apply(cache.Batch{Remove: d.Wanted})
				f.Evict(d.Dropped...)
			}
		}
	}()
	f.Cleanup(func() { close(done); <-ended })
}

func released() *cache.Cache {
	c := cache.New(cache.Config{})
	c.Release()
	return c
}
