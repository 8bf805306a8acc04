package apiservertest_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

// nodeKey is the extra in which the API server notes the node of a bound token.
const nodeKey = "authentication.kubernetes.io/node-name"

// patience matters only when something is broken.
const patience = 30 * time.Second

func clientFor(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "mesh"}}
}

func whoAmI(t *testing.T, config *rest.Config) authenticationv1.UserInfo {
	t.Helper()
	review, err := clientFor(t, config).AuthenticationV1().SelfSubjectReviews().
		Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return review.Status.UserInfo
}

// grant lets an account of the namespace create and get ConfigMaps there, and
// returns when the API server knows.
func grant(t *testing.T, admin kubernetes.Interface, account string) {
	t.Helper()
	_, err := admin.RbacV1().Roles("mesh").Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create", "get"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.RbacV1().RoleBindings("mesh").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: account},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: "mesh"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:mesh:" + account,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "mesh", Verb: "create", Resource: "configmaps"},
	}}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		got, err := admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the role is not in force: %v", err)
		}
		if got.Status.Allowed {
			return
		}
	}
}

func TestUsers(t *testing.T) {
	server := apiservertest.Start(t)

	if got := whoAmI(t, server.Admin()); !slices.Contains(got.Groups, "system:masters") {
		t.Errorf("the administrator is %v", got)
	}
	got := whoAmI(t, server.User(rest.ImpersonationConfig{
		UserName: "ann", Groups: []string{"crew"}, Extra: map[string][]string{"ship": {"argo"}},
	}))
	if got.Username != "ann" || !slices.Contains(got.Groups, "crew") || got.Extra["ship"][0] != "argo" {
		t.Errorf("ann is %v", got)
	}
	pod := server.PodAccount(t, "mesh", "registrar", "node1")
	got = whoAmI(t, pod)
	if got.Username != "system:serviceaccount:mesh:registrar" || !slices.Equal(got.Extra[nodeKey], []string{"node1"}) {
		t.Errorf("the account of a pod on node1 is %v", got)
	}

	// RBAC: the account may nothing until somebody says so.
	create := func(name string) error {
		_, err := clientFor(t, pod).CoreV1().ConfigMaps("mesh").Create(t.Context(), configMap(name), metav1.CreateOptions{})
		return err
	}
	if err := create("early"); !apierrors.IsForbidden(err) {
		t.Errorf("an account without rights wrote: %v", err)
	}
	grant(t, clientFor(t, server.Admin()), "registrar")
	if err := create("late"); err != nil {
		t.Errorf("an account with the right could not write: %v", err)
	}
}

// A policy on the node claim, of the kind that guards endpoints.
func TestAdmissionPolicy(t *testing.T) {
	server := apiservertest.Start(t)
	admin := clientFor(t, server.Admin())
	node1, node2 := server.PodAccount(t, "mesh", "registrar", "node1"), server.PodAccount(t, "mesh", "registrar", "node2")
	grant(t, admin, "registrar")
	makePolicy(t, admin)

	// The server takes a moment to learn of a policy: wait until it refuses node2.
	create := func(config *rest.Config, name string) error {
		_, err := clientFor(t, config).CoreV1().ConfigMaps("mesh").Create(t.Context(), configMap(name), metav1.CreateOptions{})
		return err
	}
	deadline := time.Now().Add(patience)
	for i := 0; ; i++ {
		err := create(node2, fmt.Sprintf("node1-%d", i))
		if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("node2 may write what is node1's: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := create(node1, "node1-own"); err != nil {
		t.Errorf("node1 may not write what is its own: %v", err)
	}
}

func makePolicy(t *testing.T, admin kubernetes.Interface) {
	t.Helper()
	policies := admin.AdmissionregistrationV1()
	_, err := policies.ValidatingAdmissionPolicies().Create(t.Context(), &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "own-node"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
				RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{admissionv1.Create},
					Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
				},
			}}},
			Validations: []admissionv1.Validation{{
				Expression: `object.metadata.name.startsWith(request.userInfo.extra["` + nodeKey + `"][0] + "-")`,
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = policies.ValidatingAdmissionPolicyBindings().Create(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "own-node"},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: "own-node", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAway(t *testing.T) {
	server := apiservertest.Start(t)
	maps := clientFor(t, server.PodAccount(t, "mesh", "registrar", "node1")).CoreV1().ConfigMaps("mesh")
	grant(t, clientFor(t, server.Admin()), "registrar")
	if _, err := maps.Create(t.Context(), configMap("kept"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	server.Pause(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := maps.Get(ctx, "kept", metav1.GetOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a paused server said: %v", err)
	}
	server.Resume(t)
	if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err != nil {
		t.Errorf("a server that goes on said: %v", err)
	}

	server.Stop(t)
	if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err == nil || apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
		t.Errorf("a stopped server said: %v", err)
	}
	server.Restart(t)
	if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err != nil {
		t.Errorf("a server that is back said: %v", err)
	}
}

// childEnv says that the test binary is the child of TestEndsWithTheTest.
const childEnv = "APISERVERTEST_CHILD"

// A test binary that is killed runs no clean-up.
func TestEndsWithTheTest(t *testing.T) {
	if os.Getenv(childEnv) != "" {
		server := apiservertest.Start(t)
		t.Log("serves " + server.Admin().Host)
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestEndsWithTheTest$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"=1", "TMPDIR="+t.TempDir()) // which it leaves
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var host string
	for lines := bufio.NewScanner(out); host == "" && lines.Scan(); {
		_, host, _ = strings.Cut(lines.Text(), "serves https://")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	addr, err := netip.ParseAddrPort(host)
	if err != nil {
		t.Fatalf("the child started no server: %v", err)
	}
	for _, port := range []uint16{addr.Port(), 2379} {
		deadline := time.Now().Add(patience)
		for at := netip.AddrPortFrom(addr.Addr(), port).String(); dials(at); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s still serves after its test was killed", at)
			}
		}
	}
}

func dials(addr string) bool {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		_ = conn.Close()
	}
	return err == nil
}
