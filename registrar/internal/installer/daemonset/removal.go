// Package daemonset answers, from the Kubernetes API, the one question that an
// installer asks at its end: is the registrar's DaemonSet gone for good?
package daemonset

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/portolan-mesh/portolan/registrar/internal/installer"
)

// Config says which DaemonSet it is.
type Config struct {
	// Client may get, list and watch the DaemonSet and its namespace.
	Client kubernetes.Interface
	// Namespace and Name are the DaemonSet's.
	Namespace, Name string
	// Log takes what goes wrong with the watches, at debug level.
	Log *slog.Logger
}

// Removal implements installer.Removal for one DaemonSet. Its methods are safe for
// concurrent use.
type Removal struct {
	cfg Config
	// set and namespace are whether each was last seen to be deleted, or in deletion.
	set, namespace atomic.Bool
}

var _ installer.Removal = (*Removal)(nil)

// New returns a Removal that has seen nothing until it runs.
func New(cfg Config) *Removal { return &Removal{cfg: cfg} }

// Run watches until ctx ends. Who deletes the mesh deletes its account and its rights
// along with the DaemonSet, and before it: nothing can be asked at the end, but a watch
// that runs is told of the deletion all the same.
func (r *Removal) Run(ctx context.Context) {
	var g sync.WaitGroup
	for _, w := range []struct {
		from                      cache.Getter
		resource, namespace, name string
		of                        runtime.Object
		gone                      *atomic.Bool
	}{
		{r.cfg.Client.AppsV1().RESTClient(), "daemonsets", r.cfg.Namespace, r.cfg.Name, &appsv1.DaemonSet{}, &r.set},
		{r.cfg.Client.CoreV1().RESTClient(), "namespaces", metav1.NamespaceAll, r.cfg.Namespace, &corev1.Namespace{}, &r.namespace},
	} {
		note := func(obj any) {
			if o, ok := obj.(metav1.Object); ok {
				w.gone.Store(o.GetDeletionTimestamp() != nil)
			}
		}
		informer := cache.NewSharedInformer(cache.NewListWatchFromClient(w.from, w.resource, w.namespace, fields.OneTermEqualSelector("metadata.name", w.name)), w.of, 0)
		// Neither fails before the informer runs.
		_ = informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
			r.cfg.Log.Debug("watch failed and is made again", "what", w.resource, "name", w.name, "error", err)
		})
		_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    note,
			UpdateFunc: func(_, obj any) { note(obj) },
			DeleteFunc: func(any) { w.gone.Store(true) },
		})
		g.Go(func() { informer.RunWithContext(ctx) })
	}
	g.Wait()
}

// Seen reports whether Run last saw the DaemonSet or its namespace deleted, or in deletion.
// It asks nobody.
func (r *Removal) Seen() bool { return r.set.Load() || r.namespace.Load() }

// Removed reports whether the DaemonSet is being deleted or does not exist. The API's
// own words count, now or, when it says nothing now, those that Run heard last: a node
// that shuts down, an expired token, a proxy that knows no such path and a time-out are
// errors (CNI-3).
func (r *Removal) Removed(ctx context.Context) (bool, error) {
	ds, err := r.cfg.Client.AppsV1().DaemonSets(r.cfg.Namespace).Get(ctx, r.cfg.Name, metav1.GetOptions{})
	switch {
	case err == nil:
		// A namespace in deletion takes it along.
		return ds.DeletionTimestamp != nil || r.namespace.Load(), nil
	case apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse),
		r.Seen():
		return true, nil
	}
	return false, fmt.Errorf("get DaemonSet %s/%s: %w", r.cfg.Namespace, r.cfg.Name, err)
}
