package podsource_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/podsource"
	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

const (
	node    = "node1"
	patient = 30 * time.Second
)

// cluster is an API server with a Source of node1 that runs against it.
type cluster struct {
	t      *testing.T
	server *apiservertest.Server
	client kubernetes.Interface
	source *podsource.Source

	mu    sync.Mutex
	told  []model.Workload
	fresh chan struct{}
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	server := apiservertest.Start(t)
	c := &cluster{t: t, server: server, client: kubernetes.NewForConfigOrDie(server.Admin()), fresh: make(chan struct{}, 1)}
	var err error
	c.source, err = podsource.New(podsource.Config{
		Client: c.client, Namespaces: metadata.NewForConfigOrDie(server.Admin()), Node: node, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.source.Run(ctx, c.take) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return c
}

func (c *cluster) take(_ context.Context, w model.Workload) {
	c.mu.Lock()
	c.told = append(c.told, w)
	c.mu.Unlock()
	select {
	case c.fresh <- struct{}{}:
	default:
	}
}

// await waits until the sink was told a state that fits.
func (c *cluster) await(what string, fits func(model.Workload) bool) model.Workload {
	c.t.Helper()
	deadline := time.NewTimer(patient)
	defer deadline.Stop()
	for {
		c.mu.Lock()
		for _, w := range c.told {
			if fits(w) {
				c.mu.Unlock()
				return w
			}
		}
		told := c.told
		c.mu.Unlock()
		select {
		case <-c.fresh:
		case <-deadline.C:
			c.t.Fatalf("%s was not told; told: %+v", what, told)
		}
	}
}

func (c *cluster) namespace(name string, labels map[string]string) {
	c.t.Helper()
	must(c.t)(c.client.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}))
	must(c.t)(c.client.CoreV1().ServiceAccounts(name).Create(c.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "till"}}, metav1.CreateOptions{}))
}

// must takes what an API call returns and fails the test when it failed.
func must(t *testing.T) func(any, error) {
	t.Helper()
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// pod makes a pod of the account till; edit may change it before.
func (c *cluster) pod(namespace, name, onNode string, edit func(*corev1.Pod)) *corev1.Pod {
	c.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       corev1.PodSpec{NodeName: onNode, ServiceAccountName: "till", Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}
	if edit != nil {
		edit(p)
	}
	made, err := c.client.CoreV1().Pods(namespace).Create(c.t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return made
}

func (c *cluster) status(p *corev1.Pod, status corev1.PodStatus) {
	c.t.Helper()
	p = p.DeepCopy()
	p.Status, p.ResourceVersion = status, ""
	must(c.t)(c.client.CoreV1().Pods(p.Namespace).UpdateStatus(c.t.Context(), p, metav1.UpdateOptions{}))
}

func isReady(value corev1.ConditionStatus) corev1.PodStatus {
	return corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
		{Type: corev1.PodInitialized, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: value},
	}}
}

func (c *cluster) delete(p *corev1.Pod, grace int64) {
	c.t.Helper()
	if err := c.client.CoreV1().Pods(p.Namespace).Delete(c.t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &grace}); err != nil {
		c.t.Fatal(err)
	}
}

