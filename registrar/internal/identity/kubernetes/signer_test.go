package kubernetes_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientgo "k8s.io/client-go/kubernetes"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/identity/kubernetes"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/scripts/apiservertest"
)

const (
	domain    = "aether.internal"
	namespace = "portolan-system"
	account   = "portolan-registrar"
	user      = "system:serviceaccount:" + namespace + ":" + account
	patient   = 60 * time.Second
)

// rig is an API server with registrars that may ask.
type rig struct {
	t      *testing.T
	server *apiservertest.Server
	admin  clientgo.Interface
}

func newRig(t *testing.T) *rig {
	t.Helper()
	server := apiservertest.Start(t)
	r := &rig{t: t, server: server, admin: clientgo.NewForConfigOrDie(server.Admin())}
	server.PodAccount(t, namespace, account, "node1") // makes the namespace
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: account}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"certificates.k8s.io"}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create", "list", "watch", "delete"}},
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{"portolan-roots"}, Verbs: []string{"get"}},
	}}
	r.must(r.admin.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}))
	r.must(r.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: account},
		Subjects: []rbacv1.Subject{
			{Kind: "ServiceAccount", Namespace: namespace, Name: account}, {Kind: "ServiceAccount", Namespace: namespace, Name: "intruder"},
		},
	}, metav1.CreateOptions{}))
	r.must(r.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}))
	return r
}

func (r *rig) must(_ any, err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// pod binds a pod of an account of namespace shop to a node.
func (r *rig) pod(account, node string) {
	r.t.Helper()
	r.podOf("shop", account, node, nil)
}

// podOf binds a pod of an account to a node; edit may change it before.
func (r *rig) podOf(namespace, account, node string, edit func(*corev1.PodSpec)) {
	r.t.Helper()
	r.must(r.admin.CoreV1().ServiceAccounts(namespace).Create(r.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}))
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: account + "-" + node},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}
	if edit != nil {
		edit(&p.Spec)
	}
	r.must(r.admin.CoreV1().Pods(namespace).Create(r.t.Context(), p, metav1.CreateOptions{}))
}

// newSigner returns a Signer of a trust domain.
func (r *rig) newSigner(name, domain string) *kubernetes.Signer {
	r.t.Helper()
	s, err := kubernetes.NewSigner(kubernetes.SignerConfig{
		Client: r.admin, Namespace: namespace, Name: name, Requesters: user, TrustDomain: domain, Bypass: []string{"kube-system"},
		Lifetime: time.Hour, Clock: time.Now, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// signer runs a Signer until stop or the end of the test.
func (r *rig) signer(name string) (stop func()) {
	r.t.Helper()
	s := r.newSigner(name, domain)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("signer %s: %v", name, err)
		}
	})
	r.t.Cleanup(stop)
	return stop
}

// requester is that of a registrar on a node.
func (r *rig) requester(account, node string) *kubernetes.Requester {
	r.t.Helper()
	return r.requesterOf(domain, account, node)
}

