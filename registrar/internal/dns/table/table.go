package table

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Kind says what a name is to the mesh.
type Kind uint8

const (
	// Foreign names are forwarded.
	Foreign Kind = iota
	// Known names have a VIP.
	Known
	// Apex is the mesh domain itself.
	Apex
	// Branch names exist only because known names lie below them: no data, but
	// not NXDOMAIN, which would deny what is below too (RFC 8020).
	Branch
	// Unknown names lie under the mesh domain and do not exist.
	Unknown
)

// Table is everything that mesh DNS serves from. One goroutine at a time calls
// Apply; everything else may be called from anywhere.
type Table struct {
	mu sync.RWMutex
	// All below is guarded by mu. Slices and maps inside Settings and Pod are
	// never written again once they are here.
	settings Settings
	// domain is settings.Domain in wire form.
	domain string
	// names by wire form.
	names map[string]VIP
	// branches counts the known names below each name between them and domain.
	branches map[string]int
	pods     map[model.AttachmentKey]Pod
}

// New returns an empty table: every name is foreign, and there is no upstream.
func New() *Table {
	return &Table{names: map[string]VIP{}, branches: map[string]int{}, pods: map[model.AttachmentKey]Pod{}}
}

// Lookup says what a name in wire form and lower case, without the root, is.
func (t *Table) Lookup(name []byte) (VIP, Kind) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if vip, ok := t.names[string(name)]; ok {
		return vip, Known
	}
	if t.domain == "" || !under(name, t.domain) {
		return VIP{}, Foreign
	}
	if len(name) == len(t.domain) {
		return VIP{}, Apex
	}
	if t.branches[string(name)] > 0 {
		return VIP{}, Branch
	}
	return VIP{}, Unknown
}

// under says whether name is domain or lies below it, label by label.
func under(name []byte, domain string) bool {
	for len(name) > len(domain) {
		name = name[1+int(name[0]):]
	}
	return string(name) == domain
}

// Settings returns what holds for all pods.
func (t *Table) Settings() Settings {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.settings
}

// Upstreams returns the resolvers for pods without their own.
func (t *Table) Upstreams() []netip.AddrPort { return t.Settings().Upstreams }

// Size returns how many names and pods there are.
func (t *Table) Size() (names, pods int) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.names), len(t.pods)
}

// Pods returns a copy of all pods, in no order.
func (t *Table) Pods() []Pod {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]Pod, 0, len(t.pods))
	for _, p := range t.pods {
		out = append(out, p)
	}
	return out
}

