package embedded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/bbolt"
	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/registrytest"
	"github.com/portolan-mesh/portolan/scripts/disktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func diff(want, got any) string {
	return cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
}

// must fails the test on an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// database opens a bbolt file, which is closed at the end.
func database(tb testing.TB, path string) *bbolt.DB {
	tb.Helper()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	must(tb, err)
	tb.Cleanup(func() { _ = db.Close() })
	return db
}

// backend opens a Backend over db, which is closed at the end; what it logs goes
// to the buffer.
func backend(tb testing.TB, db *bbolt.DB) (*Backend, *bytes.Buffer) {
	tb.Helper()
	logged := &bytes.Buffer{}
	b, err := Open(Options{
		DB: db, TrustDomain: "aether.internal", Log: slog.New(slog.NewTextHandler(logged, nil)),
		MeshName: func(k model.ServiceKey) string { return k.Name + "." + k.Namespace + ".aether.internal" },
	})
	must(tb, err)
	tb.Cleanup(func() { _ = b.Close() })
	return b, logged
}

// What every backend promises holds with a file, too.
func TestConformance(t *testing.T) {
	registrytest.Conform(t, func(t *testing.T) registry.Backend {
		t.Helper()
		b, _ := backend(t, database(t, filepath.Join(t.TempDir(), "state.db")))
		return b
	})
}

