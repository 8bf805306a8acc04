package catalogue

import (
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
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

func open(t *testing.T, path string, log *slog.Logger) (*Store, *bolt.DB) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	s, err := Open(db, log)
	if err != nil {
		t.Fatal(err)
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
