package attach

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	bolt "go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/api/authority"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
)

// bucketAttachments of state.db belongs to this package: containerID/ifname ->
// model.Pod.
const bucketAttachments = "attachments"

// store keeps the attachments over a restart. Manager alone calls it.
type store struct{ records *state.Records[model.Pod] }

func openStore(db *bolt.DB, log *slog.Logger) (*store, error) {
	records, err := state.OpenRecords[model.Pod](db, bucketAttachments, log)
	if err != nil {
		return nil, err
	}
	return &store{records: records}, nil
}

func recordKey(k model.AttachmentKey) string { return k.ContainerID + "/" + k.IfName }

// put stores pods, all or none; when it returns nil they survive a power cut.
func (s *store) put(pods ...model.Pod) error {
	set := make(map[string]model.Pod, len(pods))
	for _, p := range pods {
		set[recordKey(p.Key)] = p
	}
	return s.records.Save(set)
}

// remove forgets attachments, all or none; an unknown one is no error.
func (s *store) remove(keys ...model.AttachmentKey) error {
	gone := make([]string, 0, len(keys))
	for _, k := range keys {
		gone = append(gone, recordKey(k))
	}
	return s.records.Save(nil, gone...)
}

// load returns what is stored, in key order.
func (s *store) load() ([]model.Pod, error) {
	return s.records.Load(func(key string, p model.Pod) error {
		if recordKey(p.Key) != key {
			return fmt.Errorf("it is the record of %s", recordKey(p.Key))
		}
		return usable(p)
	})
}

// usable refuses a pod that Decide cannot have made. What Decide leaves open stays
// open: a stricter parser must not un-mesh a running pod.
func usable(p model.Pod) error {
	key := &cniv1.Attachment{ContainerId: p.Key.ContainerID, Ifname: p.Key.IfName}
	if err := key.Validate(); err != nil {
		return err
	}
	if len(p.Addresses) == 0 || slices.ContainsFunc(p.Addresses, func(a netip.Addr) bool { return !a.IsValid() || a.Zone() != "" }) {
		return fmt.Errorf("it has no usable address")
	}
	if len(p.Ports) > 0 && (!authority.ValidLabel(p.Service.Name) || !authority.ValidLabel(p.Service.Namespace)) {
		return fmt.Errorf("service %q is not two DNS labels", p.Service)
	}
	for i, pt := range p.Ports {
		if pt.Number == 0 || i > 0 && p.Ports[i-1].Number >= pt.Number {
			return fmt.Errorf("ports are not ascending from 1 at %d", pt.Number)
		}
	}
	return nil
}
