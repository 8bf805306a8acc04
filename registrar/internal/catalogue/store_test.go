package catalogue

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
)

func open(tb testing.TB, path string, log *slog.Logger) (*Store, *bolt.DB) {
	tb.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = db.Close() })
	s, err := Open(db, "aether.internal", log)
	if err != nil {
		tb.Fatal(err)
	}
	return s, db
}

func entry(name string) projection.Entry {
	return projection.Entry{
		Service: model.ServiceKey{Namespace: "default", Name: name},
		VIP4:    netip.MustParseAddr("198.18.0.9"), VIP6: netip.MustParseAddr("fd70:6f72:746f::9"),
		Ports: []port.Port{{Number: 8080, Protocol: port.HTTP}, {Number: 9090, Protocol: port.H2}}, Default: 8080,
		Committed: port.Port{Number: 8080, Protocol: port.HTTP}, Flat: true, Step: projection.Splitting,
		Accounts: []string{"spiffe://aether.internal/ns/default/sa/a"}, Retired: []string{"x.aether.internal:9090"},
		LastSeen: time.Unix(1_800_000_000, 5).UTC(),
	}
}

var compare = cmp.Options{cmpopts.EquateComparable(netip.Addr{})}

func all(projection.Entry) error { return nil }

// Every field of an entry survives a restart, since bytes and unfinished steps
// depend on each (contract 4.8); what is gone is gone.
func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, db := open(t, path, slog.New(slog.DiscardHandler))
	if err := s.Save([]projection.Entry{entry("b"), entry("a"), entry("c")}, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(nil, []model.ServiceKey{entry("c").Service}); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	s, _ = open(t, path, slog.New(slog.DiscardHandler))
	got, err := s.Load(all)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]projection.Entry{entry("a"), entry("b")}, got, compare); d != "" {
		t.Errorf("loaded (-want +got):\n%s", d)
	}
}