// One pod from its making to its end, as the sink and Lookup see it.
func TestLifeOfAPod(t *testing.T) {
	c := newCluster(t)
	c.namespace("shop", nil)
	elsewhere := c.pod("shop", "elsewhere", "node2", nil)
	made := c.pod("shop", "payments-1", node, func(p *corev1.Pod) {
		p.Annotations = map[string]string{annotation.KeyPorts: "8080,9090", "example.com/note": "not ours"}
		p.Labels = map[string]string{"app": "payments"}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	got, err := c.source.Lookup(ctx, "shop", "payments-1", string(made.UID))
	if err != nil {
		t.Fatal(err)
	}
	want := model.Workload{
		Namespace: "shop", Name: "payments-1", UID: string(made.UID), ObjectUID: string(made.UID),
		Account: "till", Annotations: map[string]string{annotation.KeyPorts: "8080,9090"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a new pod (-want +got):\n%s", diff)
	}
	if byName, err := c.source.Lookup(ctx, "shop", "payments-1", ""); err != nil || byName.UID != want.UID {
		t.Errorf("Lookup without a UID = %+v, %v", byName, err)
	}
	mine := func(fits func(model.Workload) bool) func(model.Workload) bool {
		return func(w model.Workload) bool { return w.UID == want.UID && fits(w) }
	}
	c.status(made, isReady(corev1.ConditionTrue))
	c.await("Ready", mine(func(w model.Workload) bool { return w.Running && w.Ready && w.Ending == model.Living }))
	c.status(made, isReady(corev1.ConditionFalse))
	c.await("not Ready any more", func(w model.Workload) bool { return w.UID == want.UID && !w.Ready })
	c.delete(made, 30)
	c.await("its deletion time", mine(func(w model.Workload) bool { return w.Ending == model.Terminating }))
	c.delete(made, 0)
	c.await("its end", mine(func(w model.Workload) bool { return w.Ending == model.Finished && !w.Ready }))

	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for _, gone := range []*corev1.Pod{made, elsewhere} {
		if w, err := c.source.Lookup(short, "shop", gone.Name, string(gone.UID)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Lookup of %s = %+v, %v; want that it is not among the node's pods", gone.Name, w, err)
		}
	}
	if pods, ok := c.source.Pods(); !ok || len(pods) != 0 {
		t.Errorf("pods left: %+v, %v", pods, ok)
	}
}

// CNI-37: a pod whose containers ended for good is finished although its object
// and its address stay.
func TestFinishedPod(t *testing.T) {
	c := newCluster(t)
	c.namespace("shop", nil)
	job := c.pod("shop", "job", node, nil)
	c.status(job, corev1.PodStatus{Phase: corev1.PodSucceeded})
	c.await("the end of a pod that succeeded", func(w model.Workload) bool { return w.Name == "job" && w.Ending == model.Finished })
	evicted := c.pod("shop", "evicted", node, nil)
	c.status(evicted, corev1.PodStatus{Phase: corev1.PodFailed})
	c.await("the end of a pod that failed", func(w model.Workload) bool { return w.Name == "evicted" && w.Ending == model.Finished })
}

// The pod's own label wins over its namespace's, and a change of the namespace's
// reaches the pods that have none.
func TestWordsOfLabels(t *testing.T) {
	c := newCluster(t)
	c.namespace("shop", map[string]string{annotation.KeyManaged: "true"})
	c.pod("shop", "plain", node, nil)
	c.pod("shop", "out", node, func(p *corev1.Pod) { p.Labels = map[string]string{annotation.KeyManaged: "false"} })
	c.pod("shop", "odd", node, func(p *corev1.Pod) { p.Labels = map[string]string{annotation.KeyManaged: "maybe"} })
	word := func(name string, m annotation.Managed) func(model.Workload) bool {
		return func(w model.Workload) bool { return w.Name == name && w.Word == m }
	}
	c.await("the namespace's word", word("plain", annotation.Joined))
	c.await("the pod's own word", word("out", annotation.Out))
	odd := c.await("a label that is no word", word("odd", annotation.Unset))
	if odd.WordProblem == "" {
		t.Error("a label that is no word is not reported")
	}
	c.namespace("ops", nil)
	c.pod("ops", "later", node, nil)
	c.await("a namespace without a word", word("later", annotation.Unset))
	must(t)(c.client.CoreV1().Namespaces().Patch(t.Context(), "ops", types.MergePatchType, []byte(`{"metadata":{"labels":{"aether.io/managed":"true"}}}`), metav1.PatchOptions{}))
	c.await("the namespace's new word", word("later", annotation.Joined))
}

// The runtime knows a static pod by the UID in its mirror annotation; its API
// object has another one. Host network is seen.
func TestStaticPod(t *testing.T) {
	c := newCluster(t)
	must(t)(c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{}))
	c.namespace("shop", nil)
	mirror := c.pod("shop", "static-node1", node, func(p *corev1.Pod) {
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "0123456789abcdef"}
		p.Spec.ServiceAccountName, p.Spec.HostNetwork = "", true
	})
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	w, err := c.source.Lookup(ctx, "shop", "static-node1", "0123456789abcdef")
	if err != nil {
		t.Fatal(err)
	}
	if w.ObjectUID != string(mirror.UID) || !w.HostNetwork || w.Account != "default" || len(w.Annotations) != 0 {
		t.Errorf("static pod: %+v", w)
	}
}

// kubectl delete of a static pod's mirror: what the API server makes of it ends nothing,
// and the mirror that the kubelet makes then is the same pod's.
func TestMirrorDeleted(t *testing.T) {
	c := newCluster(t)
	must(t)(c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{}))
	c.namespace("shop", nil)
	mirror := func() *corev1.Pod {
		return c.pod("shop", "static-node1", node, func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "0123456789abcdef"}
			p.Spec.ServiceAccountName = ""
		})
	}
	first := mirror()
	c.status(first, isReady(corev1.ConditionTrue))
	c.await("Ready", func(w model.Workload) bool { return w.Ready })
	c.delete(first, 30)
	c.delete(first, 0)
	second := mirror()
	w := c.await("the second mirror", func(w model.Workload) bool { return w.ObjectUID == string(second.UID) })
	if w.UID != "0123456789abcdef" || !w.Ready || !w.Running {
		t.Errorf("the second mirror: %+v", w)
	}
	c.status(second, isReady(corev1.ConditionFalse))
	c.await("what the kubelet says of the second mirror", func(w model.Workload) bool { return w.ObjectUID == string(second.UID) && !w.Ready })
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.told {
		if w.Ending != model.Living {
			t.Errorf("told %+v", w)
		}
	}
}

// A pod that comes while an ADD already waits for it ends the wait; and with the
// API server away what was seen last stands, and is caught up afterwards.
func TestLateAndAway(t *testing.T) {
	c := newCluster(t)
	c.namespace("shop", nil)
	type answer struct {
		w   model.Workload
		err error
	}
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	waiting := make(chan answer, 1)
	go func() {
		w, err := c.source.Lookup(ctx, "shop", "late", "")
		waiting <- answer{w, err}
	}()
	late := c.pod("shop", "late", node, nil)
	if got := <-waiting; got.err != nil || got.w.UID != string(late.UID) {
		t.Fatalf("Lookup that began before the pod = %+v", got)
	}
	c.server.Stop(t)
	if w, err := c.source.Lookup(ctx, "shop", "late", string(late.UID)); err != nil || w.Name != "late" {
		t.Errorf("Lookup with the API server away = %+v, %v", w, err)
	}
	c.server.Restart(t)
	c.pod("shop", "after", node, nil)
	c.await("a pod made after the outage", func(w model.Workload) bool { return w.Name == "after" })
}
