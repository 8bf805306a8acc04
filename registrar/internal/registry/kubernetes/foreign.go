package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"unique"

	"k8s.io/apimachinery/pkg/types"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// foreignObjects are the objects of other nodes, of which only this is kept; the
// local table has their records. Backend.mu guards it.
type foreignObjects struct {
	// claims has every object that can be read.
	claims map[types.NamespacedName]claim
	// holders finds the one object whose record is served, by UID.
	holders map[string]types.NamespacedName
	// unusable says why an object is left out, partly what of one is.
	unusable, partly map[types.NamespacedName]string
}

// claim is the record that an object has.
type claim struct {
	uid        string
	generation uint64
	// waiting is the record while another object has its UID.
	waiting *model.Endpoint
}

func newForeignObjects() foreignObjects {
	return foreignObjects{
		claims:   make(map[types.NamespacedName]claim),
		holders:  make(map[string]types.NamespacedName),
		unusable: make(map[types.NamespacedName]string),
		partly:   make(map[types.NamespacedName]string),
	}
}

// foreignSeen serves the record of another node's object.
func (b *Backend) foreignSeen(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) {
	ep, ok := b.readRecord(key, object)
	if old, had := b.foreign.claims[key]; had && (!ok || old.uid != ep.UID) {
		b.release(key)
	}
	if !ok {
		return
	}
	holder, held := b.foreign.holders[ep.UID]
	if !held {
		holder, held = b.keys[ep.UID]
	}
	if held && holder != key {
		b.leaveOut(key, fmt.Sprintf("it claims the UID %s of %s", ep.UID, holder))
		b.foreign.claims[key] = claim{uid: ep.UID, generation: ep.Generation, waiting: &ep}
		return
	}
	b.hold(key, ep)
}

// hold makes the object the one whose record is served.
func (b *Backend) hold(key types.NamespacedName, ep model.Endpoint) {
	delete(b.foreign.unusable, key)
	b.foreign.holders[ep.UID] = key
	b.foreign.claims[key] = claim{uid: ep.UID, generation: ep.Generation}
	b.serve(ep)
}

// foreignVanished takes that the API server has the object no more.
func (b *Backend) foreignVanished(key types.NamespacedName) {
	b.release(key)
	delete(b.foreign.unusable, key)
	delete(b.foreign.partly, key)
}

// release withdraws what the object has, and lets one that waits for its UID have it.
func (b *Backend) release(key types.NamespacedName) {
	c, ok := b.foreign.claims[key]
	if !ok {
		return
	}
	delete(b.foreign.claims, key)
	if b.foreign.holders[c.uid] != key {
		return
	}
	delete(b.foreign.holders, c.uid)
	_ = b.local.Withdraw(context.Background(), c.uid, c.generation) // stale only beside a newer record, which stays
	if len(b.foreign.unusable) == 0 {
		return // nobody waits
	}
	for other, next := range b.foreign.claims {
		if next.uid == c.uid && next.waiting != nil {
			b.hold(other, *next.waiting)
			return
		}
	}
}

// readRecord converts an object and reports, once, what of it cannot be used.
func (b *Backend) readRecord(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) (model.Endpoint, bool) {
	ep, leftOut, err := recordOf(object)
	if err == nil && ep.Identity.TrustDomain != b.trustDomain {
		// One such account would make every cluster of its service impossible to build.
		err = fmt.Errorf("its trust domain is %s, not this mesh's %s: the registrar of node %s must run with the mesh's settings",
			ep.Identity.TrustDomain, b.trustDomain, ep.Node)
	}
	if err == nil && ep.Generation > maxGeneration {
		err = fmt.Errorf("its generation %d is none that its registrar on node %s gives, who writes it anew", ep.Generation, ep.Node)
	}
	if addr, in, hit := b.services.Hit(ep.Addresses); err == nil && hit {
		// Whoever called it would call a service, through the mesh once more.
		err = fmt.Errorf("its address %s is in %s, whose addresses are the mesh's services: node %s must give pods addresses of another range, or the mesh gets another (settings vipRange and vipRange6)",
			addr, in, ep.Node)
	}
	if err != nil {
		b.leaveOut(key, err.Error())
		return model.Endpoint{}, false
	}
	delete(b.foreign.unusable, key)
	if len(leftOut) == 0 {
		delete(b.foreign.partly, key)
		return ep, true
	}
	if text := fmt.Sprint(leftOut); b.foreign.partly[key] != text {
		b.foreign.partly[key] = text
		b.log.Warn("part of a ServiceEndpoint cannot be used", "object", key.String(), "node", object.Spec.NodeName, "what", text)
	}
	return ep, true
}

// leaveOut reports, once, that an object is not used.
func (b *Backend) leaveOut(key types.NamespacedName, why string) {
	if b.foreign.unusable[key] == why {
		return
	}
	b.foreign.unusable[key] = why
	b.log.Error("ServiceEndpoint cannot be used and is left out", "object", key.String(), "why", why)
}

// serve puts a record that was read into the local table. One that is not newer than
// what is there changes nothing.
func (b *Backend) serve(ep model.Endpoint) {
	if err := b.local.Publish(context.Background(), intern(ep)); err != nil && !errors.Is(err, registry.ErrStale) {
		b.log.Error("record that was read cannot be served", "uid", ep.UID, "error", err)
	}
}

// intern shares the texts that many records have in common.
func intern(ep model.Endpoint) model.Endpoint {
	for _, text := range []*string{
		&ep.Service.Namespace, &ep.Service.Name, &ep.Identity.TrustDomain, &ep.Identity.Namespace, &ep.Identity.Account,
		&ep.Locality.Region, &ep.Locality.Zone, &ep.Node,
	} {
		*text = unique.Make(*text).Value()
	}
	return ep
}
