package podsource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// workers is how many pods' changes the sink works on at one time.
const workers = 4

// Config is what a Source needs.
type Config struct {
	// Client watches the node's pods, Namespaces the labels of all namespaces.
	Client     kubernetes.Interface
	Namespaces metadata.Interface
	// Node is the node's name in the API.
	Node string
	// Leaving reports whether the mesh is being taken out of the cluster, when a watch
	// that fails is nothing to worry about; nil is never.
	Leaving func() bool
	// Log takes what nobody is told otherwise.
	Log *slog.Logger
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer
}

// Source is the pods of one node. Its methods are safe for concurrent use.
type Source struct {
	cfg        Config
	pods       cache.SharedIndexInformer
	namespaces cache.SharedIndexInformer
	// queue holds the pods whose state the sink has not got; of one pod the sink
	// works on one state at a time.
	queue   workqueue.TypedDelayingInterface[podKey]
	metrics metrics
	// synced say whether the first lists have arrived here, not only in the informers.
	synced []cache.InformerSynced

	mu    sync.Mutex // guards the rest
	known map[podKey]pod
	// words are the namespaces' labels; a namespace without one is there too.
	words map[string]word
	// changed is closed, and made anew, at every change.
	changed chan struct{}
}

// word is what a namespace's label says.
type word struct {
	managed annotation.Managed
	problem string
}

// New returns a Source that knows nothing until it runs.
func New(cfg Config) (*Source, error) {
	if cfg.Client == nil || cfg.Namespaces == nil || cfg.Node == "" || cfg.Log == nil {
		return nil, errors.New("pod source: Client, Namespaces, Node and Log must be set")
	}
	s := &Source{
		cfg:     cfg,
		queue:   workqueue.NewTypedDelayingQueue[podKey](),
		known:   map[podKey]pod{},
		words:   map[string]word{},
		changed: make(chan struct{}),
	}
	ofNode := func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", cfg.Node).String()
	}
	s.pods = informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTweakListOptions(ofNode)).Core().V1().Pods().Informer()
	s.namespaces = metadatainformer.NewSharedInformerFactory(cfg.Namespaces, 0).ForResource(corev1.SchemeGroupVersion.WithResource("namespaces")).Informer()
	if err := s.metrics.register(cfg.Metrics, s); err != nil {
		return nil, err
	}
	for what, informer := range map[string]cache.SharedIndexInformer{"pods": s.pods, "namespaces": s.namespaces} {
		err := errors.Join(informer.SetTransform(trim), informer.SetWatchErrorHandlerWithContext(s.watchFailed(what)))
		if err != nil {
			return nil, fmt.Errorf("prepare the watch of %s: %w", what, err)
		}
	}
	return s, s.handle()
}

// handle registers what takes the events.
func (s *Source) handle() error {
	pods, err := s.pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    s.onPod,
		UpdateFunc: s.onPodChanged,
		DeleteFunc: s.onPodGone,
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	namespaces, err := s.namespaces.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    s.onNamespace,
		UpdateFunc: func(_, obj any) { s.onNamespace(obj) },
		DeleteFunc: s.onNamespaceGone,
	})
	if err != nil {
		return fmt.Errorf("watch namespaces: %w", err)
	}
	s.synced = []cache.InformerSynced{pods.HasSynced, namespaces.HasSynced}
	return nil
}

func (s *Source) watchFailed(what string) cache.WatchErrorHandlerWithContext {
	return func(ctx context.Context, _ *cache.Reflector, err error) {
		if ctx.Err() != nil {
			return
		}
		s.metrics.failures.WithLabelValues(what).Inc()
		level := slog.LevelWarn
		if s.cfg.Leaving != nil && s.cfg.Leaving() {
			level = slog.LevelDebug
		}
		s.cfg.Log.Log(ctx, level, "watch of the API server failed and is made again; what was seen last stands", "what", what, "error", err)
	}
}

// Run watches until ctx ends. sink gets every pod that there is, then every
// change; of one pod one state at a time and always the latest. A pod whose object
// is gone comes once more, as Finished; a static one only when no other mirror comes.
func (s *Source) Run(ctx context.Context, sink func(context.Context, model.Workload)) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { s.pods.RunWithContext(ctx); return nil })
	g.Go(func() error { s.namespaces.RunWithContext(ctx); return nil })
	g.Go(func() error {
		if cache.WaitForCacheSync(ctx.Done(), s.synced...) {
			s.cfg.Log.Info("pods of this node are known", "node", s.cfg.Node, "pods", s.count())
		}
		<-ctx.Done()
		s.queue.ShutDown()
		return nil
	})
	for range workers {
		g.Go(func() error { s.work(ctx, sink); return nil })
	}
	return g.Wait()
}

// work hands changes to sink until the queue is shut down.
func (s *Source) work(ctx context.Context, sink func(context.Context, model.Workload)) {
	for {
		key, end := s.queue.Get()
		if end {
			return
		}
		if w, ok := s.take(key); ok && ctx.Err() == nil {
			sink(ctx, w)
		}
		s.queue.Done(key)
	}
}

