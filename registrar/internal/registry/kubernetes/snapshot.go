package kubernetes

import (
	"fmt"

	"go.etcd.io/bbolt"
)

// snapshot notes in state.db that the bucket of records was complete once: what is
// in it before that is a part, which must not be served (contract 4.8).
type snapshot struct{ db *bbolt.DB }

// The bucket and its one key.
const (
	bucketSnapshot = "kubernetes.snapshot"
	keyComplete    = "complete"
)

// complete says whether there is a snapshot.
func (s snapshot) complete() (bool, error) {
	var complete bool
	err := s.db.View(func(tx *bbolt.Tx) error {
		if b := tx.Bucket([]byte(bucketSnapshot)); b != nil {
			complete = b.Get([]byte(keyComplete)) != nil
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("read the registry's snapshot from %s: %w", s.db.Path(), err)
	}
	return complete, nil
}

// mark says that there is one from now on.
func (s snapshot) mark() error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte(bucketSnapshot))
		if err != nil {
			return err
		}
		return b.Put([]byte(keyComplete), []byte{1})
	})
}
