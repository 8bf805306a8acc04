package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/embedded"
)

const (
	// bucket holds the saved records in state.db.
	bucket = "kubernetes.endpoints"
	// linger is how much of other nodes' changes a crash may lose: a snapshot is only
	// read when the API server is away at the next start.
	linger = 2 * time.Second
	// defaultPatience is how long a start waits for a complete list before it serves
	// the snapshot.
	defaultPatience = 5 * time.Second
	// writers is how many records are written at once.
	writers = 8
	// minRetry and maxRetry bound the pause after a failed write of a record.
	minRetry = 100 * time.Millisecond
	maxRetry = 30 * time.Second
	// refusedPause is how long what the API server refuses is not tried again.
	refusedPause = 5 * time.Minute
)

// Options is what a Backend is made of.
type Options struct {
	// Config says where the API server is and who we are there.
	Config *rest.Config
	// Node is the name of this node; every record that is published is of it.
	Node string
	// TrustDomain is the mesh's; a record of another one is left out.
	TrustDomain string
	// ServiceRanges are those of the mesh's service addresses; a record that has one of
	// them is left out.
	ServiceRanges model.Ranges
	// DB is the state file, in which the backend owns the buckets whose names begin
	// with "kubernetes.". It does not close it.
	DB *bbolt.DB
	// MeshName returns a service's mesh name, which goes into the object for people.
	MeshName func(model.ServiceKey) string
	// Patience is how long a start waits for the API server before it serves the
	// snapshot; 0 is five seconds.
	Patience time.Duration
	// Leaving reports whether the mesh is being taken out of the cluster: then objects and
	// rights go, and nothing is wrong. It asks nobody; nil is never.
	Leaving func() bool
	// Log takes what cannot be returned to a caller.
	Log *slog.Logger
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer
}

// Backend implements registry.Backend. It is safe for concurrent use.
type Backend struct {
	node        string
	host        string // of the API server, for people
	trustDomain string // the mesh's
	services    model.Ranges
	meshName    func(model.ServiceKey) string
	log         *slog.Logger
	isLeaving   func() bool // may be nil
	// refusedPause is the constant, but in tests.
	refusedPause time.Duration
	client       *client
	metrics      metrics
	// local has every record, of this node and of others, and saves them.
	local    *embedded.Backend
	snapshot snapshot
	// queue has the keys of objects of this node that may differ from what they
	// should be.
	queue workqueue.TypedRateLimitingInterface[types.NamespacedName]
	// ready is closed when there is something complete to serve.
	ready chan struct{}
	// stop ends the goroutines, running waits for them.
	stop    context.CancelFunc
	running sync.WaitGroup
	closing sync.Once
	closed  chan struct{}

	mu sync.Mutex // guards what follows; taken before anything of local
	// own are this node's objects: those that are here or should be.
	own map[types.NamespacedName]*ownObject
	// keys finds the own object of a UID.
	keys map[string]types.NamespacedName
	// attached are the UIDs that Retain named and that were not published yet; nil
	// before Retain.
	attached map[string]struct{}
	// objects of other nodes.
	foreign foreignObjects
	link    link
	// farewell: it was said that the mesh is leaving.
	farewell bool
}

var _ registry.Backend = (*Backend)(nil)

// Open reads the snapshot and starts to read and write the API server; Close ends
// it. That the server does not answer is no error: Health says so.
func Open(o Options) (*Backend, error) {
	b, err := newBackend(o)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.running.Go(func() { b.read(ctx) })
	for range writers {
		b.running.Go(func() { b.write(ctx) })
	}
	patience := o.Patience
	if patience == 0 {
		patience = defaultPatience
	}
	b.running.Go(func() { b.awaitList(ctx, patience) })
	return b, nil
}

// leaving reports whether the mesh is being taken out of the cluster, and says so once.
// The caller holds mu.
func (b *Backend) leaving() bool {
	if b.isLeaving == nil || !b.isLeaving() {
		b.farewell = false
		return false
	}
	if !b.farewell {
		b.farewell = true
		b.log.Info("the mesh is being removed from the cluster: its ServiceEndpoints and the right to write them go, and are not put back")
	}
	return true
}

