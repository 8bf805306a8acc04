package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

const (
	// defaultLinger is how long a change waits for others that share its write to disk.
	defaultLinger = 20 * time.Millisecond
	// minRetry and maxRetry bound the pause after a failed write.
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// Options is what a Backend is made of.
type Options struct {
	// DB is the state file. The backend owns the bucket, and the one of the same
	// name with ".corrupt" behind it, and does not close the file.
	DB *bbolt.DB
	// Bucket is the bucket's name; empty is DefaultBucket.
	Bucket string
	// TrustDomain is the mesh's: what was stored under another one is dropped.
	TrustDomain string
	// Linger is how long a change waits for others that share its write to disk,
	// which is what a crash may lose; 0 is 20 ms.
	Linger time.Duration
	// MeshName returns a service's mesh name, which goes into the stored record;
	// the projection gives it.
	MeshName func(model.ServiceKey) string
	// Log takes what cannot be returned to a caller.
	Log *slog.Logger
}

// Backend implements registry.Backend. It is safe for concurrent use.
type Backend struct {
	db       *bbolt.DB
	bucket   string
	linger   time.Duration
	meshName func(model.ServiceKey) string
	log      *slog.Logger
	table    *registry.Table

	// wake has a token when something is unsaved.
	wake chan struct{}
	// closed is closed by Close; the writer then ends and closes done.
	closed, done chan struct{}
	closing      sync.Once
	lastSave     error // of Close; written within closing

	// saving is held over one write to disk, and taken before mu: whoever has it
	// knows that nothing is on its way.
	saving sync.Mutex

	mu sync.Mutex // guards what follows, and keeps unsaved in step with table
	// unsaved has what the file does not have yet: the stored form of a record,
	// nil for one that is gone.
	unsaved map[string][]byte
	stats   Stats
	failure error // of the last write; nil when it succeeded
	shut    bool
}

var _ registry.Backend = (*Backend)(nil)

// Stats are numbers for metrics and status.
type Stats struct {
	// Records is how many there are.
	Records int
	// Unsaved is how many records, and withdrawals, are not in the file yet.
	Unsaved int
	// FailedWrites counts since the start.
	FailedWrites uint64
	// Corrupt is how many records could not be read at the start.
	Corrupt int
}

// Open reads what is stored and starts the writer; Close ends it. It writes
// nothing, unless to move unreadable records aside, so that a full disk keeps no
// registrar from starting. The error says that the file cannot be read at all.
func Open(o Options) (*Backend, error) {
	b := newBackend(o)
	if err := b.load(o.TrustDomain); err != nil {
		return nil, fmt.Errorf("read endpoints from %s: %w", b.db.Path(), err)
	}
	go b.write()
	return b, nil
}

func newBackend(o Options) *Backend {
	return &Backend{
		db: o.DB, meshName: o.MeshName, log: o.Log,
		bucket: cmp.Or(o.Bucket, DefaultBucket), linger: cmp.Or(o.Linger, defaultLinger),
		table:  registry.NewTable(),
		wake:   make(chan struct{}, 1),
		closed: make(chan struct{}), done: make(chan struct{}),
		unsaved: make(map[string][]byte),
	}
}

// Publish implements registry.Backend.
func (b *Backend) Publish(ctx context.Context, ep model.Endpoint) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	se, err := registry.ToProto(ep, b.meshName(ep.Service))
	if err != nil {
		return err
	}
	stored, err := proto.MarshalOptions{Deterministic: true}.Marshal(se)
	if err != nil {
		return fmt.Errorf("record %q: %w", ep.UID, err)
	}
	return b.change(ep.UID, ep.Generation, stored, func() error { return b.table.Upsert(ep) })
}

// Withdraw implements registry.Backend.
func (b *Backend) Withdraw(ctx context.Context, uid string, generation uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return b.change(uid, generation, nil, func() error { return b.table.Delete(uid, generation) })
}

// change makes one change in memory and notes that it is to be stored. Both under
// one lock, so that of two changes of a record the later one is stored too.
func (b *Backend) change(uid string, generation uint64, stored []byte, apply func() error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut {
		return registry.ErrClosed
	}
	if err := apply(); err != nil {
		return fmt.Errorf("record %q generation %d: %w", uid, generation, err)
	}
	b.unsaved[uid] = stored
	b.poke()
	return nil
}

// poke wakes the writer.
func (b *Backend) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Watch implements registry.Backend.
func (b *Backend) Watch(ctx context.Context, sink func(registry.Event)) error {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-b.closed:
			cancel(registry.ErrClosed)
		case <-ended:
		}
	}()
	err := b.table.Watch(inner, sink)
	if ctx.Err() == nil && errors.Is(context.Cause(inner), registry.ErrClosed) {
		return registry.ErrClosed
	}
	return err
}

// Retain implements registry.Backend: every record is of this machine.
func (b *Backend) Retain(ctx context.Context, uids []string) error {
	keep := make(map[string]struct{}, len(uids))
	for _, uid := range uids {
		keep[uid] = struct{}{}
	}
	for _, ep := range b.Snapshot() {
		if _, ok := keep[ep.UID]; ok {
			continue
		}
		if err := b.Withdraw(ctx, ep.UID, ep.Generation); err == nil {
			b.log.Warn("endpoint of a pod that is not attached is withdrawn", "uid", ep.UID, "pod", ep.PodName)
		} else if !errors.Is(err, registry.ErrStale) {
			return err
		}
	}
	return nil
}

// Flush writes what is unsaved now to disk; when it returns nil, everything that
// was published or withdrawn before the call is there.
func (b *Backend) Flush() error { return b.save() }

// Snapshot returns copies of all records, ordered by UID.
func (b *Backend) Snapshot() []model.Endpoint { return b.table.Snapshot() }

// Stats returns the numbers of this moment.
func (b *Backend) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Records, s.Unsaved = b.table.Len(), len(b.unsaved)
	return s
}

// Health returns why the last write failed, with path and remedy, and nil when it
// succeeded. Records are served all the same.
func (b *Backend) Health() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failure == nil {
		return nil
	}
	err := fmt.Errorf("%d endpoints wait in memory to be stored in %s: %w", len(b.unsaved), b.db.Path(), b.failure)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; free space on its file system", err)
	case errors.Is(err, syscall.EROFS), errors.Is(err, bbolterrors.ErrDatabaseReadOnly):
		return fmt.Errorf("%w; make its file system writable", err)
	}
	return err
}

// Close ends every watch and the writer, and stores what is unsaved. The error
// says that it could not. Calls after the first return the same.
func (b *Backend) Close() error {
	b.closing.Do(func() {
		b.mu.Lock()
		b.shut = true
		b.mu.Unlock()
		close(b.closed)
		<-b.done
		if b.save() != nil {
			b.lastSave = b.Health()
		}
	})
	return b.lastSave
}
