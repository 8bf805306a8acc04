package apiservertest

import (
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
)

// Admin is the configuration of a client in system:masters, without a limit of
// requests on the client's side.
func (s *Server) Admin() *rest.Config { return s.as(s.token) }

// as is the configuration of a client with a bearer token.
func (s *Server) as(token string) *rest.Config {
	return &rest.Config{
		Host:            "https://" + s.at("api"),
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{CAData: s.caPEM},
		QPS:             -1,
	}
}

// User is the configuration of a client that the API server takes for a user of
// any name, groups and extra: the administrator impersonates it.
func (s *Server) User(user rest.ImpersonationConfig) *rest.Config {
	config := s.Admin()
	config.Impersonate = user
	return config
}

// PodAccount is the configuration of a client that runs in a pod of a node under a
// ServiceAccount: a token bound to the pod, by which the API server knows the
// node's name (authentication.kubernetes.io/node-name). The namespace, the
// account, the node and the pod are made when they are missing; the pod's name is
// ACCOUNT-NODE. The account has no rights but those that the test binds to it.
func (s *Server) PodAccount(tb testing.TB, namespace, account, node string) *rest.Config {
	tb.Helper()
	client, err := kubernetes.NewForConfig(s.Admin())
	if err != nil {
		tb.Fatal(err)
	}
	pod := s.makePod(tb, client.CoreV1(), namespace, account, node)
	token, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(tb.Context(), account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return s.as(token.Status.Token)
}

// makePod makes a pod of an account on a node, and what it needs, unless it is
// there.
func (s *Server) makePod(tb testing.TB, client typedcorev1.CoreV1Interface, namespace, account, node string) *corev1.Pod {
	tb.Helper()
	ctx, options := tb.Context(), metav1.CreateOptions{}
	named := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }
	_, errNamespace := client.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: named(namespace)}, options)
	_, errNode := client.Nodes().Create(ctx, &corev1.Node{ObjectMeta: named(node)}, options)
	_, errAccount := client.ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: named(account)}, options)
	_, errPod := client.Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: named(account + "-" + node),
		Spec: corev1.PodSpec{
			ServiceAccountName: account, AutomountServiceAccountToken: new(bool), NodeName: node,
			Containers: []corev1.Container{{Name: "main", Image: "none"}},
		},
	}, options)
	for _, err := range []error{errNamespace, errNode, errAccount, errPod} {
		if err != nil && !apierrors.IsAlreadyExists(err) {
			tb.Fatal(err)
		}
	}
	pod, err := client.Pods(namespace).Get(ctx, account+"-"+node, metav1.GetOptions{})
	if err != nil {
		tb.Fatal(err)
	}
	return pod
}
