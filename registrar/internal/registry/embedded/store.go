package embedded

import (
	"errors"
	"maps"
	"slices"
	"time"

	"go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// DefaultBucket is the bucket of the records: key UID, value the protobuf of a
// ServiceEndpoint.
const DefaultBucket = "endpoints"

// corruptSuffix makes the name of the bucket of those that cannot be read.
const corruptSuffix = ".corrupt"

// write saves what is unsaved until the backend is closed. It is the one goroutine
// that writes the buckets, until Close does so after its end.
func (b *Backend) write() {
	defer close(b.done)
	pause := b.linger
	for {
		select {
		case <-b.closed:
			return
		case <-b.wake:
		}
		timer := time.NewTimer(pause)
		select {
		case <-b.closed:
			timer.Stop()
			return
		case <-timer.C:
		}
		if b.save() == nil {
			pause = b.linger
			continue
		}
		pause = min(max(2*pause, minRetry), maxRetry)
		b.poke()
	}
}

// save writes everything that is unsaved now in one transaction. What could not be
// written stays unsaved, unless it changed again meanwhile.
func (b *Backend) save() error {
	b.saving.Lock()
	defer b.saving.Unlock()
	b.mu.Lock()
	batch := b.unsaved
	b.unsaved = make(map[string][]byte)
	b.mu.Unlock()
	if len(batch) == 0 {
		return nil
	}
	err := b.store(batch)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		if b.failure != nil {
			b.log.Info("endpoints are stored again", "path", b.db.Path(), "records", len(batch))
		}
		b.failure = nil
		return nil
	}
	for uid, stored := range batch {
		if _, again := b.unsaved[uid]; !again {
			b.unsaved[uid] = stored
		}
	}
	if b.failure == nil || b.failure.Error() != err.Error() {
		b.log.Error("endpoints cannot be stored; they are kept in memory and tried again",
			"path", b.db.Path(), "unsaved", len(b.unsaved), "error", err)
	}
	b.failure = err
	b.stats.FailedWrites++
	return err
}

// store writes a batch. A panic of bbolt, over a file that was damaged while it was
// open, is not caught: it leaves bbolt's lock held, so that every ADD would hang from
// then on. The restart sets the file aside (package state) and rebuilds it.
func (b *Backend) store(batch map[string][]byte) error {
	return b.db.Update(func(tx *bbolt.Tx) error {
		bucket, err := tx.CreateBucketIfNotExists([]byte(b.bucket))
		if err != nil {
			return err
		}
		for _, uid := range slices.Sorted(maps.Keys(batch)) {
			if stored := batch[uid]; stored == nil {
				err = bucket.Delete([]byte(uid))
			} else {
				err = bucket.Put([]byte(uid), stored)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// load fills the table from the file. Records of another trust domain are left by a
// mesh that was here before: none of its pods has a certificate that this one trusts.
func (b *Backend) load(trustDomain string) error {
	corrupt := make(map[string][]byte)
	former := 0
	err := b.db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket([]byte(b.bucket))
		if bucket == nil {
			return nil
		}
		return bucket.ForEach(func(key, value []byte) error {
			uid := string(key)
			ep, leftOut, err := decode(uid, value)
			if err == nil && ep.Identity.TrustDomain != trustDomain {
				former++
				b.unsaved[uid] = nil
				return nil
			}
			if err == nil {
				err = b.table.Upsert(ep)
			}
			if err != nil {
				b.log.Error("stored endpoint cannot be read; it is set aside", "path", b.db.Path(), "uid", uid, "bucket", b.bucket+corruptSuffix, "error", err)
				corrupt[uid] = slices.Clone(value)
			}
			for _, what := range leftOut {
				b.log.Warn("part of a stored endpoint cannot be used", "uid", uid, "what", what)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	if former > 0 {
		b.log.Warn("stored endpoints are of another trust domain and dropped", "path", b.db.Path(), "bucket", b.bucket, "records", former, "trust_domain", trustDomain)
		b.poke()
	}
	b.stats.Corrupt = len(corrupt)
	b.setAside(corrupt)
	return nil
}

// decode reads one stored record.
func decode(uid string, stored []byte) (model.Endpoint, []string, error) {
	if len(stored) == 0 {
		return model.Endpoint{}, nil, errors.New("it is empty")
	}
	se := &endpointv1.ServiceEndpoint{}
	if err := proto.Unmarshal(stored, se); err != nil {
		return model.Endpoint{}, nil, err
	}
	return registry.FromProto(uid, se)
}

// setAside moves records that cannot be read to a bucket of their own. When that
// fails they stay where they are, and are named again at the next start.
func (b *Backend) setAside(corrupt map[string][]byte) {
	if len(corrupt) == 0 {
		return
	}
	err := b.db.Update(func(tx *bbolt.Tx) error {
		aside, err := tx.CreateBucketIfNotExists([]byte(b.bucket + corruptSuffix))
		if err != nil {
			return err
		}
		for _, uid := range slices.Sorted(maps.Keys(corrupt)) {
			if err := aside.Put([]byte(uid), corrupt[uid]); err != nil {
				return err
			}
			if err := tx.Bucket([]byte(b.bucket)).Delete([]byte(uid)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.log.Error("unreadable endpoints cannot be set aside", "path", b.db.Path(), "records", len(corrupt), "error", err)
	}
}
