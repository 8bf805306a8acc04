package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// maxReconnect bounds the pause before the API server is asked again.
const maxReconnect = 5 * time.Second

// read follows the API server until ctx ends.
func (b *Backend) read(ctx context.Context) {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := b.client.list(ctx, o)
			b.answered(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := b.client.watch(ctx, o)
			b.answered(ctx, err)
			return w, err
		},
	}
	cache.NewReflectorWithOptions(source, &v1alpha1.ServiceEndpoint{}, store{b}, cache.ReflectorOptions{
		Name:    v1alpha1.Resource,
		Backoff: &wait.Backoff{Duration: minRetry, Factor: 2, Jitter: 1, Steps: 10, Cap: maxReconnect},
	}).RunWithContext(ctx)
}

// answered notes whether the API server answers the reader.
func (b *Backend) answered(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsTimeout(err) || apierrors.IsBadRequest(err) || apierrors.IsInvalid(err) {
		return // it answers, and will be asked another way: the version is too old or too new, or it knows no streaming list
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	was, asked := b.link.err, b.link.asked
	b.link.err, b.link.asked = explain(err), true
	switch {
	case err == nil && was != nil:
		b.log.Info("the Kubernetes API answers", "server", b.host, "after", time.Since(b.link.since).Round(time.Millisecond).String())
		b.link.since = time.Time{}
		b.retryAll()
	case err != nil && (was == nil || !asked):
		b.link.since = time.Now()
		if b.leaving() {
			return
		}
		b.log.Error("the Kubernetes API is away; what is known of other nodes is served on", "server", b.host, "error", b.link.err)
	case err != nil && apierrors.ReasonForError(was) != apierrors.ReasonForError(err) && !b.leaving():
		b.log.Error("the Kubernetes API is still away", "server", b.host, "error", b.link.err)
	}
}

// retryAll writes at once what waits for its next try.
func (b *Backend) retryAll() {
	for key, o := range b.own {
		if !o.refused && b.pending(o) {
			b.queue.Forget(key)
			b.queue.Add(key)
		}
	}
}

// store takes what the reflector reads. It keeps no object.
type store struct{ b *Backend }

var (
	_ cache.TransformingStore      = store{}
	_ cache.ResourceVersionUpdater = store{}
)

// Add implements cache.ReflectorStore.
func (s store) Add(object any) error {
	return s.with(object, s.b.seen)
}

// Update implements cache.ReflectorStore.
func (s store) Update(object any) error {
	return s.with(object, s.b.seen)
}

// Delete implements cache.ReflectorStore.
func (s store) Delete(object any) error {
	return s.with(object, s.b.vanished)
}

// Resync implements cache.ReflectorStore; there is nothing to do again.
func (store) Resync() error { return nil }

// Replace implements cache.ReflectorStore: a complete list, as of version.
func (s store) Replace(list []any, version string) error {
	objects := make([]*v1alpha1.ServiceEndpoint, 0, len(list))
	for _, one := range list {
		object, ok := one.(*v1alpha1.ServiceEndpoint)
		if !ok {
			return fmt.Errorf("a list of ServiceEndpoints has a %T", one)
		}
		objects = append(objects, object)
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.b.replace(objects, version)
	return nil
}

// Transformer implements cache.TransformingStore: what is never read is not kept
// while a list streams in.
func (store) Transformer() cache.TransformFunc {
	return func(one any) (any, error) {
		if object, ok := one.(*v1alpha1.ServiceEndpoint); ok {
			object.ManagedFields, object.Annotations, object.Labels, object.OwnerReferences = nil, nil, nil, nil
		}
		return one, nil
	}
}

// UpdateResourceVersion implements cache.ResourceVersionUpdater.
func (s store) UpdateResourceVersion(version string) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.b.link.version = version
}

func (store) with(one any, take func(types.NamespacedName, *v1alpha1.ServiceEndpoint)) error {
	object, ok := one.(*v1alpha1.ServiceEndpoint)
	if !ok {
		return fmt.Errorf("a watch of ServiceEndpoints has a %T", one)
	}
	take(types.NamespacedName{Namespace: object.Namespace, Name: object.Name}, object)
	return nil
}

// seen takes an object that was made or changed.
func (b *Backend) seen(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(key, object)
}

func (b *Backend) take(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) {
	if _, own := b.own[key]; own || object.Spec.NodeName == b.node {
		b.ownSeen(key, object)
	} else {
		b.foreignSeen(key, object)
	}
}

// vanished takes that an object was deleted; its resourceVersion is that of the
// deletion.
func (b *Backend) vanished(key types.NamespacedName, object *v1alpha1.ServiceEndpoint) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.foreignVanished(key)
	b.ownVanished(key, object.ResourceVersion)
}

// replace takes a complete list.
func (b *Backend) replace(objects []*v1alpha1.ServiceEndpoint, version string) {
	if older(version, b.link.version) {
		// The API server has lost changes, as after a restored backup: what it had of
		// ours says nothing any more.
		b.log.Warn("the Kubernetes API went back in time", "from", b.link.version, "to", version)
		for _, o := range b.own {
			o.have = nil
		}
	}
	b.link.version = version
	b.metrics.relists.Inc()
	// Of two objects with one UID the first one made has it, wherever this is asked.
	slices.SortFunc(objects, func(x, y *v1alpha1.ServiceEndpoint) int {
		return cmp.Or(x.CreationTimestamp.Compare(y.CreationTimestamp.Time), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
	listed := make(map[types.NamespacedName]struct{}, len(objects))
	for _, object := range objects {
		listed[types.NamespacedName{Namespace: object.Namespace, Name: object.Name}] = struct{}{}
	}
	for key := range b.foreign.claims {
		if _, ok := listed[key]; !ok {
			b.foreignVanished(key)
		}
	}
	for key := range b.foreign.unusable { // what never had a claim
		if _, ok := listed[key]; !ok {
			delete(b.foreign.unusable, key)
		}
	}
	for key := range b.own {
		if _, ok := listed[key]; !ok {
			b.ownVanished(key, version)
		}
	}
	for _, object := range objects {
		b.take(types.NamespacedName{Namespace: object.Namespace, Name: object.Name}, object)
	}
	b.sweep()
	b.listed()
}

// sweep withdraws the records of the snapshot that no object has.
func (b *Backend) sweep() {
	for _, ep := range b.local.Snapshot() {
		_, held := b.foreign.holders[ep.UID]
		_, own := b.keys[ep.UID]
		_, attached := b.attached[ep.UID]
		if held || own || attached || ep.Node == b.node && b.attached == nil {
			continue // those of this node are sorted out by Retain
		}
		_ = b.local.Withdraw(context.Background(), ep.UID, ep.Generation) // nobody publishes meanwhile: mu is held
	}
}

// listed lets watches begin, writes what waits, and makes the first list a snapshot.
func (b *Backend) listed() {
	first := !b.link.listed
	b.link.listed = true
	b.serveNow()
	b.retryAll()
	if first && !b.link.saved {
		b.running.Go(func() {
			if err := errors.Join(b.local.Flush(), b.snapshot.mark()); err != nil {
				b.log.Error("the list of endpoints cannot be saved; a start without the Kubernetes API would serve none", "error", err)
			}
		})
	}
}
