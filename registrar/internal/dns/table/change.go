package table

import (
	"fmt"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Change is one whole revision: removals first, then what is set.
type Change struct {
	// Full forgets everything that the change does not set.
	Full bool
	// Settings replace the settings when not nil. Never nil in a full change.
	Settings *Settings
	// SetNames are new or have new addresses; names without a trailing dot.
	SetNames map[string]VIP
	// RemoveNames are gone.
	RemoveNames map[string]struct{}
	// SetPods are new or changed.
	SetPods map[model.AttachmentKey]Pod
	// RemovePods are gone.
	RemovePods map[model.AttachmentKey]struct{}
}

// Merge adds one validated chunk of the revision. It refuses more than the
// totals of dns.proto, so that no number of chunks grows a change without bound.
func (c *Change) Merge(m *dnsv1.SyncRequest) error {
	c.Full = c.Full || m.GetFull()
	if m.GetSettings() != nil {
		s, err := settingsFrom(m.GetSettings())
		if err != nil {
			return err
		}
		c.Settings = &s
	}
	if c.SetNames == nil {
		c.SetNames = make(map[string]VIP, len(m.GetSetNames()))
		c.RemoveNames = make(map[string]struct{}, len(m.GetRemoveNames()))
		c.SetPods = make(map[model.AttachmentKey]Pod, len(m.GetSetPods()))
		c.RemovePods = make(map[model.AttachmentKey]struct{}, len(m.GetRemovePods()))
	}
	for _, n := range m.GetSetNames() {
		vip, err := vipFrom(n)
		if err != nil {
			return err
		}
		c.SetNames[n.GetName()] = vip
	}
	for _, p := range m.GetSetPods() {
		pod, err := podFrom(p)
		if err != nil {
			return err
		}
		c.SetPods[pod.Key] = pod
	}
	for _, n := range m.GetRemoveNames() {
		c.RemoveNames[n] = struct{}{}
	}
	for _, a := range m.GetRemovePods() {
		c.RemovePods[model.KeyOf(a)] = struct{}{}
	}
	return c.checkTotals()
}

func (c *Change) checkTotals() error {
	for _, t := range []struct {
		what    string
		n, most int
	}{
		{"set_names", len(c.SetNames), dnsv1.MaxNames},
		{"remove_names", len(c.RemoveNames), dnsv1.MaxNames},
		{"set_pods", len(c.SetPods), dnsv1.MaxPods},
		{"remove_pods", len(c.RemovePods), dnsv1.MaxPods},
	} {
		if t.n > t.most {
			return fmt.Errorf("%s of one revision: %d entries in all, at most %d are allowed", t.what, t.n, t.most)
		}
	}
	return nil
}

// Empty says that nothing would change.
func (c *Change) Empty() bool {
	return !c.Full && c.Settings == nil && len(c.SetNames)+len(c.RemoveNames)+len(c.SetPods)+len(c.RemovePods) == 0
}