// requesterOf is a requester of a trust domain.
func (r *rig) requesterOf(domain, account, node string) *kubernetes.Requester {
	r.t.Helper()
	q, err := kubernetes.NewRequester(kubernetes.RequesterConfig{
		Client: clientgo.NewForConfigOrDie(r.server.PodAccount(r.t, namespace, account, node)), Namespace: namespace, TrustDomain: domain,
		Saved: identity.NewBundleFile(r.t.TempDir()), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return q
}

func request(t *testing.T, node string, id model.Identity) identity.SignRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	uri, err := url.Parse(id.SPIFFE())
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{uri}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return identity.SignRequest{Node: node, Identity: id, CSR: der}
}

func till(account string) model.Identity { return of("shop", account) }

func of(namespace, account string) model.Identity {
	return model.Identity{TrustDomain: domain, Namespace: namespace, Account: account}
}

// roots fetches the roots as soon as there are some.
func (r *rig) roots(ctx context.Context, q *kubernetes.Requester) identity.Bundle {
	r.t.Helper()
	for {
		b, err := q.Bundle(ctx)
		if err == nil {
			return b
		}
		tick := time.NewTimer(20 * time.Millisecond)
		select {
		case <-ctx.Done():
			r.t.Fatalf("no roots: %v", err)
		case <-tick.C:
		}
	}
}

func verify(t *testing.T, chain [][]byte, b identity.Bundle, id model.Identity) {
	t.Helper()
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	for _, root := range b.Roots {
		pool.AddCert(root)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Errorf("certificate of %s: %v", id.SPIFFE(), err)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != id.SPIFFE() {
		t.Errorf("certificate names %v, want %s", leaf.URIs, id.SPIFFE())
	}
}

// A node gets certificates for the accounts that run on it, and only those; nobody
// but a registrar gets any; answered requests are removed.
func TestSign(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	r.pod("till", "node1")
	r.pod("stock", "node2")
	r.podOf("kube-system", "dns", "node1", nil)
	r.podOf("shop", "agent", "node1", func(s *corev1.PodSpec) { s.HostNetwork = true })
	r.signer("a")
	node1, intruder := r.requester(account, "node1"), r.requester("intruder", "node1")
	bundle := r.roots(ctx, node1)
	chain, err := node1.Sign(ctx, request(t, "node1", till("till")))
	if err != nil {
		t.Fatal(err)
	}
	verify(t, chain, bundle, till("till"))

	foreign := till("till")
	foreign.TrustDomain = "elsewhere.example"
	denied := []struct {
		name string
		by   *kubernetes.Requester
		id   model.Identity
		want string
	}{
		{"an account of another node", node1, till("stock"), "no pod of account shop/stock with a network of its own runs on node node1"},
		{"an account that runs nowhere", node1, till("nobody"), "no pod of account shop/nobody with a network of its own runs on node node1"},
		{"an account on the node's network", node1, till("agent"), "no pod of account shop/agent with a network of its own runs on node node1"},
		{"an account of a bypassed namespace", node1, of("kube-system", "dns"), "pods of namespace kube-system never join the mesh (setting bypassNamespaces, "},
		{"another trust domain", node1, foreign, "is no workload of trust domain"},
		{"not a registrar", intruder, till("till"), "may not ask"},
	}
	for _, d := range denied {
		// The node that the request itself claims does not count.
		if _, err := d.by.Sign(ctx, request(t, "node2", d.id)); !errors.Is(err, identity.ErrRefused) || !strings.Contains(err.Error(), d.want) {
			t.Errorf("%s: %v, want a refusal with %q", d.name, err, d.want)
		}
	}
	left, err := r.admin.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
	if err != nil || len(left.Items) != 0 {
		t.Errorf("%d requests left, %v", len(left.Items), err)
	}
}

// A static pod is signed for as well: its mirror names no account, so it is of the default
// one of its namespace.
func TestSignStaticPod(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	r.must(r.admin.CoreV1().Pods("shop").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "fixed-node1", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "0123456789abcdef"}},
		Spec:       corev1.PodSpec{NodeName: "node1", Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{}))
	r.signer("a")
	node1, node2 := r.requester(account, "node1"), r.requester(account, "node2")
	bundle := r.roots(ctx, node1)
	chain, err := node1.Sign(ctx, request(t, "node1", till("default")))
	if err != nil {
		t.Fatal(err)
	}
	verify(t, chain, bundle, till("default"))
	if _, err := node2.Sign(ctx, request(t, "node2", till("default"))); !errors.Is(err, identity.ErrRefused) {
		t.Errorf("on another node: %v", err)
	}
}

// Signers that start at once make one root; when the one that signs ends another
// goes on with it.
func TestManySigners(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	r.pod("till", "node1")
	stops := map[string]func(){}
	for _, name := range []string{"a", "b", "c"} {
		stops[name] = r.signer(name)
	}
	node1 := r.requester(account, "node1")
	first := r.roots(ctx, node1)
	stops[r.holder(ctx)]()
	chain, err := node1.Sign(ctx, request(t, "node1", till("till")))
	if err != nil {
		t.Fatal(err)
	}
	again := r.roots(ctx, node1)
	if !again.Equal(first) || len(again.Roots) != 1 {
		t.Errorf("roots changed with the signer: %d, then %d", len(first.Roots), len(again.Roots))
	}
	verify(t, chain, first, till("till"))
}

// holder waits until somebody holds the Lease.
func (r *rig) holder(ctx context.Context) string {
	r.t.Helper()
	w, err := r.admin.CoordinationV1().Leases(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		l, ok := e.Object.(*coordinationv1.Lease)
		if ok && e.Type != watch.Deleted && l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" {
			return *l.Spec.HolderIdentity
		}
	}
	r.t.Fatal("nobody holds the Lease")
	return ""
}

// With the API server away a node has the roots that it saw last, and no
// certificate.
func TestAway(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	stop := r.signer("a")
	node1 := r.requester(account, "node1")
	before := r.roots(ctx, node1)
	stop()
	r.server.Pause(t) // nobody answers: the saved roots come long before the caller's patience ends
	if b, err := node1.Bundle(ctx); err != nil || !b.Equal(before) || ctx.Err() != nil {
		t.Errorf("roots with an API server that hangs: %v, %v", err, ctx.Err())
	}
	r.server.Stop(t)
	if b, err := node1.Bundle(ctx); err != nil || !b.Equal(before) {
		t.Errorf("roots with the API server away: %v", err)
	}
	if _, err := node1.Sign(ctx, request(t, "node1", till("till"))); err == nil || errors.Is(err, identity.ErrRefused) {
		t.Errorf("certificate with the API server away: %v, want an error that is no refusal", err)
	}
}