// An entry that cannot be read, belongs to another key, or that the projection
// refuses is named in the log and kept aside; the others load, also the next time.
func TestUnusableEntries(t *testing.T) {
	var text strings.Builder
	s, db := open(t, filepath.Join(t.TempDir(), "state.db"), slog.New(slog.NewTextHandler(&text, nil)))
	if err := s.Save([]projection.Entry{entry("good"), entry("refused")}, nil); err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucketServices))
		return errors.Join(b.Put([]byte("default/broken"), []byte("{")), b.Put([]byte("default/moved"), b.Get([]byte("default/good"))))
	}); err != nil {
		t.Fatal(err)
	}
	usable := func(e projection.Entry) error {
		if e.Service.Name == "refused" {
			return errors.New("no port")
		}
		return nil
	}
	for range 2 {
		got, err := s.Load(usable)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff([]projection.Entry{entry("good")}, got, compare); d != "" {
			t.Errorf("loaded (-want +got):\n%s", d)
		}
	}
	for _, key := range []string{"default/broken", "default/moved", "default/refused"} {
		if strings.Count(text.String(), "key="+key) != 1 {
			t.Errorf("%s is not named once in the log:\n%s", key, text.String())
		}
		if err := db.View(func(tx *bolt.Tx) error {
			if tx.Bucket([]byte("services.unreadable")).Get([]byte(key)) == nil {
				return errors.New(key + " was lost")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}

// Services that were saved under another trust domain, wholly or in part, are dropped
// with one line: an account that this mesh does not know keeps every cluster of its
// service from being built. One that only has its address keeps it.
func TestFormerTrustDomain(t *testing.T) {
	var text strings.Builder
	s, _ := open(t, filepath.Join(t.TempDir(), "state.db"), slog.New(slog.NewTextHandler(&text, nil)))
	former, mixed := entry("former"), entry("mixed")
	former.Accounts = []string{"spiffe://mesh.corp/ns/default/sa/a"}
	mixed.Accounts = append(mixed.Accounts, former.Accounts...)
	released := projection.Entry{Service: model.ServiceKey{Namespace: "default", Name: "released"}, VIP4: entry("").VIP4, ReleasedAt: time.Unix(1, 0).UTC()}
	if err := s.Save([]projection.Entry{former, mixed, released, entry("own")}, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got, err := s.Load(all)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff([]projection.Entry{entry("own"), released}, got, compare); d != "" {
			t.Errorf("loaded (-want +got):\n%s", d)
		}
	}
	if n := strings.Count(text.String(), "\n"); n != 1 || !strings.Contains(text.String(), "services=2 trust_domain=aether.internal") {
		t.Errorf("logged: %s", text.String())
	}
}

// FuzzLoad reads whatever a bucket may hold. A value is loaded, and then saved and
// loaded again as the same, or it is set aside with its bytes; what is beside it is
// loaded either way.
func FuzzLoad(f *testing.F) {
	good, err := json.Marshal(entry("odd"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add("default/odd", good)
	f.Add("default/even", good)
	f.Add("default/odd", good[:len(good)/2])
	f.Add("/", []byte("{}"))
	f.Add("a/b/c", []byte(`{"Service":{"Namespace":"a","Name":"b/c"},"Ports":[{"Number":70000}]}`))
	f.Add("default/odd", []byte(`{"Service":{"Namespace":"default","Name":"odd"},"Accounts":[""]}`))
	f.Add("\xff", []byte(`{"VIP4":"::1%eth0","LastSeen":"0000-00-00T00:00:00Z","Step":-1}`))
	s, db := open(f, filepath.Join(f.TempDir(), "state.db"), slog.New(slog.DiscardHandler))
	db.NoSync, db.MaxBatchDelay = true, 0
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		beside := entry("beside")
		if key == "" || len(key) > bolt.MaxKeySize || key == beside.Service.String() {
			return
		}
		if err := s.Save([]projection.Entry{beside}, nil); err != nil {
			t.Fatal(err)
		}
		if err := db.Update(func(tx *bolt.Tx) error { return tx.Bucket([]byte(bucketServices)).Put([]byte(key), value) }); err != nil {
			t.Fatal(err)
		}
		defer empty(t, db)
		got, err := s.Load(all)
		if err != nil {
			t.Fatal(err)
		}
		rest := slices.DeleteFunc(slices.Clone(got), func(e projection.Entry) bool { return e.Service.String() == key })
		if d := cmp.Diff([]projection.Entry{beside}, rest, compare); d != "" {
			t.Fatalf("what is beside it (-want +got):\n%s", d)
		}
		if len(got) == 1 {
			var e projection.Entry
			if json.Unmarshal(value, &e) == nil && s.former(e) {
				return // of another trust domain, and dropped
			}
			if aside := read(t, db, bucketServices+".unreadable", key); !bytes.Equal(aside, value) {
				t.Fatalf("set aside %q, was %q", aside, value)
			}
			return
		}
		if err := s.Save(got, nil); err != nil {
			t.Fatal(err)
		}
		if again, err := s.Load(all); err != nil || cmp.Diff(got, again, compare) != "" {
			t.Fatalf("loaded again: %v\n%s", err, cmp.Diff(got, again, compare))
		}
	})
}

// read returns a copy of a value, nil if there is none.
func read(t *testing.T, db *bolt.DB, bucket, key string) (value []byte) {
	t.Helper()
	if err := db.View(func(tx *bolt.Tx) error {
		if b := tx.Bucket([]byte(bucket)); b != nil {
			value = bytes.Clone(b.Get([]byte(key)))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return value
}

// empty empties all buckets.
func empty(t *testing.T, db *bolt.DB) {
	t.Helper()
	if err := db.Update(func(tx *bolt.Tx) error {
		for _, bucket := range []string{bucketServices, bucketServices + ".unreadable"} {
			b := tx.Bucket([]byte(bucket))
			if b == nil {
				continue
			}
			var keys [][]byte
			if err := b.ForEach(func(k, _ []byte) error { keys = append(keys, bytes.Clone(k)); return nil }); err != nil {
				return err
			}
			for _, k := range keys {
				if err := b.Delete(k); err != nil {
					return err
				}
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