// What was published or withdrawn is there, equal in every field, after the
// registrar was stopped and started (contract 4.7, 4.8); generations go on.
func TestSurvivesRestart(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	first, _ := backend(t, db)
	client := registrytest.Endpoint("client", 3)
	client.Default, client.Ports = 0, nil
	for _, ep := range []model.Endpoint{registrytest.Endpoint("b", 1), client, registrytest.Endpoint("gone", 1), registrytest.Endpoint("a", 7)} {
		must(t, first.Publish(t.Context(), ep))
	}
	must(t, first.Publish(t.Context(), registrytest.Endpoint("b", 2)))
	must(t, first.Withdraw(t.Context(), "gone", 2))
	must(t, first.Close())

	second, logged := backend(t, db)
	if d := diff([]model.Endpoint{registrytest.Endpoint("a", 7), registrytest.Endpoint("b", 2), client}, second.Snapshot()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if err := second.Publish(t.Context(), registrytest.Endpoint("a", 7)); !errors.Is(err, registry.ErrStale) {
		t.Errorf("a generation from before the restart: %v", err)
	}
	must(t, second.Publish(t.Context(), registrytest.Endpoint("a", 8)))
	if logged.Len() > 0 {
		t.Errorf("logged: %s", logged)
	}
}

// Records of pods that are not attached any more are withdrawn, for good, and those
// of attached ones stay as they are (contract 4.8).
func TestRetain(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	first, _ := backend(t, db)
	for _, uid := range []string{"ghost", "a", "b"} {
		must(t, first.Publish(t.Context(), registrytest.Endpoint(uid, 4)))
	}
	must(t, first.Retain(t.Context(), []string{"b", "never seen", "a"}))
	if d := diff([]model.Endpoint{registrytest.Endpoint("a", 4), registrytest.Endpoint("b", 4)}, first.Snapshot()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if err := first.Publish(t.Context(), registrytest.Endpoint("ghost", 4)); !errors.Is(err, registry.ErrStale) {
		t.Errorf("the ghost comes back: %v", err)
	}
	must(t, first.Close())
	if again, _ := backend(t, db); len(again.Snapshot()) != 2 {
		t.Errorf("after a restart: %+v", again.Snapshot())
	}
}

// Flush returns when what was published is in the file, also when a write was
// under way; backends with buckets of their own do not see each other's records.
func TestFlush(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	open := func(bucket string) *Backend {
		b, err := Open(Options{
			DB: db, Bucket: bucket, TrustDomain: "aether.internal", Linger: time.Hour, Log: slog.New(slog.DiscardHandler),
			MeshName: func(model.ServiceKey) string { return "" },
		})
		must(t, err)
		t.Cleanup(func() { _ = b.Close() })
		return b
	}
	one, other := open("one"), open("other")
	for i := range 50 {
		uid := fmt.Sprint(i)
		must(t, one.Publish(t.Context(), registrytest.Endpoint(uid, 1)))
		must(t, one.Flush())
		must(t, db.View(func(tx *bbolt.Tx) error {
			if tx.Bucket([]byte("one")).Get([]byte(uid)) == nil {
				t.Errorf("%s is not in the file", uid)
			}
			return nil
		}))
	}
	if n := len(open("one").Snapshot()); n != 50 || len(other.Snapshot()) != 0 || len(open("other").Snapshot()) != 0 {
		t.Errorf("%d of 50 are in the file; of the other bucket %d", n, len(other.Snapshot()))
	}
}

// The stored form is the record of contract 3 under its UID, byte for byte the same
// for the same record (I5).
func TestStoredForm(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	var before []byte
	for i := range uint64(3) {
		b, _ := backend(t, db)
		ep := registrytest.Endpoint("a", 1)
		for k := range 20 {
			ep.Metadata[fmt.Sprint("k", k)] = "v"
		}
		ep.Generation += i
		must(t, b.Publish(t.Context(), ep))
		must(t, b.Close())
		must(t, db.View(func(tx *bbolt.Tx) error {
			stored := bytes.Clone(tx.Bucket([]byte("endpoints")).Get([]byte("a")))
			ep, leftOut, err := decode("a", stored)
			if err != nil || leftOut != nil || ep.Generation != 1+i || !bytes.Contains(stored, []byte("payments.shop.aether.internal")) {
				t.Errorf("%+v, %v, %v", ep, leftOut, err)
			}
			stored = bytes.ReplaceAll(stored, []byte{0x98, 0x01, byte(1 + i)}, []byte{0x98, 0x01, 1}) // the generation
			if before != nil && !bytes.Equal(before, stored) {
				t.Errorf("the same record has other bytes")
			}
			before = stored
			return nil
		}))
	}
}

// A change is seen by watchers at once, while the disk is stuck, and publishers do
// not wait for it either.
func TestPublishDoesNotWaitForDisk(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	b, _ := backend(t, db)
	stuck, err := db.Begin(true) // nobody else can write until it ends
	must(t, err)
	seen := make(chan registry.Event)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- b.Watch(ctx, func(ev registry.Event) { seen <- ev }) }()
	if ev := <-seen; ev.Kind != registry.Complete {
		t.Errorf("got %v", ev.Kind)
	}
	for g := range uint64(50) {
		must(t, b.Publish(t.Context(), registrytest.Endpoint("a", g+1)))
		if ev := <-seen; ev.Kind != registry.Upsert || ev.Generation != g+1 {
			t.Fatalf("got %v %d, want generation %d", ev.Kind, ev.Generation, g+1)
		}
	}
	must(t, b.Withdraw(t.Context(), "a", 60))
	if ev := <-seen; ev.Kind != registry.Delete {
		t.Errorf("got %v", ev.Kind)
	}
	must(t, b.Publish(t.Context(), registrytest.Endpoint("b", 1)))
	<-seen
	must(t, stuck.Rollback())
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ended with %v", err)
	}
	must(t, b.Close())
	again, _ := backend(t, db)
	if d := diff([]model.Endpoint{registrytest.Endpoint("b", 1)}, again.Snapshot()); d != "" {
		t.Errorf("stored in the end (-want +got):\n%s", d)
	}
}

// Many changes at once share few writes to disk.
func TestBatches(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	synctest.Test(t, func(t *testing.T) {
		b, _ := backend(t, db)
		before := db.Stats()
		for g := range uint64(500) {
			must(t, b.Publish(t.Context(), registrytest.Endpoint(fmt.Sprint(g%50), g+1)))
		}
		time.Sleep(10 * defaultLinger)
		synctest.Wait()
		if s := b.Stats(); s != (Stats{Records: 50}) {
			t.Errorf("%+v", s)
		}
		stats := db.Stats()
		if diff := stats.Sub(&before); diff.TxStats.GetWrite() > 60 {
			t.Errorf("500 changes took %d page writes", diff.TxStats.GetWrite())
		}
		must(t, b.Close())
	})
}