// Apply makes the change as a whole: no reader sees a part of it. It returns the
// pods that are gone. A change that would pass the totals of dns.proto is refused
// and leaves the table as it was.
func (t *Table) Apply(c Change) (removed []model.AttachmentKey, err error) {
	if c.Full {
		return t.replace(c)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.checkRoomLocked(c); err != nil {
		return nil, err
	}
	if c.Settings != nil && c.Settings.Domain != t.settings.Domain {
		return nil, fmt.Errorf("mesh domain %q replaces %q in a change; only a full state can", c.Settings.Domain, t.settings.Domain)
	}
	if c.Settings != nil {
		t.settings = *c.Settings
	}
	for n := range c.RemoveNames {
		t.removeNameLocked(wireName(n))
	}
	for n, vip := range c.SetNames {
		t.setNameLocked(wireName(n), vip)
	}
	for k := range c.RemovePods {
		if _, ok := t.pods[k]; ok {
			delete(t.pods, k)
			if _, again := c.SetPods[k]; !again {
				removed = append(removed, k)
			}
		}
	}
	maps.Copy(t.pods, c.SetPods)
	return removed, nil
}

func (t *Table) checkRoomLocked(c Change) error {
	names, pods := len(t.names), len(t.pods)
	for n := range c.SetNames {
		if _, ok := t.names[wireName(n)]; !ok {
			names++
		}
	}
	for n := range c.RemoveNames {
		_, known := t.names[wireName(n)]
		if _, again := c.SetNames[n]; known && !again {
			names--
		}
	}
	for k := range c.SetPods {
		if _, ok := t.pods[k]; !ok {
			pods++
		}
	}
	for k := range c.RemovePods {
		_, known := t.pods[k]
		if _, again := c.SetPods[k]; known && !again {
			pods--
		}
	}
	if names > dnsv1.MaxNames {
		return fmt.Errorf("the table would have %d names, at most %d are kept", names, dnsv1.MaxNames)
	}
	if pods > dnsv1.MaxPods {
		return fmt.Errorf("the table would have %d pods, at most %d are kept", pods, dnsv1.MaxPods)
	}
	return nil
}

// replace builds the new table aside, so that readers wait only for the swap.
func (t *Table) replace(c Change) ([]model.AttachmentKey, error) {
	if c.Settings == nil {
		return nil, fmt.Errorf("a full state without settings")
	}
	fresh := New()
	fresh.settings, fresh.domain = *c.Settings, wireName(c.Settings.Domain)
	for n, vip := range c.SetNames {
		fresh.setNameLocked(wireName(n), vip)
	}
	maps.Copy(fresh.pods, c.SetPods)
	t.mu.Lock()
	defer t.mu.Unlock()
	var removed []model.AttachmentKey
	for k := range t.pods {
		if _, ok := fresh.pods[k]; !ok {
			removed = append(removed, k)
		}
	}
	t.settings, t.domain, t.names, t.branches, t.pods = fresh.settings, fresh.domain, fresh.names, fresh.branches, fresh.pods
	return removed, nil
}

func (t *Table) setNameLocked(name string, vip VIP) {
	if _, ok := t.names[name]; !ok {
		t.eachBranchLocked(name, func(b string) { t.branches[b]++ })
	}
	t.names[name] = vip
}

func (t *Table) removeNameLocked(name string) {
	if _, ok := t.names[name]; !ok {
		return
	}
	delete(t.names, name)
	t.eachBranchLocked(name, func(b string) {
		if t.branches[b]--; t.branches[b] == 0 {
			delete(t.branches, b)
		}
	})
}

// eachBranchLocked visits what lies between name and the mesh domain.
func (t *Table) eachBranchLocked(name string, visit func(string)) {
	if !under([]byte(name), t.domain) {
		return
	}
	parents(name, func(p string) bool {
		if len(p) <= len(t.domain) {
			return false
		}
		visit(p)
		return true
	})
}

// Message returns the whole table, sorted, as it is written to disk.
func (t *Table) Message() *dnsv1.Table {
	t.mu.RLock()
	defer t.mu.RUnlock()
	names := make([]*dnsv1.Name, 0, len(t.names))
	for n, vip := range t.names {
		names = append(names, NameMessage(textName(n), vip))
	}
	list := make([]*dnsv1.Pod, 0, len(t.pods))
	for _, p := range t.pods {
		list = append(list, p.Message())
	}
	slices.SortFunc(names, func(a, b *dnsv1.Name) int { return strings.Compare(a.GetName(), b.GetName()) })
	slices.SortFunc(list, func(a, b *dnsv1.Pod) int {
		return strings.Compare(model.KeyOf(a.GetAttachment()).String(), model.KeyOf(b.GetAttachment()).String())
	})
	return &dnsv1.Table{Settings: t.settings.Message(), Names: names, Pods: list}
}

// textName is the inverse of wireName.
func textName(wire string) string {
	var b strings.Builder
	for wire != "" {
		n := int(wire[0])
		if b.Len() > 0 {
			b.WriteByte('.')
		}
		b.WriteString(wire[1 : 1+n])
		wire = wire[1+n:]
	}
	return b.String()
}

// ChangeFrom reads a whole table, as it comes from disk, as a full change.
func ChangeFrom(m *dnsv1.Table) (Change, error) {
	var c Change
	err := c.Merge(&dnsv1.SyncRequest{Full: true, Settings: m.GetSettings(), SetNames: m.GetNames(), SetPods: m.GetPods()})
	return c, err
}