// take returns the pod's state for the sink; one that has ended is forgotten with it. Of
// one whose end is not certain yet there is nothing to say.
func (s *Source) take(key podKey) (model.Workload, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.known[key]
	now := time.Now()
	switch {
	case !ok:
		return model.Workload{}, false
	case p.ended(now):
		delete(s.known, key)
		p.workload.Ready, p.workload.Ending = false, model.Finished
		return p.workload, true
	case p.gone:
		s.queue.AddAfter(key, p.until.Sub(now))
		return model.Workload{}, false
	}
	return s.complete(p)
}

// complete adds the namespace's word; ok is false while the namespace is not known.
// The caller holds mu.
func (s *Source) complete(p pod) (w model.Workload, ok bool) {
	of, ok := s.words[p.workload.Namespace]
	w = p.workload
	switch {
	case p.word != annotation.Unset || p.problem != "":
		w.Word, w.WordProblem = p.word, p.problem
	default:
		w.Word, w.WordProblem = of.managed, of.problem
	}
	return w, ok
}

// Lookup returns the pod with that UID, the runtime's or the API object's; with no
// UID, as some runtimes have it, the youngest of that name. It waits for a pod, or its namespace, that has not been
// seen yet until ctx ends; then the error says so.
func (s *Source) Lookup(ctx context.Context, namespace, name, uid string) (model.Workload, error) {
	for {
		w, ok, changed := s.find(namespace, name, uid)
		if ok {
			return w, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return model.Workload{}, fmt.Errorf("pod %s/%s (UID %q) is not among the pods of node %s that the API server has told of: %w", namespace, name, uid, s.cfg.Node, ctx.Err())
		}
	}
}

// Known is Lookup that does not wait.
func (s *Source) Known(namespace, name, uid string) (w model.Workload, ok bool) {
	w, ok, _ = s.find(namespace, name, uid)
	return w, ok
}

func (s *Source) find(namespace, name, uid string) (w model.Workload, ok bool, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.known[podKey{namespace, name, uid}]
	if !ok {
		p, ok = s.youngest(namespace, name)
		ok = ok && (uid == "" || p.workload.ObjectUID == uid)
	}
	if ok = ok && !p.ended(time.Now()); ok {
		w, ok = s.complete(p)
	}
	return w, ok, s.changed
}

// youngest finds a pod by its name. The caller holds mu.
func (s *Source) youngest(namespace, name string) (found pod, ok bool) {
	now := time.Now()
	for _, p := range s.known {
		if !p.ended(now) && p.workload.Namespace == namespace && p.workload.Name == name && (!ok || p.created.After(found.created)) {
			found, ok = p, true
		}
	}
	return found, ok
}

// Pods returns the pods that are known and whose namespace is, in the order of
// their names; ok is false before the first list of pods and namespaces is complete.
func (s *Source) Pods() (pods []model.Workload, ok bool) {
	for _, synced := range s.synced {
		if !synced() {
			return nil, false
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]model.Workload, 0, len(s.known))
	now := time.Now()
	for _, p := range s.known {
		if w, ok := s.complete(p); ok && !p.ended(now) {
			out = append(out, w)
		}
	}
	slices.SortFunc(out, func(a, b model.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return out, true
}

func (s *Source) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.known)
}

func (s *Source) onPod(obj any) {
	o, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	p := podOf(o)
	key := p.key()
	s.change(func() []podKey {
		if old, ok := s.known[key]; ok {
			p.succeed(old)
		}
		s.known[key] = p
		return []podKey{key}
	})
}

// onPodChanged is told one change as well of a pod that was deleted and of the one that
// took its name, when both were done before a watch that had failed was made again.
func (s *Source) onPodChanged(was, is any) {
	old, ok := was.(*corev1.Pod)
	if p, ok2 := is.(*corev1.Pod); ok && ok2 && old.UID != p.UID {
		s.onPodGone(old)
	}
	s.onPod(is)
}

func (s *Source) onPodGone(obj any) {
	if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	o, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	p := podOf(o)
	key := p.key()
	s.change(func() []podKey {
		if old, ok := s.known[key]; ok && old.workload.ObjectUID == p.workload.ObjectUID {
			p = old // with what it took over
		}
		p.gone = true
		if p.mirror && p.workload.Ending == model.Living {
			p.until = time.Now().Add(model.MirrorGrace)
		}
		s.known[key] = p
		return []podKey{key}
	})
}

func (s *Source) onNamespace(obj any) {
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		managed, problem := labelWord("namespace", o.Labels)
		s.setWord(o.Name, word{managed: managed, problem: problem})
	}
}

// onNamespaceGone forgets the namespace once its pods are gone: they come first.
func (s *Source) onNamespaceGone(obj any) {
	if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = last.Obj
	}
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		s.change(func() []podKey { delete(s.words, o.Name); return nil })
	}
}

func (s *Source) setWord(namespace string, next word) {
	s.mu.Lock()
	old, known := s.words[namespace]
	s.mu.Unlock()
	if known && old == next {
		return
	}
	s.change(func() (affected []podKey) {
		s.words[namespace] = next
		for key := range s.known { // a pod that comes from here on has this word
			if key.namespace == namespace {
				affected = append(affected, key)
			}
		}
		return affected
	})
}

// change applies one change, wakes those that wait and queues the pods that it
// touches, which apply returns.
func (s *Source) change(apply func() []podKey) {
	s.mu.Lock()
	keys := apply()
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()
	for _, key := range keys {
		s.queue.Add(key)
	}
}
