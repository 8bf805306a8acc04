package podsource

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The first word on a pod and on its namespace come from two watches, at one time: the
// sink is told of the pod, whichever comes first.
func TestPodBesideItsNamespace(t *testing.T) {
	const pods = 5000
	source, err := New(Config{Client: &kubernetes.Clientset{}, Namespaces: &metadata.Client{}, Node: "node1", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		source.work(t.Context(), func(_ context.Context, w model.Workload) { told[w.UID] = true })
	}()
	for i := range pods {
		name := fmt.Sprint(i)
		var both sync.WaitGroup
		both.Go(func() {
			source.onPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "p", UID: types.UID(name)}})
		})
		both.Go(func() { source.onNamespace(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}) })
		both.Wait()
	}
	source.queue.ShutDownWithDrain()
	<-ended
	for i := range pods {
		if !told[fmt.Sprint(i)] {
			t.Fatalf("of pod %d of %d the sink was not told", i, pods)
		}
	}
}