// A record that is no record at all is refused and reaches nobody.
func TestPublishRefuses(t *testing.T) {
	b, _ := backend(t, database(t, filepath.Join(t.TempDir(), "state.db")))
	bad := registrytest.Endpoint("a", 1)
	bad.Identity.TrustDomain = ""
	if err := b.Publish(t.Context(), bad); err == nil || err.Error() != `record "a": trust_domain or service_account is missing` {
		t.Errorf("got %v", err)
	}
	must(t, b.Publish(t.Context(), registrytest.Endpoint("a", 5)))
	if err := b.Publish(t.Context(), registrytest.Endpoint("a", 4)); !errors.Is(err, registry.ErrStale) || !strings.Contains(err.Error(), `record "a" generation 4`) {
		t.Errorf("got %v", err)
	}
	must(t, b.Withdraw(t.Context(), "unknown", 1))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := errors.Join(b.Publish(ended, registrytest.Endpoint("b", 1)), b.Withdraw(ended, "a", 9)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if list := b.Snapshot(); len(list) != 1 || list[0].Generation != 5 {
		t.Errorf("records: %+v", list)
	}
}

// Stored records that cannot be read are named, kept in a bucket of their own, and
// do not keep the others from being served.
func TestCorruptRecords(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	first, _ := backend(t, db)
	must(t, first.Publish(t.Context(), registrytest.Endpoint("good", 1)))
	must(t, first.Publish(t.Context(), registrytest.Endpoint("newer", 1)))
	must(t, first.Close())
	bad := map[string][]byte{"empty": {}, "rubbish": []byte("\xff\xff\xff\xff"), "meaningless": []byte("\x0a\x03abc")}
	must(t, db.Update(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket([]byte(DefaultBucket))
		for uid, value := range bad {
			must(t, bucket.Put([]byte(uid), value))
		}
		// A protocol of a newer version, appended as one more port_protocols entry.
		return bucket.Put([]byte("newer"), append(bytes.Clone(bucket.Get([]byte("newer"))), "\x62\x07\x08\x90\x3f\x12\x02h3"...))
	}))

	second, logged := backend(t, db)
	want := []model.Endpoint{registrytest.Endpoint("good", 1), registrytest.Endpoint("newer", 1)}
	want[1].Ports[1].Protocol = port.Unknown
	if d := diff(want, second.Snapshot()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	for _, text := range []string{"uid=empty", "uid=rubbish", "uid=meaningless", `level=WARN msg="part of a stored endpoint cannot be used" uid=newer`, DefaultBucket + corruptSuffix} {
		if !strings.Contains(logged.String(), text) {
			t.Errorf("the log does not say %q:\n%s", text, logged)
		}
	}
	if n := second.Stats().Corrupt; n != 3 {
		t.Errorf("%d are counted", n)
	}
	must(t, second.Close())
	must(t, db.View(func(tx *bbolt.Tx) error {
		for uid, value := range bad {
			if kept := tx.Bucket([]byte(DefaultBucket + corruptSuffix)).Get([]byte(uid)); !bytes.Equal(kept, value) || kept == nil {
				t.Errorf("%s was kept as %q", uid, kept)
			}
		}
		return nil
	}))
	if third, _ := backend(t, db); third.Stats().Corrupt != 0 || len(third.Snapshot()) != 2 {
		t.Errorf("at the next start: %+v", third.Stats())
	}
}

// What a mesh of another trust domain has stored is dropped with one line, and its
// pods' records of this mesh are stored in its place.
func TestFormerTrustDomain(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	first, err := Open(Options{
		DB: db, TrustDomain: "mesh.corp", Log: slog.New(slog.DiscardHandler), MeshName: func(model.ServiceKey) string { return "" },
	})
	must(t, err)
	for _, uid := range []string{"back", "dead"} {
		ep := registrytest.Endpoint(uid, 9)
		ep.Identity.TrustDomain = "mesh.corp"
		must(t, first.Publish(t.Context(), ep))
	}
	must(t, first.Close())

	second, logged := backend(t, db)
	if list := second.Snapshot(); len(list) != 0 {
		t.Errorf("served: %+v", list)
	}
	if n := strings.Count(logged.String(), "\n"); n != 1 || !strings.Contains(logged.String(), "records=2 trust_domain=aether.internal") {
		t.Errorf("logged: %s", logged)
	}
	must(t, second.Publish(t.Context(), registrytest.Endpoint("back", 1)))
	must(t, second.Close())
	third, logged := backend(t, db)
	if d := diff([]model.Endpoint{registrytest.Endpoint("back", 1)}, third.Snapshot()); d != "" || logged.Len() > 0 {
		t.Errorf("at the next start: -want +got:\n%s\nlogged: %s", d, logged)
	}
}

// A full disk loses nothing and holds up nothing: records are served, Health names
// path and remedy, and they are stored once there is room again.
func TestDiskFull(t *testing.T) {
	dir := disktest.Mount(t, "size=256k")
	db := database(t, filepath.Join(dir, "state.db"))
	const n = 2000
	var logged *bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		var b *Backend
		b, logged = backend(t, db)
		for i := range n {
			must(t, b.Publish(t.Context(), registrytest.Endpoint(fmt.Sprintf("%04d", i), 1)))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		err := b.Health()
		if err == nil || !errors.Is(err, syscall.ENOSPC) || !strings.HasPrefix(err.Error(), "2000 endpoints wait in memory to be stored in "+db.Path()) ||
			!strings.HasSuffix(err.Error(), "free space on its file system") {
			t.Errorf("Health: %v", err)
		}
		if s := b.Stats(); s.Records != n || s.Unsaved != n || s.FailedWrites < 3 || s.FailedWrites > 10 {
			t.Errorf("%+v", s)
		}
		must(t, b.Withdraw(t.Context(), "0000", 2))
		disktest.Remount(t, dir, 0, "size=64m")
		time.Sleep(2 * maxRetry)
		synctest.Wait()
		if err, s := b.Health(), b.Stats(); err != nil || s.Unsaved != 0 || s.Records != n-1 {
			t.Errorf("with room again: %v, %+v", err, s)
		}
		must(t, b.Close())
	})
	if text := logged.String(); strings.Count(text, "level=ERROR") != 1 || strings.Count(text, "stored again") != 1 {
		t.Errorf("the trouble is not logged once, nor its end once:\n%s", text)
	}
	if again, _ := backend(t, db); len(again.Snapshot()) != n-1 {
		t.Errorf("%d of %d are stored", len(again.Snapshot()), n-1)
	}
}

