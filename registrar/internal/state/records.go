package state

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"go.etcd.io/bbolt"
)

// unreadableSuffix names the bucket that keeps what could not be used.
const unreadableSuffix = ".unreadable"

// Records keeps values of one type as JSON in one bucket of state.db, which
// belongs to its one user. It is safe for concurrent use.
type Records[T any] struct {
	db     *bbolt.DB
	bucket string
	log    *slog.Logger
}

// OpenRecords makes the bucket when it is missing.
func OpenRecords[T any](db *bbolt.DB, bucket string, log *slog.Logger) (*Records[T], error) {
	var missing bool
	err := db.View(func(tx *bbolt.Tx) error {
		missing = tx.Bucket([]byte(bucket)) == nil
		return nil
	})
	if err == nil && missing { // a full disk must keep nobody from starting who has it
		err = db.Update(func(tx *bbolt.Tx) error {
			_, err := tx.CreateBucketIfNotExists([]byte(bucket))
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("make bucket %s in %s: %w", bucket, db.Path(), remedy(db.Path(), err))
	}
	return &Records[T]{db: db, bucket: bucket, log: log}, nil
}

// Save stores set and removes the keys in gone, all or nothing. When it returns
// nil both survive a power cut. Saves that run at once share one write.
func (r *Records[T]) Save(set map[string]T, gone ...string) error {
	encoded := make(map[string][]byte, len(set))
	for key, v := range set {
		b, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("encode %s of %s: %w", key, r.bucket, err)
		}
		encoded[key] = b
	}
	err := r.db.Batch(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte(r.bucket))
		for _, key := range gone {
			if err := b.Delete([]byte(key)); err != nil {
				return err
			}
		}
		for key, v := range encoded {
			if err := b.Put([]byte(key), v); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("save %s to %s: %w", r.bucket, r.db.Path(), remedy(r.db.Path(), err))
	}
	return nil
}

// Load returns what is stored, in key order. usable says of each value whether it
// can be taken. One that cannot, or cannot be read, is logged with its key and
// moved to a bucket of its own, so that one bad record loses nothing else.
func (r *Records[T]) Load(usable func(key string, v T) error) ([]T, error) {
	var out []T
	bad := map[string][]byte{}
	err := r.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte(r.bucket)).ForEach(func(k, v []byte) error {
			var value T
			err := json.Unmarshal(v, &value)
			if err == nil {
				err = usable(string(k), value)
			}
			if err != nil {
				r.log.Error("stored record is unusable and set aside", "key", string(k), "bucket", r.bucket+unreadableSuffix, "error", err)
				bad[string(k)] = slices.Clone(v)
				return nil
			}
			out = append(out, value)
			return nil
		})
	})
	if err == nil && len(bad) > 0 {
		err = r.setAside(bad)
	}
	if err != nil {
		return nil, fmt.Errorf("load %s from %s: %w", r.bucket, r.db.Path(), err)
	}
	return out, nil
}

func (r *Records[T]) setAside(bad map[string][]byte) error {
	return r.db.Update(func(tx *bbolt.Tx) error {
		aside, err := tx.CreateBucketIfNotExists([]byte(r.bucket + unreadableSuffix))
		if err != nil {
			return err
		}
		for _, key := range slices.Sorted(maps.Keys(bad)) {
			if err := aside.Put([]byte(key), bad[key]); err != nil {
				return err
			}
			if err := tx.Bucket([]byte(r.bucket)).Delete([]byte(key)); err != nil {
				return err
			}
		}
		return nil
	})
}
