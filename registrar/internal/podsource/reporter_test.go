package podsource_test

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/podsource"
	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

// A report is an event of the pod, found by its UID as kubectl does; one that is too
// long is cut between two characters.
func TestReport(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(apiservertest.Start(t).Admin())
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	must(t)(client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}))
	selector := fields.SelectorFromSet(fields.Set{"involvedObject.kind": "Pod", "involvedObject.uid": "u1"}).String()
	watch, err := client.CoreV1().Events("shop").Watch(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()

	r := podsource.NewReporter(client, node)
	defer r.Close()
	w := model.Workload{Namespace: "shop", Name: "payments-1", ObjectUID: "u1"}
	r.Report(w, "InvalidAnnotation", "the port is no port")
	r.Report(w, "InvalidAnnotation", strings.Repeat("ä", 2000))
	for _, want := range []string{"the port is no port", strings.Repeat("ä", 512)} {
		select {
		case e := <-watch.ResultChan():
			event, ok := e.Object.(*corev1.Event)
			if !ok || event.Message != want || event.Type != corev1.EventTypeWarning || event.InvolvedObject.Name != "payments-1" || event.Source.Host != node {
				t.Errorf("event %+v, want the message %q", e.Object, want)
			}
		case <-ctx.Done():
			t.Fatal("no event")
		}
	}
}