// A hand that spoils the ConfigMap of the roots takes them from no node that has seen
// them, whether it starts anew or not; the next signer puts them right.
func TestRootsEdited(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	stop := r.signer("a")
	node1, fresh := r.requester(account, "node1"), r.requester(account, "node2")
	before := r.roots(ctx, node1)
	stop()
	maps := r.admin.CoreV1().ConfigMaps(namespace)
	for name, data := range map[string]map[string]string{
		"emptied": {}, "no PEM": {"roots.pem": "none"}, "another key": {"ca.pem": "x"},
		"damaged": {"roots.pem": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
	} {
		m, err := maps.Get(ctx, "portolan-roots", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m.Data = data
		r.must(maps.Update(ctx, m, metav1.UpdateOptions{}))
		if b, err := node1.Bundle(ctx); err != nil || !b.Equal(before) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := fresh.Bundle(ctx); err == nil || !strings.Contains(err.Error(), "ConfigMap "+namespace+"/portolan-roots, which `registrar signer` writes: ") {
			t.Errorf("%s, on a node that has seen none: %v", name, err)
		}
	}
	r.signer("b")
	if b := r.roots(ctx, fresh); !b.Equal(before) {
		t.Error("the next signer spreads other roots")
	}
}

// Who deletes the Secret of the roots, or spoils it, does not take the roots from the mesh:
// the signer that has them puts them back before the next one makes others.
func TestSecretTakenAway(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	stop := r.signer("a")
	node1 := r.requester(account, "node1")
	before := r.roots(ctx, node1)
	stop()
	secrets := r.admin.CoreV1().Secrets(namespace)
	good, err := secrets.Get(ctx, "portolan-ca", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, hand := range map[string]func(){
		"deleted": func() { r.must(nil, secrets.Delete(ctx, good.Name, metav1.DeleteOptions{})) },
		"emptied": func() {
			r.must(secrets.Patch(ctx, good.Name, types.MergePatchType, []byte(`{"data":{"ca.pem":null}}`), metav1.PatchOptions{}))
		},
		"garbage": func() {
			r.must(secrets.Patch(ctx, good.Name, types.MergePatchType, []byte(`{"stringData":{"ca.pem":"none"}}`), metav1.PatchOptions{}))
		},
		"labelled": func() {
			r.must(secrets.Patch(ctx, good.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"team":"a"}}}`), metav1.PatchOptions{}))
		},
	} {
		ca, err := kubernetes.OpenCA(ctx, r.admin, namespace, domain)
		if err != nil {
			t.Fatal(err)
		}
		hand()
		if b, err := ca.Bundle(ctx); err != nil || !b.Equal(before) {
			t.Errorf("%s: roots of the signer: %v", name, err)
		}
		now, err := secrets.Get(ctx, good.Name, metav1.GetOptions{})
		if err != nil || !bytes.Equal(now.Data["ca.pem"], good.Data["ca.pem"]) {
			t.Errorf("%s: the Secret has not what it had: %v", name, err)
		}
	}
}

// A mesh whose trust domain is changed in place says what holds the former root and what
// to do, in the signer and on every node; once that is done there are roots again.
func TestTrustDomainChanges(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	stop := r.signer("a")
	r.roots(ctx, r.requester(account, "node1"))
	stop()

	const changed = "two.corp"
	where := "Secret " + namespace + "/portolan-ca"
	if err := r.newSigner("b", changed).Run(ctx); err == nil || !strings.Contains(err.Error(), where+" holds the root of spiffe://"+domain) {
		t.Errorf("the signer says %v", err)
	}
	node1 := r.requesterOf(changed, account, "node1")
	if _, err := node1.Bundle(ctx); err == nil || !strings.Contains(err.Error(), "set the trust domain back, or delete "+where) {
		t.Errorf("a node says %v", err)
	}
	if err := r.admin.CoreV1().Secrets(namespace).Delete(ctx, "portolan-ca", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	running, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.newSigner("c", changed).Run(running) }()
	if b := r.roots(ctx, node1); b.TrustDomain != changed {
		t.Errorf("roots of %s", b.TrustDomain)
	}
	end()
	if err := <-done; err != nil {
		t.Errorf("the signer ended with %v", err)
	}
}
