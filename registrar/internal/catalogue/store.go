// Package catalogue keeps the projection's entries in state.db: the addresses,
// last ports, pinned accounts and unfinished steps of services, so that a restart
// gives the same names, the same addresses and the same bytes.
//
// The publisher saves; app loads once at start. Nobody else touches the bucket.
package catalogue

import (
	"encoding/json"
	"fmt"
	"log/slog"

	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
)

// The buckets of state.db that this package owns.
const (
	bucketServices   = "services"
	bucketUnreadable = "services.unreadable"
)

// Store implements publisher.Catalogue over bbolt: key namespace/name, value JSON
// of projection.Entry. It is safe for concurrent use.
type Store struct {
	db *bolt.DB
}

// Open makes the bucket when it is missing.
func Open(db *bolt.DB) (*Store, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists([]byte(bucketServices))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make bucket %s in %s: %w", bucketServices, db.Path(), err)
	}
	return &Store{db: db}, nil
}

// Save stores entries and removes those of gone, all or nothing.
func (s *Store) Save(entries []projection.Entry, gone []model.ServiceKey) error {
	err := s.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucketServices))
		for _, e := range entries {
			v, err := json.Marshal(e)
			if err != nil {
				return fmt.Errorf("encode service %s: %w", e.Service, err)
			}
			if err := b.Put([]byte(e.Service.String()), v); err != nil {
				return err
			}
		}
		for _, key := range gone {
			if err := b.Delete([]byte(key.String())); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("save %d services to %s: %w", len(entries)+len(gone), s.db.Path(), err)
	}
	return nil
}

// Load returns what is saved, in key order. usable says whether an entry can be
// taken; one that cannot, or cannot be read, is logged with its key and set aside
// in its own bucket, so that it loses nothing else.
func (s *Store) Load(log *slog.Logger, usable func(projection.Entry) error) ([]projection.Entry, error) {
	var entries []projection.Entry
	err := s.db.Update(func(tx *bolt.Tx) error {
		bad := map[string][]byte{}
		err := tx.Bucket([]byte(bucketServices)).ForEach(func(k, v []byte) error {
			var e projection.Entry
			err := json.Unmarshal(v, &e)
			if err == nil && e.Service.String() != string(k) {
				err = fmt.Errorf("it names the service %s", e.Service)
			}
			if err == nil {
				err = usable(e)
			}
			if err != nil {
				log.Error("saved service is unusable, set aside", "service", string(k), "bucket", bucketUnreadable, "error", err)
				bad[string(k)] = append([]byte(nil), v...)
				return nil
			}
			entries = append(entries, e)
			return nil
		})
		if err != nil {
			return err
		}
		return setAside(tx, bad)
	})
	if err != nil {
		return nil, fmt.Errorf("load services from %s: %w", s.db.Path(), err)
	}
	return entries, nil
}

func setAside(tx *bolt.Tx, bad map[string][]byte) error {
	if len(bad) == 0 {
		return nil
	}
	aside, err := tx.CreateBucketIfNotExists([]byte(bucketUnreadable))
	if err != nil {
		return err
	}
	for k, v := range bad {
		if err := aside.Put([]byte(k), v); err != nil {
			return err
		}
		if err := tx.Bucket([]byte(bucketServices)).Delete([]byte(k)); err != nil {
			return err
		}
	}
	return nil
}