// What changes while a write is under way that fails is not put back by what that
// write had.
func TestFailedWriteKeepsNewer(t *testing.T) {
	db := database(t, filepath.Join(disktest.Mount(t, "size=64k"), "state.db"))
	b := newBackend(Options{DB: db, Log: slog.New(slog.DiscardHandler), MeshName: func(model.ServiceKey) string { return "" }})
	for i := range 500 { // more than there is room for
		must(t, b.Publish(t.Context(), registrytest.Endpoint(fmt.Sprint(i), 1)))
	}
	stuck, err := db.Begin(true)
	must(t, err)
	saved := make(chan error)
	go func() { saved <- b.save() }()
	for b.Stats().Unsaved > 0 { // until the write has its batch
		runtime.Gosched()
	}
	must(t, b.Publish(t.Context(), registrytest.Endpoint("7", 2)))
	must(t, b.Withdraw(t.Context(), "8", 2))
	must(t, stuck.Rollback())
	if err := <-saved; !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the write did not fail: %v", err)
	}
	ep, _, err := decode("7", b.unsaved["7"])
	gone, noted := b.unsaved["8"]
	if err != nil || ep.Generation != 2 || !noted || gone != nil || len(b.unsaved) != 500 {
		t.Errorf("unsaved: generation %d of 7 (%v), withdrawal of 8 %v, %d in all", ep.Generation, err, noted && gone == nil, len(b.unsaved))
	}
}

// A file that can only be read is said so, and closing tells what would be lost.
func TestReadOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	writable := database(t, path)
	first, _ := backend(t, writable)
	must(t, first.Publish(t.Context(), registrytest.Endpoint("a", 1)))
	must(t, first.Close())
	must(t, writable.Close())
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	must(t, err)
	defer func() { _ = db.Close() }()
	b, _ := backend(t, db)
	if d := diff([]model.Endpoint{registrytest.Endpoint("a", 1)}, b.Snapshot()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	must(t, b.Publish(t.Context(), registrytest.Endpoint("b", 1)))
	for range 2 {
		if err := b.Close(); err == nil || !strings.HasPrefix(err.Error(), "1 endpoints wait in memory to be stored in "+path) || !strings.HasSuffix(err.Error(), "make its file system writable") {
			t.Errorf("Close: %v", err)
		}
	}
}

