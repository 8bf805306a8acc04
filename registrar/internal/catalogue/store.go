// Package catalogue keeps the projection's entries in state.db: the addresses,
// last ports, pinned accounts and unfinished steps of services, so that a restart
// gives the same names, the same addresses and the same bytes.
//
// The publisher saves; app loads once at start. Nobody else touches the bucket.
package catalogue

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
)

// bucketServices of state.db belongs to this package: namespace/name ->
// projection.Entry.
const bucketServices = "services"

// Store implements publisher.Catalogue. It is safe for concurrent use.
type Store struct {
	records     *state.Records[projection.Entry]
	trustDomain string
	log         *slog.Logger
}

// Open makes the bucket when it is missing. trustDomain is the mesh's.
func Open(db *bolt.DB, trustDomain string, log *slog.Logger) (*Store, error) {
	records, err := state.OpenRecords[projection.Entry](db, bucketServices, log)
	if err != nil {
		return nil, err
	}
	return &Store{records: records, trustDomain: trustDomain, log: log}, nil
}

// Save stores entries and removes those of gone, all or nothing.
func (s *Store) Save(entries []projection.Entry, gone []model.ServiceKey) error {
	set := make(map[string]projection.Entry, len(entries))
	for _, e := range entries {
		set[e.Service.String()] = e
	}
	keys := make([]string, 0, len(gone))
	for _, key := range gone {
		keys = append(keys, key.String())
	}
	return s.records.Save(set, keys...)
}

// Load returns what is saved, in key order. usable says whether an entry can be
// taken; one that cannot, or cannot be read, is set aside. One with an account of
// another trust domain is of a mesh that was here before, and is dropped: the service
// is made anew when a pod of this mesh serves it.
func (s *Store) Load(usable func(projection.Entry) error) ([]projection.Entry, error) {
	entries, err := s.records.Load(func(key string, e projection.Entry) error {
		if e.Service.String() != key {
			return fmt.Errorf("it is the entry of %s", e.Service)
		}
		return usable(e)
	})
	if err != nil {
		return nil, err
	}
	var former []model.ServiceKey
	entries = slices.DeleteFunc(entries, func(e projection.Entry) bool {
		if !s.former(e) {
			return false
		}
		former = append(former, e.Service)
		return true
	})
	if len(former) == 0 {
		return entries, nil
	}
	s.log.Warn("saved services are of another trust domain and dropped", "services", len(former), "trust_domain", s.trustDomain)
	return entries, s.Save(nil, former)
}

// former reports whether an account of the entry is of another trust domain.
func (s *Store) former(e projection.Entry) bool {
	return slices.ContainsFunc(e.Accounts, func(account string) bool {
		return !strings.HasPrefix(account, "spiffe://"+s.trustDomain+"/")
	})
}