func newBackend(o Options) (*Backend, error) {
	b := &Backend{
		node: o.Node, host: o.Config.Host, trustDomain: o.TrustDomain, services: o.ServiceRanges, meshName: o.MeshName, log: o.Log, isLeaving: o.Leaving, metrics: newMetrics(),
		snapshot: snapshot{db: o.DB}, refusedPause: refusedPause,
		ready: make(chan struct{}), closed: make(chan struct{}),
		own: make(map[types.NamespacedName]*ownObject), keys: make(map[string]types.NamespacedName),
		foreign: newForeignObjects(),
		link:    link{since: time.Now(), err: errors.New("no answer yet")},
	}
	var err error
	if b.client, err = newClient(o.Config); err != nil {
		return nil, err
	}
	if b.link.saved, err = b.snapshot.complete(); err != nil {
		return nil, err
	}
	b.local, err = embedded.Open(embedded.Options{
		DB: o.DB, Bucket: bucket, TrustDomain: o.TrustDomain, Linger: linger, MeshName: o.MeshName, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	b.queue = workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](minRetry, maxRetry))
	if err := b.register(o.Metrics); err != nil {
		return nil, errors.Join(err, b.local.Close())
	}
	return b, nil
}

// awaitList serves the snapshot, if there is one, when no complete list came in time.
func (b *Backend) awaitList(ctx context.Context, patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-b.ready:
		return
	case <-timer.C:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.link.listed:
	case b.link.saved:
		b.log.Warn("no list of endpoints from the Kubernetes API; those of the last run are served and may be outdated",
			"server", b.host, "endpoints", b.local.Stats().Records, "error", b.link.err)
		b.serveNow()
	default:
		b.log.Error("no list of endpoints from the Kubernetes API, and none is saved; nothing is served until it answers",
			"server", b.host, "error", b.link.err)
	}
}

// serveNow lets the watches begin.
func (b *Backend) serveNow() {
	if !b.link.serving {
		b.link.serving = true
		close(b.ready)
	}
}

// Publish implements registry.Backend. The record must be of this node.
func (b *Backend) Publish(ctx context.Context, ep model.Endpoint) error {
	if ep.Node != b.node {
		return fmt.Errorf("record %q is of node %q; this registrar publishes those of %q", ep.UID, ep.Node, b.node)
	}
	if _, err := objectOf(ep, b.meshName(ep.Service)); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.local.Publish(ctx, ep); err != nil {
		return err
	}
	b.want(ep.Clone())
	return nil
}

// Withdraw implements registry.Backend.
func (b *Backend) Withdraw(ctx context.Context, uid string, generation uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.local.Withdraw(ctx, uid, generation); err != nil {
		return err
	}
	delete(b.attached, uid)
	if key, ok := b.keys[uid]; ok {
		b.dismiss(key)
	}
	return nil
}

// Retain implements registry.Backend. What the API server still has of this node
// and is not among uids is deleted, now or when it answers again.
func (b *Backend) Retain(ctx context.Context, uids []string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attached = make(map[string]struct{}, len(uids))
	for _, uid := range uids {
		b.attached[uid] = struct{}{}
	}
	for key, o := range b.own {
		if b.ghost(o) {
			b.ghostFound(key, o) //nolint:contextcheck // the local table follows, whatever becomes of the caller
		}
	}
	for _, ep := range b.local.Snapshot() {
		if _, published := b.keys[ep.UID]; published || ep.Node != b.node {
			continue
		}
		if _, ok := b.attached[ep.UID]; ok {
			continue
		}
		if err := b.local.Withdraw(ctx, ep.UID, ep.Generation); err != nil {
			return err
		}
	}
	return nil
}

// Watch implements registry.Backend. It delivers nothing before there is a complete
// list or a snapshot to serve in its place.
func (b *Backend) Watch(ctx context.Context, sink func(registry.Event)) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-b.closed:
		return registry.ErrClosed
	case <-b.ready:
	}
	return b.local.Watch(ctx, sink)
}

// Snapshot returns copies of all records, ordered by UID.
func (b *Backend) Snapshot() []model.Endpoint { return b.local.Snapshot() }

// Stats returns the numbers of the local table.
func (b *Backend) Stats() embedded.Stats { return b.local.Stats() }

// Health returns what is wrong, with the remedy, and nil when the API server has
// what is here and the other way round. Records are served all the same.
func (b *Backend) Health() error {
	return errors.Join(b.condition().problem(b.host), b.local.Health())
}

// Close ends every watch, the reader and the writers, and saves what the local table
// has. What the API server did not get is published again by the next start. The
// error says that it could not be saved. Calls after the first return the same.
func (b *Backend) Close() error {
	b.closing.Do(func() {
		close(b.closed)
		b.stop()
		b.queue.ShutDown()
		b.running.Wait()
		b.client.close()
	})
	return b.local.Close()
}
