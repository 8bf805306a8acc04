package daemonset

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	kubeappsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
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
		got, err := removalFor(cfg).Removed(ctx)
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

// CNI-3, as `kubectl delete -k` does it: the account and its rights go before the
// DaemonSet, so that the API has no answer at the end. What the watches heard is one.
func TestRemovedWithItsRights(t *testing.T) {
	for _, tt := range []struct {
		what   string
		remove func(context.Context, kubernetes.Interface) error
	}{
		{"the DaemonSet", func(ctx context.Context, admin kubernetes.Interface) error {
			return admin.AppsV1().DaemonSets(namespace).Delete(ctx, name, metav1.DeleteOptions{})
		}},
		{"its namespace", func(ctx context.Context, admin kubernetes.Interface) error {
			return admin.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{})
		}},
	} {
		t.Run(tt.what, func(t *testing.T) {
			server := apiservertest.Start(t)
			admin := kubernetes.NewForConfigOrDie(server.Admin())
			account := server.PodAccount(t, namespace, name, "node1")
			binding := grant(t, admin)
			if _, err := admin.AppsV1().DaemonSets(namespace).Create(t.Context(), daemonSet(), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			watches := make(chan string, 100)
			account.Wrap(func(next http.RoundTripper) http.RoundTripper { return watchCounter{next, watches} })
			r := removalFor(account)
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); r.Run(ctx) }()
			defer func() { stop(); <-ended }()
			patience, end := context.WithTimeout(t.Context(), time.Minute)
			defer end()
			for seen := map[string]bool{}; len(seen) < 2; {
				select {
				case path := <-watches:
					seen[path] = true
				case <-patience.Done():
					t.Fatalf("watches of %v only", seen)
				}
			}
			if removed, err := r.Removed(t.Context()); removed || err != nil {
				t.Fatalf("before: %v, %v", removed, err)
			}
			if err := admin.RbacV1().ClusterRoleBindings().Delete(t.Context(), binding, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(time.Minute)
			for {
				removed, err := r.Removed(t.Context())
				if removed || time.Now().After(deadline) {
					t.Fatalf("without rights: %v, %v, want an error", removed, err)
				}
				if err != nil {
					break
				}
			}
			if err := tt.remove(t.Context(), admin); err != nil {
				t.Fatal(err)
			}
			for {
				removed, err := r.Removed(t.Context())
				if removed {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("after the removal: %v, %v", removed, err)
				}
			}
		})
	}
}

// watchCounter tells of every watch that the API server took.
type watchCounter struct {
	next    http.RoundTripper
	watches chan<- string
}

func (w watchCounter) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := w.next.RoundTrip(r)
	if err == nil && resp.StatusCode == http.StatusOK && r.URL.Query().Get("watch") != "" {
		w.watches <- r.URL.Path
	}
	return resp, err
}

func removalFor(cfg *rest.Config) *Removal {
	return New(Config{Client: kubernetes.NewForConfigOrDie(cfg), Namespace: namespace, Name: name, Log: slog.New(slog.DiscardHandler)})
}

// grant gives the account what the manifests give it and returns the binding's name.
func grant(t *testing.T, admin kubernetes.Interface) string {
	t.Helper()
	verbs := []string{"get", "list", "watch"}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"}, ResourceNames: []string{name}, Verbs: verbs},
		{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: verbs},
	}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: name}},
	}
	if _, err := admin.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return binding.Name
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
