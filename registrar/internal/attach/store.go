package attach

import (
	"encoding/json"
	"fmt"
	"log/slog"

	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The buckets of state.db that this package owns.
const (
	bucketAttachments = "attachments"
	bucketUnreadable  = "attachments.unreadable"
)

// store keeps the attachments in bbolt: key containerID/ifname, value JSON of
// model.Pod. It is called by Manager only; bbolt serialises the writers.
type store struct {
	db  *bolt.DB
	log *slog.Logger
}

func openStore(db *bolt.DB, log *slog.Logger) (*store, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists([]byte(bucketAttachments))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make bucket %s in %s: %w", bucketAttachments, db.Path(), err)
	}
	return &store{db: db, log: log}, nil
}

func recordKey(k model.AttachmentKey) []byte { return []byte(k.ContainerID + "/" + k.IfName) }

// put stores a pod; when it returns nil the pod survives a power cut.
func (s *store) put(p model.Pod) error {
	v, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode attachment %s: %w", p.Key, err)
	}
	// Batch shares one fsync between the ADDs that run at once.
	err = s.db.Batch(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(bucketAttachments)).Put(recordKey(p.Key), v)
	})
	if err != nil {
		return fmt.Errorf("store attachment %s in %s: %w", p.Key, s.db.Path(), err)
	}
	return nil
}

// remove forgets an attachment; an unknown one is no error.
func (s *store) remove(k model.AttachmentKey) error {
	err := s.db.Batch(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(bucketAttachments)).Delete(recordKey(k))
	})
	if err != nil {
		return fmt.Errorf("remove attachment %s from %s: %w", k, s.db.Path(), err)
	}
	return nil
}

// load returns what is stored. A record that cannot be read is logged with its
// key and moved aside, so that one bad record loses nothing else.
func (s *store) load() ([]model.Pod, error) {
	var pods []model.Pod
	err := s.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucketAttachments))
		bad := map[string][]byte{}
		err := b.ForEach(func(k, v []byte) error {
			var p model.Pod
			if err := json.Unmarshal(v, &p); err != nil || string(recordKey(p.Key)) != string(k) || len(p.Addresses) == 0 {
				s.log.Error("stored attachment is unreadable, set aside", "key", string(k), "bucket", bucketUnreadable, "error", err)
				bad[string(k)] = append([]byte(nil), v...)
				return nil
			}
			pods = append(pods, p)
			return nil
		})
		if err != nil {
			return err
		}
		return setAside(tx, bad)
	})
	if err != nil {
		return nil, fmt.Errorf("load attachments from %s: %w", s.db.Path(), err)
	}
	return pods, nil
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
		if err := tx.Bucket([]byte(bucketAttachments)).Delete([]byte(k)); err != nil {
			return err
		}
	}
	return nil
}
