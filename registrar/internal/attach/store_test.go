package attach

import (
	"encoding/json"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// FuzzLoad reads any record of an attachment. What is loaded can name a file, has an
// address and ports that listeners can be made of, and is the same when it was saved
// again; the record beside it is loaded in any case.
func FuzzLoad(f *testing.F) {
	pod := model.Pod{
		Key: key("c1"), Network: "podnet", Netns: "/run/portolan/netns/c1-eth0", RuntimeNetns: "/run/netns/c1",
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}, Namespace: "default", Name: "payments-1",
		Service:  model.ServiceKey{Namespace: "default", Name: "payments"},
		Identity: model.Identity{TrustDomain: "aether.internal", Namespace: "default", Account: "payments"},
		Default:  8080, Ports: []port.Port{{Number: 8080, Protocol: port.HTTP}, {Number: 9090, Protocol: port.H2}}, Weight: 1,
		Metadata: map[string]string{"version": "v1"}, ExcludePorts: []uint16{25}, ExcludeRanges: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")},
		Since: time.Unix(1_800_000_000, 5).UTC(),
	}
	good, err := json.Marshal(pod)
	if err != nil {
		f.Fatal(err)
	}
	f.Add("c1/eth0", good)
	f.Add("c2/eth0", good)
	f.Add("c1/eth0", good[:len(good)-1])
	for _, bad := range []string{
		`{}`, `null`, `{"Key":{"ContainerID":"..","IfName":"/"},"Addresses":["10.0.0.1"]}`,
		`{"Key":{"ContainerID":"c1","IfName":"eth0"},"Addresses":[""]}`,
		`{"Key":{"ContainerID":"c1","IfName":"eth0"},"Addresses":["fe80::1%eth0"],"Service":{"Namespace":"a","Name":"b"}}`,
		`{"Key":{"ContainerID":"c1","IfName":"eth0"},"Addresses":["10.0.0.1"],"Service":{"Namespace":"a","Name":"b.c"}}`,
		`{"Key":{"ContainerID":"c1","IfName":"eth0"},"Addresses":["10.0.0.1"],"Service":{"Namespace":"a","Name":"b"},"Ports":[{"Number":9},{"Number":9}]}`,
	} {
		f.Add("c1/eth0", []byte(bad))
	}
	db, err := bolt.Open(filepath.Join(f.TempDir(), "state.db"), 0o600, &bolt.Options{NoSync: true})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = db.Close() })
	db.MaxBatchDelay = 0
	beside := pod
	beside.Key.ContainerID = "beside"
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		if key == "" || len(key) > bolt.MaxKeySize || key == recordKey(beside.Key) {
			return
		}
		if err := db.Update(func(tx *bolt.Tx) error {
			if tx.Bucket([]byte(bucketAttachments)) != nil {
				if err := tx.DeleteBucket([]byte(bucketAttachments)); err != nil {
					return err
				}
			}
			b, err := tx.CreateBucket([]byte(bucketAttachments))
			if err != nil {
				return err
			}
			return b.Put([]byte(key), value)
		}); err != nil {
			t.Fatal(err)
		}
		s, err := openStore(db, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.put(beside); err != nil {
			t.Fatal(err)
		}
		pods, err := s.load()
		if err != nil || !slices.ContainsFunc(pods, func(p model.Pod) bool { return p.Key == beside.Key }) {
			t.Fatalf("the record beside it is lost: %v, %v", pods, err)
		}
		for _, p := range pods {
			if p.Key == beside.Key {
				continue
			}
			if filepath.Base(p.Key.String()) != p.Key.String() || !p.Addresses[0].IsValid() {
				t.Fatalf("loaded %+v", p)
			}
			if err := s.put(p); err != nil {
				t.Fatal(err)
			}
		}
		again, err := s.load()
		if d := cmp.Diff(pods, again, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); d != "" || err != nil {
			t.Fatalf("loaded again: %v (-first +second):\n%s", err, d)
		}
	})
}
