package kubernetes

import (
	"context"
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The pauses before an object that somebody took is put back again. The first time
// there is none: a hand deleted it. Who does it again and again has a reason, such
// as the garbage collector when the pod is gone.
const (
	minPutBack    = time.Second
	maxPutBack    = 5 * time.Minute
	forgetPutBack = 10 * time.Minute
)

// maxGeneration is the highest generation that counts. Ours follow the clock, which comes
// to it in 2116; one beyond it was made up, and would leave no room for a higher one.
const maxGeneration = 1 << 62

// ownObject is one object of this node. Backend.mu guards it.
type ownObject struct {
	// uid of the record.
	uid string
	// want is the record that the object should have; nil when it should not be, or
	// when an earlier process left it (gone says which).
	want *model.Endpoint
	// gone: it is to be deleted.
	gone bool
	// have is the object as the API server last had it, as far as is known; nil when
	// it has none. It is never older than our own last write: resourceVersions tell.
	have *v1alpha1.ServiceEndpoint
	// writing is what our own write under way makes of the object; nil without one.
	writing *v1alpha1.ServiceEndpointSpec
	// deleted is the object that we deleted and whose end the watch has not told yet.
	deleted types.UID
	// written is the highest generation that counts and was ever seen in the object;
	// readers take no change without a higher one.
	written uint64
	// refused: the API server does not take want, and somebody has to change something
	// first. It is tried again from retry on; zero is never.
	refused bool
	retry   time.Time
	// putBacks counts how often the object was put back lately, last says when.
	putBacks int
	last     time.Time
}

// want makes ep the record of its object.
func (b *Backend) want(ep model.Endpoint) {
	key := keyOf(ep)
	if old, ok := b.keys[ep.UID]; ok && old != key {
		b.dismiss(old) // of a version that named objects otherwise
	}
	delete(b.attached, ep.UID)
	delete(b.foreign.unusable, key) // what an earlier process left there is overwritten
	b.keys[ep.UID] = key
	o := b.own[key]
	if o == nil {
		o = &ownObject{uid: ep.UID}
		b.own[key] = o
	}
	o.want, o.gone = &ep, false
	o.accept()
	b.queue.Add(key)
}

// accept takes back that the object was refused.
func (o *ownObject) accept() { o.refused, o.retry = false, time.Time{} }

// refuse notes that the API server does not take the object, which is said once. Whoever
// mends that, such as the policy of somebody else, tells nobody here: so it is tried again.
func (b *Backend) refuse(key types.NamespacedName, o *ownObject, why string, args ...any) {
	first := !o.refused
	o.refused, o.retry = true, time.Time{}
	if b.leaving() {
		return
	}
	if first {
		b.log.Error(why, append([]any{"object", key.String(), "again_in", b.refusedPause}, args...)...) //nolint:sloglint // the callers' are constants
	}
	o.retry = time.Now().Add(b.refusedPause)
	b.queue.AddAfter(key, b.refusedPause)
}

// dismiss makes the object one that should not be.
func (b *Backend) dismiss(key types.NamespacedName) {
	o := b.own[key]
	o.want, o.gone = nil, true
	o.accept()
	if b.keys[o.uid] == key {
		delete(b.keys, o.uid)
	}
	b.queue.Add(key)
}

// ghost says whether the object is one that an earlier process left for a pod that
// is not attached.
func (b *Backend) ghost(o *ownObject) bool {
	if b.attached == nil || o.want != nil || o.gone {
		return false
	}
	_, attached := b.attached[o.uid]
	return !attached
}

// ghostFound takes a ghost out of the table and deletes it.
func (b *Backend) ghostFound(key types.NamespacedName, o *ownObject) {
	b.metrics.ghosts.Inc()
	b.log.Warn("ServiceEndpoint of this node has no pod and is deleted", "object", key.String(), "uid", o.uid)
	if b.keys[o.uid] == key {
		// Whatever its generation: no attachment could publish it.
		_ = b.local.Withdraw(context.Background(), o.uid, o.written)
	}
	b.dismiss(key)
}

// target returns the object that should be written: want, with a generation that
// every reader takes. The second result is false when the API server has it already;
// an equal record of another generation, such as after a restart, is not written.
func (b *Backend) target(o *ownObject) (*v1alpha1.ServiceEndpoint, bool) {
	object, err := objectOf(*o.want, b.meshName(o.want.Service))
	if err != nil {
		return nil, false // Publish has checked it
	}
	if o.have != nil {
		same := object.Spec
		same.Generation = o.have.Spec.Generation
		if reflect.DeepEqual(same, o.have.Spec) && o.have.Spec.Generation <= maxGeneration {
			return nil, false
		}
	}
	object.Spec.Generation = max(object.Spec.Generation, int64(o.written)+1)
	return object, true
}

// pending says whether the API server has to be told something of the object.
func (b *Backend) pending(o *ownObject) bool {
	switch {
	case o.want != nil:
		_, differs := b.target(o)
		return differs
	case o.gone:
		return o.have != nil
	}
	return false
}

// ownSeen takes an object of this node as it was read, or as a write returned it.
func (b *Backend) ownSeen(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) {
	o := b.own[key]
	if o == nil {
		o = &ownObject{uid: object.Spec.UID}
		b.own[key] = o
	}
	if object.UID == o.deleted || o.have != nil && older(object.ResourceVersion, o.have.ResourceVersion) {
		return // an echo that our own later write has overtaken
	}
	settled := o.want != nil && o.have != nil && !b.pending(o)
	o.have, o.deleted = trim(object), ""
	if g := object.Spec.Generation; g > 0 && g <= maxGeneration {
		o.written = max(o.written, uint64(g))
	}
	switch {
	case o.want != nil || o.gone:
		switch {
		case !b.pending(o) || o.refused:
		case settled && (o.writing == nil || !reflect.DeepEqual(o.have.Spec, *o.writing)):
			b.putBack(key, o)
		default:
			b.queue.Add(key)
		}
	case b.ghost(o):
		b.ghostFound(key, o)
	default:
		b.leftSeen(key, o)
	}
}

// leftSeen serves an object that an earlier process left, until its pod is published
// again or known to be gone.
func (b *Backend) leftSeen(key types.NamespacedName, o *ownObject) {
	if other, ok := b.keys[o.uid]; ok && other != key {
		b.log.Warn("second ServiceEndpoint of one record is deleted", "object", key.String(), "uid", o.uid, "first", other.String())
		b.dismiss(key)
		return
	}
	b.keys[o.uid] = key
	if ep, ok := b.readRecord(key, o.have); ok {
		b.serve(ep)
	}
}

// ownVanished takes that the API server has the object no more, as of version.
func (b *Backend) ownVanished(key types.NamespacedName, version string) {
	o := b.own[key]
	if o == nil || o.have != nil && older(version, o.have.ResourceVersion) {
		return
	}
	had := o.have != nil
	o.have, o.deleted = nil, ""
	switch {
	case o.want != nil:
		switch {
		case o.refused:
		case had:
			b.putBack(key, o)
		default:
			b.queue.Add(key) // what was written into an object that was being deleted is lost
		}
	case o.gone:
		b.forget(key)
	default:
		if _, attached := b.attached[o.uid]; !attached {
			_ = b.local.Withdraw(context.Background(), o.uid, o.written)
		}
		b.forget(key)
	}
}

// putBack writes an object again that somebody took, later each time.
func (b *Backend) putBack(key types.NamespacedName, o *ownObject) {
	if b.leaving() {
		return
	}
	now := time.Now()
	if now.Sub(o.last) > forgetPutBack {
		o.putBacks = 0
	}
	var pause time.Duration
	if o.putBacks > 0 {
		pause = min(minPutBack<<min(o.putBacks-1, 16), maxPutBack)
	}
	o.putBacks, o.last = o.putBacks+1, now
	b.metrics.putBack.Inc()
	b.log.Warn("somebody else changed or deleted a ServiceEndpoint of this node; it is put back", "object", key.String(), "pause", pause)
	b.queue.AddAfter(key, pause)
}

// forget drops an own object.
func (b *Backend) forget(key types.NamespacedName) {
	if o := b.own[key]; o != nil && b.keys[o.uid] == key {
		delete(b.keys, o.uid)
	}
	delete(b.own, key)
}

// trim returns what is kept of an object of this node.
func trim(object *v1alpha1.ServiceEndpoint) *v1alpha1.ServiceEndpoint {
	return &v1alpha1.ServiceEndpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: object.Namespace, Name: object.Name, UID: object.UID, ResourceVersion: object.ResourceVersion,
		},
		Spec: object.Spec,
	}
}

// older says whether resourceVersion a is older than b. What cannot be compared is
// not older: the API server's word counts.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order < 0
}
