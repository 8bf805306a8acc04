package daemonset

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	kubeappsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

const (
	namespace = "portolan-system"
	name      = "portolan-registrar"
)

// CNI-3, on a real API server: a DaemonSet that is gone or going is a removal; one that
// is there is none, and every answer that is no answer is an error.
func TestRemoved(t *testing.T) {
	server := apiservertest.Start(t)
	admin := kubernetes.NewForConfigOrDie(server.Admin())
	noRights := server.PodAccount(t, namespace, "nobody", "node1") // makes the namespace
	strange := httptest.NewServer(http.NotFoundHandler())
	defer strange.Close()
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer silent.Close()
	expired := rest.AnonymousClientConfig(server.Admin())
	expired.BearerToken = "expired"
	sets := admin.AppsV1().DaemonSets(namespace)

	check := func(what string, cfg *rest.Config, want bool, wantErr string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if wantErr == "deadline exceeded" {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
		}
		defer cancel()
		got, err := Removal{Client: kubernetes.NewForConfigOrDie(cfg).AppsV1(), Namespace: namespace, Name: name}.Removed(ctx)
		switch {
		case got != want, wantErr == "" && err != nil:
			t.Errorf("%s: removed %v, %v, want %v", what, got, err, want)
		case wantErr != "" && (err == nil || !strings.Contains(err.Error(), wantErr) || !strings.Contains(err.Error(), namespace+"/"+name)):
			t.Errorf("%s: error %v, want one with %q that names the DaemonSet", what, err, wantErr)
		}
	}

	check("never there", server.Admin(), true, "")
	if _, err := sets.Create(t.Context(), daemonSet(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	check("there", server.Admin(), false, "")
	check("no rights", noRights, false, "forbidden")
	check("expired token", expired, false, "nauthorized")
	check("a 404 that is not the API's", &rest.Config{Host: strange.URL}, false, "could not find")
	check("no answer", &rest.Config{Host: silent.URL}, false, "deadline exceeded")
	server.Stop(t)
	check("nobody there", server.Admin(), false, "conn") // refused, or the old one is gone
	server.Restart(t)
	foreground := metav1.DeletePropagationForeground // no controller runs: it stays in deletion
	if err := sets.Delete(t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
		t.Fatal(err)
	}
	check("in deletion", server.Admin(), true, "")
}

func daemonSet() *kubeappsv1.DaemonSet {
	labels := map[string]string{"app": name}
	return &kubeappsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: kubeappsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			},
		},
	}
}
