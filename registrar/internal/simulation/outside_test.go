package simulation

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
)

// outside is what one registrar process has of the node. Of a process that was killed
// it does nothing any more.
type outside struct {
	w         *world
	publisher *publisher.Publisher

	mu       sync.Mutex
	dead     bool
	watchers map[model.AttachmentKey]*watched

	// identities makes a change of uses and what the publisher is told of it one step,
	// as the real manager does.
	identities sync.Mutex
	uses       map[model.Identity]int
}

func (o *outside) isDead() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dead
}

// watched is one watch: as with the real one, its fn is never called twice at one
// time, nor once Forget has returned.
type watched struct {
	mu   sync.Mutex
	gone bool
	fn   func(attach.PortState)
}

func (x *watched) tell(s attach.PortState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.gone {
		x.fn(s)
	}
}

// Watch implements attach.Readiness.
func (o *outside) Watch(pod model.Pod, fn func(attach.PortState)) error {
	o.Forget(pod.Key)
	x := &watched{fn: fn}
	o.mu.Lock()
	dead := o.dead
	if !dead {
		o.watchers[pod.Key] = x
	}
	o.mu.Unlock()
	if !dead {
		x.tell(o.w.read(pod.Key))
	}
	return nil
}

// Kick implements attach.Readiness. Every change of a table is told at once here.
func (o *outside) Kick(model.AttachmentKey) {}

// Forget implements attach.Readiness.
func (o *outside) Forget(key model.AttachmentKey) {
	o.mu.Lock()
	x := o.watchers[key]
	delete(o.watchers, key)
	o.mu.Unlock()
	if x != nil {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.gone = true
	}
}

// tell hands a pod's listen table to whoever watches it.
func (o *outside) tell(key model.AttachmentKey) {
	o.mu.Lock()
	x := o.watchers[key]
	o.mu.Unlock()
	if x != nil {
		x.tell(o.w.read(key))
	}
}

// Gone implements attach.Capture.
func (o *outside) Gone(pod model.Pod) bool { return !o.w.lives(pod.Key) }

// Remove implements attach.Capture; nothing here is ever removed for good.
func (*outside) Remove(model.Pod) error { return nil }

// Connected implements attach.Capture.
func (*outside) Connected(model.Pod) (bool, error) { return false, nil }

// Disconnect implements attach.Capture.
func (*outside) Disconnect(model.Pod) error { return nil }

// Unpin implements attach.Capture.
func (o *outside) Unpin(key model.AttachmentKey) error {
	if !o.isDead() {
		o.w.removeNote(key)
	}
	return nil
}

// SetTCPPorts implements attach.Capture.
func (*outside) SetTCPPorts(model.Pod, []netip.AddrPort) error { return nil }

// capture is attach.Capture: its Ensure is not that of the identities.
type capture struct{ *outside }

// Ensure implements attach.Capture.
func (capture) Ensure(model.Pod, []netip.AddrPort) (bool, error) { return false, nil }

// Ensure implements attach.Identities.
func (o *outside) Ensure(_ context.Context, id model.Identity) error {
	if o.w.refuses() {
		return errors.New("the signer is away")
	}
	o.identities.Lock()
	defer o.identities.Unlock()
	o.uses[id]++
	if o.uses[id] == 1 {
		o.w.issued.Add(1)
		o.publisher.SetSVID(id, fmt.Appendf(nil, "chain %d of %s", o.w.issued.Load(), id.SPIFFE()), []byte("key of "+id.SPIFFE()))
	}
	return nil
}

// Release implements attach.Identities.
func (o *outside) Release(id model.Identity) {
	o.identities.Lock()
	defer o.identities.Unlock()
	o.uses[id]--
	left := o.uses[id]
	if left == 0 {
		delete(o.uses, id)
	}
	switch {
	case left < 0:
		o.w.fail("identity %s is released more often than it was ensured", id.SPIFFE())
	case left == 0:
		o.publisher.RemoveSVID(id)
	}
}

// meshDNS implements attach.Names and publisher.Names.
type meshDNS struct{ told }

// Missing implements attach.Names.
func (*meshDNS) Missing() string { return "" }

// SetPod implements attach.Names.
func (*meshDNS) SetPod(model.Pod) {}

// RemovePod implements attach.Names.
func (*meshDNS) RemovePod(model.AttachmentKey) {}

// AwaitPod implements attach.Names.
func (*meshDNS) AwaitPod(context.Context, model.AttachmentKey) error { return nil }

func (n *told) get() map[string]publisher.Address {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names
}

// disk is the catalogue on a disk that may hang.
type disk struct {
	publisher.Catalogue

	w *world
}

// Save implements publisher.Catalogue.
func (d disk) Save(entries []projection.Entry, gone []model.ServiceKey) error {
	<-d.w.diskGate()
	return d.Catalogue.Save(entries, gone)
}
