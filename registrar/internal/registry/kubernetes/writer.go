package kubernetes

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// The labels of portolan_registry_api_writes_total.
const (
	verbApply     = "apply"
	verbDelete    = "delete"
	resultOK      = "ok"
	resultFailed  = "failed"
	resultRefused = "refused"
)

// write makes the API server have what it should, one object at a time, until the
// queue is shut down. The queue gives one object to one writer only, so its writes
// are in order; what changes meanwhile is written next, in its newest state.
func (b *Backend) write(ctx context.Context) {
	for {
		key, closed := b.queue.Get()
		if closed {
			return
		}
		b.writeObject(ctx, key)
		b.queue.Done(key)
	}
}

func (b *Backend) writeObject(ctx context.Context, key types.NamespacedName) {
	b.mu.Lock()
	o := b.own[key]
	switch {
	case ctx.Err() != nil, o == nil, o.refused && o.retry.IsZero():
		b.mu.Unlock()
	case o.refused && time.Now().Before(o.retry):
		b.queue.AddAfter(key, time.Until(o.retry)) // the queue keeps the first time that it was told
		b.mu.Unlock()
	case o.want != nil:
		object, differs := b.target(o)
		generation := o.want.Generation
		if differs && object.Spec.Generation > maxGeneration {
			differs, o.refused = false, true
			b.log.Error("a ServiceEndpoint has the highest generation there is, so nobody would take another: start its pod anew", "object", key.String())
		}
		if differs {
			o.writing = &object.Spec
		}
		b.mu.Unlock()
		if differs {
			result, err := b.put(ctx, object)
			b.applied(ctx, key, generation, result, err)
			return
		}
	case o.gone && o.have != nil:
		uid := o.have.UID
		b.mu.Unlock()
		b.deleted(ctx, key, uid, b.client.delete(ctx, key, uid))
		return
	case o.gone && o.deleted == "":
		// Nothing there. Should a write that seemed to fail have got through, the
		// watch tells of it, and it is a ghost.
		b.forget(key)
		b.mu.Unlock()
	default:
		b.mu.Unlock()
	}
	b.queue.Forget(key)
}

// put writes an object; that of a static pod belongs to this node. Where the API server
// does not know us by a node it belongs to nothing, and the policy says so.
func (b *Backend) put(ctx context.Context, object *v1alpha1.ServiceEndpoint) (*v1alpha1.ServiceEndpoint, error) {
	if len(object.OwnerReferences) == 0 && object.Spec.PodUID != "" {
		uid, err := b.client.nodeUID(ctx)
		if err != nil {
			return nil, err
		}
		if uid != "" {
			object.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: b.node, UID: uid}}
		}
	}
	result, err := b.client.apply(ctx, object)
	if apierrors.IsForbidden(err) {
		b.client.forgetNode() // it may be another one of the same name by now
	}
	return result, err
}

// applied takes the result of a write of the record of this generation.
func (b *Backend) applied(ctx context.Context, key types.NamespacedName, generation uint64, result *v1alpha1.ServiceEndpoint, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.own[key]
	current := o != nil && o.want != nil && o.want.Generation == generation
	switch {
	case err == nil:
		b.succeeded(key, verbApply)
		b.ownSeen(key, result) //nolint:contextcheck // the local table follows, also at the end
		switch {
		case !current:
		// Nothing is kept of an object that is being deleted.
		case b.pending(o) && o.have != nil && o.have.ResourceVersion == result.ResourceVersion:
			b.refuse(key, o, "the Kubernetes API changes what is written to it: does an admission webhook match ServiceEndpoints?")
		case o.refused:
			o.accept()
			if b.pending(o) && o.have != nil {
				b.queue.Add(key) // somebody changed it meanwhile, which was left for now
			}
		}
	case final(err):
		b.metrics.writes.WithLabelValues(verbApply, resultRefused).Inc()
		b.queue.Forget(key)
		if current {
			b.refuse(key, o, "the Kubernetes API refuses a ServiceEndpoint", "error", err)
		}
	default:
		b.failed(ctx, key, verbApply, err)
	}
	if o != nil {
		o.writing = nil
	}
}

// deleted takes the result of a deletion of the object with this UID.
func (b *Backend) deleted(ctx context.Context, key types.NamespacedName, uid types.UID, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && !apierrors.IsNotFound(err) {
		b.failed(ctx, key, verbDelete, err)
		return
	}
	b.succeeded(key, verbDelete)
	if o := b.own[key]; o != nil && o.have != nil && o.have.UID == uid {
		o.have, o.deleted = nil, uid // until the watch tells its end
	}
}

func (b *Backend) succeeded(key types.NamespacedName, verb string) {
	b.metrics.writes.WithLabelValues(verb, resultOK).Inc()
	b.queue.Forget(key)
	b.link.writeErr = nil
}

// failed tries again later.
func (b *Backend) failed(ctx context.Context, key types.NamespacedName, verb string, err error) {
	if ctx.Err() != nil {
		return
	}
	b.metrics.writes.WithLabelValues(verb, resultFailed).Inc()
	err = explain(err)
	if b.link.writeErr == nil && !b.leaving() {
		b.log.Error("ServiceEndpoint cannot be written yet; it is tried again", "object", key.String(), "verb", verb, "error", err)
	}
	b.link.writeErr = err
	b.queue.AddRateLimited(key)
}

// final says whether trying again soon is in vain: the namespace is gone or about to be,
// or the API server, or a webhook of it, finds the object itself wrong.
func final(err error) bool {
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return true
	}
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}
