package dns

import (
	"fmt"
	"maps"
	"slices"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// SetSettings replaces the settings.
func (c *Client) SetSettings(s Settings) error {
	if err := s.Message().Validate(); err != nil {
		return fmt.Errorf("mesh-DNS settings: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.settings.Equal(s) {
		return nil
	}
	// Another domain makes other names of what it has: only a full state can.
	c.dirty.full = c.dirty.full || s.Domain != c.settings.Domain
	c.settings = s
	c.dirty.settings = true
	c.touchLocked()
	return nil
}

// SetNames replaces all names: lower case, no trailing dot, each with an address.
// Only what differs is sent. Names that are not valid are left out, and the error
// names the first of them. The map is not kept.
func (c *Client) SetNames(names map[string]VIP) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var gone []string
	for n := range c.names {
		if _, ok := names[n]; !ok {
			gone = append(gone, n)
		}
	}
	err := c.updateLocked(names, gone)
	if !c.haveNames {
		c.haveNames = true
		c.touchLocked()
	}
	return err
}

// UpdateNames sets some names and removes others. Names that are not valid are
// left out, and the error names the first of them.
func (c *Client) UpdateNames(set map[string]VIP, remove []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.updateLocked(set, remove)
}

func (c *Client) updateLocked(set map[string]VIP, remove []string) error {
	changed := false
	for _, n := range remove {
		if _, ok := c.names[n]; ok {
			delete(c.names, n)
			c.dirty.names[n] = struct{}{}
			changed = true
		}
	}
	var firstErr error
	refused := 0
	// In order, so that the same names are left out wherever a limit is met.
	for _, n := range slices.Sorted(maps.Keys(set)) {
		vip := set[n]
		old, known := c.names[n]
		if known && old == vip {
			continue
		}
		err := table.NameMessage(n, vip).Validate()
		if err == nil && !known && len(c.names) >= dnsv1.MaxNames {
			err = fmt.Errorf("%q is one too many, at most %d names are kept", n, dnsv1.MaxNames)
		}
		if err != nil {
			if refused++; firstErr == nil {
				firstErr = err
			}
			continue
		}
		c.names[n] = vip
		c.dirty.names[n] = struct{}{}
		changed = true
	}
	if changed {
		c.touchLocked()
	}
	if firstErr != nil {
		return fmt.Errorf("mesh DNS: %d names left out, the first: %w", refused, firstErr)
	}
	return nil
}

// SetPods replaces all pods. Only what differs is sent. On an error nothing is
// changed.
func (c *Client) SetPods(pods []Pod) error {
	if len(pods) > dnsv1.MaxPods {
		return fmt.Errorf("mesh DNS: %d pods, at most %d are served", len(pods), dnsv1.MaxPods)
	}
	keep := make(map[model.AttachmentKey]struct{}, len(pods))
	for _, p := range pods {
		if err := p.Message().Validate(); err != nil {
			return fmt.Errorf("mesh DNS: pod %s: %w", p.Key, err)
		}
		keep[p.Key] = struct{}{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.pods {
		if _, ok := keep[k]; !ok {
			c.removePodLocked(k)
		}
	}
	for _, p := range pods {
		c.setPodLocked(p)
	}
	c.havePods = true
	c.touchLocked()
	return nil
}

// SetPod adds a pod or changes one. AwaitPod tells when it is served.
func (c *Client) SetPod(p Pod) error {
	if err := p.Message().Validate(); err != nil {
		return fmt.Errorf("mesh DNS: pod %s: %w", p.Key, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pods[p.Key] == nil && len(c.pods) >= dnsv1.MaxPods {
		return fmt.Errorf("mesh DNS: pod %s is one too many, at most %d are served", p.Key, dnsv1.MaxPods)
	}
	if c.setPodLocked(p) {
		c.touchLocked()
	}
	return nil
}

func (c *Client) setPodLocked(p Pod) bool {
	old := c.pods[p.Key]
	if old != nil && old.conf.Equal(p) {
		return false
	}
	c.pods[p.Key] = &clientPod{conf: p}
	c.dirty.pods[p.Key] = struct{}{}
	return true
}

// RemovePod makes the process let go of a pod's network namespace. An unknown
// key is no error.
func (c *Client) RemovePod(key model.AttachmentKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.removePodLocked(key) {
		c.touchLocked()
	}
}

func (c *Client) removePodLocked(key model.AttachmentKey) bool {
	if c.pods[key] == nil {
		return false
	}
	delete(c.pods, key)
	c.dirty.pods[key] = struct{}{}
	return true
}

// touchLocked makes Run send what is dirty.
func (c *Client) touchLocked() {
	c.changes++
	c.notifyLocked()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// nextLocked returns the chunks of the next revision, and marks it as sent. Nil
// when there is nothing to send. Everything that was sent before is acknowledged.
func (c *Client) nextLocked() []*dnsv1.SyncRequest {
	if !c.dirty.any() {
		// What was set last changed nothing.
		if c.acked != c.changes {
			c.acked = c.changes
			c.notifyLocked()
		}
		return nil
	}
	c.revision++
	c.sent = c.changes
	b := &revisionBuilder{session: c.session, revision: c.revision, full: c.dirty.full}
	b.next()
	if c.dirty.full || c.dirty.settings {
		b.last().Settings = c.settings.Message()
	}
	names, keys := slices.Sorted(maps.Keys(c.dirty.names)), slices.Collect(maps.Keys(c.dirty.pods))
	if c.dirty.full {
		names, keys = slices.Sorted(maps.Keys(c.names)), slices.Collect(maps.Keys(c.pods))
	}
	for _, n := range names {
		if vip, ok := c.names[n]; ok {
			b.setName(table.NameMessage(n, vip))
		} else {
			b.removeName(n)
		}
	}
	slices.SortFunc(keys, model.AttachmentKey.Compare)
	for _, k := range keys {
		if p := c.pods[k]; p != nil {
			p.revision = c.revision
			b.setPod(p.conf.Message())
		} else {
			b.removePod(k)
		}
	}
	c.dirty.reset(false)
	return b.chunks
}