// Whatever publishers race for the same records, the file holds in the end what the
// memory and every watcher hold (MESH-29, MESH-24, XDS-46).
func TestInterleavings(t *testing.T) {
	db := database(t, filepath.Join(t.TempDir(), "state.db"))
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) { interleave(t, db, seed) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func interleave(t *testing.T, db *bbolt.DB, seed uint64) {
	t.Helper()
	b, _ := backend(t, db)
	const uids = 10
	var next [uids]uint64
	for _, ep := range b.Snapshot() { // of the seed before: this is a restart
		var i int
		_, err := fmt.Sscan(ep.UID, &i)
		must(t, err)
		next[i] = ep.Generation
	}
	var mu sync.Mutex
	var writing sync.WaitGroup
	for p := range uint64(4) {
		writing.Go(func() {
			random := rand.New(rand.NewPCG(seed, p))
			for range 60 {
				i := random.IntN(uids)
				mu.Lock()
				next[i]++
				generation := next[i]
				mu.Unlock()
				time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
				var err error
				if random.IntN(3) == 0 {
					err = b.Withdraw(t.Context(), fmt.Sprint(i), generation)
				} else {
					err = b.Publish(t.Context(), registrytest.Endpoint(fmt.Sprint(i), generation))
				}
				if err != nil && !errors.Is(err, registry.ErrStale) {
					t.Error(err)
				}
			}
		})
	}
	views := make([]map[string]model.Endpoint, 3)
	for n := range views {
		view := map[string]model.Endpoint{}
		views[n] = view
		go func() {
			_ = b.Watch(t.Context(), func(ev registry.Event) {
				time.Sleep(time.Duration(n*10) * time.Millisecond)
				switch ev.Kind {
				case registry.Upsert:
					view[ev.UID] = ev.Endpoint
				case registry.Delete:
					delete(view, ev.UID)
				case registry.Complete:
				}
			})
		}()
	}
	writing.Wait()
	time.Sleep(time.Minute)
	synctest.Wait()
	memory := map[string]model.Endpoint{}
	for _, ep := range b.Snapshot() {
		memory[ep.UID] = ep
	}
	must(t, b.Close())
	synctest.Wait()
	for n, view := range views {
		if d := diff(memory, view); d != "" {
			t.Errorf("watcher %d (-memory +view):\n%s", n, d)
		}
	}
	stored := map[string]model.Endpoint{}
	must(t, db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte(DefaultBucket)).ForEach(func(key, value []byte) error {
			ep, _, err := decode(string(key), value)
			stored[string(key)] = ep
			return err
		})
	}))
	if d := diff(memory, stored); d != "" {
		t.Errorf("-memory +file:\n%s", d)
	}
}

// BenchmarkPublish is what a publisher pays, with the disk behind it.
func BenchmarkPublish(b *testing.B) {
	backend, _ := backend(b, database(b, filepath.Join(b.TempDir(), "state.db")))
	ep := registrytest.Endpoint("a", 0)
	b.ReportAllocs()
	for b.Loop() {
		ep.Generation++
		must(b, backend.Publish(b.Context(), ep))
	}
}

// BenchmarkOpen is what a start costs with 10,000 records.
func BenchmarkOpen(b *testing.B) {
	db := database(b, filepath.Join(b.TempDir(), "state.db"))
	first, _ := backend(b, db)
	for i := range 10_000 {
		must(b, first.Publish(b.Context(), registrytest.Endpoint(fmt.Sprint(i), 1)))
	}
	must(b, first.Close())
	for b.Loop() {
		again, err := Open(Options{
			DB: db, TrustDomain: "aether.internal", Log: slog.New(slog.DiscardHandler),
			MeshName: func(model.ServiceKey) string { return "" },
		})
		must(b, err)
		must(b, again.Close())
	}
}
