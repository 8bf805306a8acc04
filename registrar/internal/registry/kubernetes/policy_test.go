package kubernetes

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// who is a user of the API server with the backend's client.
type who struct {
	name string
	*client
}

func (c *cluster) as(t *testing.T, name string, config *rest.Config) who {
	t.Helper()
	made, err := newClient(config)
	must(t, err)
	t.Cleanup(made.close)
	return who{name: name, client: made}
}

// bind gives a ClusterRole to a user.
func (c *cluster) bind(t *testing.T, role, user string) {
	t.Helper()
	_, err := c.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{})
	must(t, err)
}

// owned returns the object of a pod that the API server gave a UID.
func owned(t *testing.T, node, uid string) *v1alpha1.ServiceEndpoint {
	t.Helper()
	ep := endpoint(node, uid, 1)
	ep.PodUID = "4c0b6ad5-0000-4000-8000-000000000001"
	object, err := objectOf(ep, "")
	must(t, err)
	return object
}

// A registrar writes endpoints of its own node and nobody else's; others delete at
// most, if they clean up or administer; nobody moves one to another node.
func TestPolicy(t *testing.T) {
	c := newCluster(t, "policy.yaml", "rbac/endpoints.yaml")
	registrar1 := c.as(t, "registrar of n1", c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1"))
	registrar2 := c.as(t, "registrar of n2", c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n2"))
	pod := c.as(t, "a pod's own account", c.server.PodAccount(t, "shop", "checkout", "n1"))
	user := func(name string) who {
		return c.as(t, name, c.server.User(rest.ImpersonationConfig{UserName: name, Groups: []string{"system:authenticated"}}))
	}
	const collectorName, emptierName = "system:serviceaccount:kube-system:generic-garbage-collector", "system:serviceaccount:kube-system:namespace-controller"
	collector, emptier := user(collectorName), user(emptierName)
	writer, operator := user("writer"), user("operator")
	admin := c.as(t, "administrator", c.server.Admin())
	// A writer who may write by RBAC; an operator who may administer as well.
	c.bind(t, "portolan-registrar-endpoints", "writer")
	c.bind(t, "portolan-registrar-endpoints", "operator")
	c.bind(t, "portolan-registrar-endpoints", collectorName) // no controller runs here whose roles it would have
	c.bind(t, "portolan-registrar-endpoints", emptierName)
	_, err := c.admin.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "administers"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{v1alpha1.Group}, Resources: []string{v1alpha1.Resource}, Verbs: []string{"administer"}}},
	}, metav1.CreateOptions{})
	must(t, err)
	c.bind(t, "administers", "operator")

	object := func(uid string) *v1alpha1.ServiceEndpoint { return owned(t, "n1", uid) }
	// The API server takes a moment to learn of a policy, and of rights.
	await(t, "the policy works", func() bool {
		_, err := registrar2.apply(t.Context(), object("probe"))
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "only the registrar of that node may write it, not one of node n2")
	})
	await(t, "the rights work", func() bool {
		_, err := operator.list(t.Context(), metav1.ListOptions{})
		_, err2 := registrar1.list(t.Context(), metav1.ListOptions{})
		return err == nil && err2 == nil
	})

	forbidden := func(who who, what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s could %s: %v", who.name, what, err)
		}
	}
	allowed := func(who who, what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s could not %s: %v", who.name, what, err)
		}
	}
	everybodyElse := []who{registrar2, pod, collector, emptier, writer, operator, admin}
	for _, w := range everybodyElse {
		_, err := w.apply(t.Context(), object("a"))
		forbidden(w, "create an endpoint of n1", err)
	}
	made, err := registrar1.apply(t.Context(), object("a"))
	allowed(registrar1, "create an endpoint of n1", err)

	changed := object("a")
	changed.Spec.Weight = 9
	for _, w := range everybodyElse {
		_, err := w.apply(t.Context(), changed)
		forbidden(w, "change an endpoint of n1", err)
	}
	_, err = registrar1.apply(t.Context(), changed)
	allowed(registrar1, "change an endpoint of n1", err)

	// Metadata alone: who cleans up takes owners out.
	labelled := changed.DeepCopy()
	for i, w := range []who{collector, emptier, operator, admin} {
		labelled.Labels = map[string]string{"round": fmt.Sprint(i)}
		_, err := w.apply(t.Context(), labelled)
		allowed(w, "change metadata", err)
	}
	for _, w := range []who{registrar2, pod, writer} {
		labelled.Labels = map[string]string{"round": "x"}
		_, err := w.apply(t.Context(), labelled)
		forbidden(w, "change metadata", err)
	}

	moved := object("a")
	moved.Spec.NodeName = "n2"
	for _, w := range []who{registrar1, registrar2} {
		if _, err := w.apply(t.Context(), moved); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s moved an endpoint to another node: %v", w.name, err)
		}
	}

	for _, w := range []who{registrar2, pod, writer} {
		forbidden(w, "delete an endpoint of n1", w.delete(t.Context(), key("a"), made.UID))
	}
	for _, w := range []who{registrar1, collector, emptier, operator, admin} {
		next, err := registrar1.apply(t.Context(), object("a"))
		allowed(registrar1, "create an endpoint of n1", err)
		allowed(w, "delete an endpoint of n1", w.delete(t.Context(), key("a"), next.UID))
	}

	// A token without a node, of the same account, is no registrar's.
	token, err := c.admin.CoreV1().ServiceAccounts("portolan-system").CreateToken(t.Context(), "portolan-registrar", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(t, err)
	config := rest.CopyConfig(c.server.Admin())
	config.BearerToken = token.Status.Token
	unbound := c.as(t, "an unbound token", config)
	_, err = unbound.apply(t.Context(), object("a"))
	forbidden(unbound, "create an endpoint", err)
	if err == nil || !strings.Contains(err.Error(), "has no token that is bound to a pod of a node") {
		t.Errorf("the reason is %v", err)
	}
}

// What a registrar writes belongs to the pod that it is of and to nothing else, and
// nothing holds it: so the garbage collector removes what is written of no pod.
func TestPolicyOwner(t *testing.T) {
	c := newCluster(t, "policy.yaml", "rbac/endpoints.yaml")
	registrar := c.as(t, "registrar of n1", c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1"))
	const refusal = "it must have the pod of its spec as its one owner"
	refused := func(err error) bool { return apierrors.IsForbidden(err) && strings.Contains(err.Error(), refusal) }
	free := func(o *v1alpha1.ServiceEndpoint) { o.OwnerReferences = nil }
	await(t, "the policy and the rights work", func() bool {
		probe := owned(t, "n1", "probe")
		free(probe)
		_, err := registrar.apply(t.Context(), probe)
		return refused(err)
	})

	_, err := registrar.apply(t.Context(), owned(t, "n1", "a"))
	must(t, err)
	first := func(o *v1alpha1.ServiceEndpoint) *metav1.OwnerReference { return &o.OwnerReferences[0] }
	for name, change := range map[string]func(*v1alpha1.ServiceEndpoint){
		"no owner":        free,
		"another's name":  func(o *v1alpha1.ServiceEndpoint) { first(o).Name = "payments-2" },
		"another's UID":   func(o *v1alpha1.ServiceEndpoint) { first(o).UID = "4c0b6ad5-0000-4000-8000-000000000002" },
		"another group":   func(o *v1alpha1.ServiceEndpoint) { first(o).APIVersion = "apps/v1" },
		"another kind":    func(o *v1alpha1.ServiceEndpoint) { first(o).Kind = "ConfigMap" },
		"a second owner":  func(o *v1alpha1.ServiceEndpoint) { o.OwnerReferences = append(o.OwnerReferences, namespaceOwner()) },
		"no pod name":     func(o *v1alpha1.ServiceEndpoint) { o.Spec.PodName = "" },
		"no pod UID":      func(o *v1alpha1.ServiceEndpoint) { o.Spec.PodUID = "" },
		"a finalizer":     func(o *v1alpha1.ServiceEndpoint) { o.Finalizers = []string{"example.com/stay"} },
		"only a new name": func(o *v1alpha1.ServiceEndpoint) { o.Spec.PodName = "payments-2" },
	} {
		for what, uid := range map[string]string{"create": "b", "change": "a"} {
			o := owned(t, "n1", uid)
			change(o)
			if _, err := registrar.apply(t.Context(), o); !refused(err) {
				t.Errorf("%s with %s: %v", what, name, err)
			}
		}
	}

	// A static pod's belongs to its node, and no other pod's does.
	nodes := map[string]types.UID{}
	for _, name := range []string{"n1", "n2"} {
		c.server.PodAccount(t, "portolan-system", "portolan-registrar", name)
		n, err := c.admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		must(t, err)
		nodes[name] = n.UID
	}
	static := func(owner string, uid types.UID) *v1alpha1.ServiceEndpoint {
		o := owned(t, "n1", "c")
		o.Spec.PodUID = "ce9dfd1633d73a68286f7e6287f4b407"
		o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: owner, UID: uid}}
		return o
	}
	_, err = registrar.apply(t.Context(), static("n1", nodes["n1"]))
	must(t, err)
	ordinary := static("n1", nodes["n1"])
	ordinary.Spec.PodUID = owned(t, "n1", "c").Spec.PodUID
	ofPod := static("n1", nodes["n1"])
	ofPod.OwnerReferences[0] = metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: ofPod.Spec.PodName, UID: types.UID(ofPod.Spec.PodUID)}
	for name, o := range map[string]*v1alpha1.ServiceEndpoint{
		"another node": static("n2", nodes["n2"]), "another node's UID": static("n1", nodes["n2"]), "another node's name": static("n2", nodes["n1"]),
		"the node for a pod of the API server": ordinary, "no object": ofPod,
	} {
		if _, err := registrar.apply(t.Context(), o); !refused(err) {
			t.Errorf("owned by %s: %v", name, err)
		}
	}

	// Not refused: the change of an object that waits for its end.
	must(t, c.raw.Resource(v1alpha1.GroupVersion().WithResource(v1alpha1.Resource)).Namespace("shop").
		Delete(t.Context(), key("a").Name, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}))
	changed := owned(t, "n1", "a")
	changed.Spec.Weight = 9
	result, err := registrar.apply(t.Context(), changed)
	must(t, err)
	if len(result.Finalizers) == 0 {
		t.Error("the object waits for nothing")
	}
}

// awaitPolicy waits until the policy refuses what the rights allow the registrar of n1.
func awaitPolicy(t *testing.T, registrar who) {
	t.Helper()
	await(t, "the policy and the rights work", func() bool {
		probe := owned(t, "n1", "probe")
		probe.OwnerReferences = nil
		_, err := registrar.apply(t.Context(), probe)
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "as its one owner")
	})
}

// The record of a pod whose API object is made anew belongs to the new one: the object is
// changed in place, and one that was removed with the former owner does not wait for its
// turn to be put back.
func TestPolicyNewOwner(t *testing.T) {
	c := newCluster(t, "policy.yaml", "rbac/endpoints.yaml")
	config := c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1")
	awaitPolicy(t, c.as(t, "registrar of n1", config))
	n := newNode(t, "n1", config)
	ep := endpoint("n1", "a", 1)
	publish := func(mirror string) {
		t.Helper()
		ep.PodUID, ep.Generation = "4c0b6ad5-0000-4000-8000-00000000000"+mirror, ep.Generation+1
		must(t, n.Publish(t.Context(), ep))
	}
	isOwned := func() bool {
		object, ok := c.list(t)[key("a").Name]
		return ok && len(object.OwnerReferences) == 1 && string(object.OwnerReferences[0].UID) == ep.PodUID && object.Spec.PodUID == ep.PodUID
	}
	publish("1")
	await(t, "the object of the first mirror", isOwned)
	made := c.list(t)[key("a").Name].UID
	publish("2")
	await(t, "the object of the second mirror", isOwned)
	if now := c.list(t)[key("a").Name].UID; now != made {
		t.Error("the object was made anew for its new owner")
	}
	// The garbage collector is faster than the kubelet, as often as it may be.
	const removals = 12 // the next put-back is in minutes
	n.mu.Lock()
	n.own[key("a")].putBacks, n.own[key("a")].last = removals, time.Now()
	n.mu.Unlock()
	must(t, c.objects.delete(t.Context(), key("a"), made))
	await(t, "the registrar knows that the object is gone", func() bool { return n.value(t, "portolan_registry_put_back_total") > 0 })
	publish("3")
	await(t, "the object of the third mirror", isOwned)
}

// The record of a static pod belongs to its node: its mirror can be gone while the pod
// goes on.
func TestPolicyStaticPod(t *testing.T) {
	c := newCluster(t, "policy.yaml", "rbac/endpoints.yaml")
	config := c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1")
	awaitPolicy(t, c.as(t, "registrar of n1", config))
	n := newNode(t, "n1", config)
	ep := endpoint("n1", "a", 1)
	ep.PodUID = "ce9dfd1633d73a68286f7e6287f4b407"
	must(t, n.Publish(t.Context(), ep))
	c.awaitObjects(t, 1)
	node, err := c.admin.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	must(t, err)
	want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n1", UID: node.UID}}
	if d := cmp.Diff(want, c.list(t)[key("a").Name].OwnerReferences); d != "" {
		t.Errorf("owner (-want +got):\n%s", d)
	}
}

// tokens is a transport with a token that the kubelet changes.
type tokens struct {
	http.RoundTripper

	now *atomic.Pointer[string]
}

func (t tokens) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+*t.now.Load())
	return t.RoundTripper.RoundTrip(r)
}

// A node that is registered anew, as by who deletes it and starts its kubelet again, is
// another owner, which the next token names; the registrar runs on.
func TestPolicyStaticPodOfNewNode(t *testing.T) {
	c := newCluster(t, "policy.yaml", "rbac/endpoints.yaml")
	var token atomic.Pointer[string]
	account := func() *rest.Config {
		config := c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1")
		token.Store(&config.BearerToken)
		return config
	}
	config := rest.CopyConfig(account())
	awaitPolicy(t, c.as(t, "registrar of n1", config))
	config.BearerToken = ""
	config.WrapTransport = func(rt http.RoundTripper) http.RoundTripper { return tokens{rt, &token} }
	n := newNode(t, "n1", config)
	ep := endpoint("n1", "a", 1)
	ep.PodUID = "ce9dfd1633d73a68286f7e6287f4b407"
	must(t, n.Publish(t.Context(), ep))
	await(t, "the object is made", func() bool { _, ok := c.list(t)[key("a").Name]; return ok })
	was := c.list(t)[key("a").Name]

	must(t, c.admin.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}))
	account() // makes the node again
	node, err := c.admin.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	must(t, err)
	await(t, "a token names the new node", func() bool {
		uid, err := c.as(t, "", account()).nodeUID(t.Context())
		return err == nil && uid == node.UID
	})
	must(t, c.objects.delete(t.Context(), key("a"), was.UID)) // as the garbage collector does
	await(t, "the record belongs to the new node", func() bool {
		n.retryNow()
		object, ok := c.list(t)[key("a").Name]
		return ok && object.OwnerReferences[0].UID == node.UID
	})
}

// namespaceOwner is something that stays.
func namespaceOwner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: "shop", UID: "4c0b6ad5-0000-4000-8000-000000000003"}
}

// The schema refuses what no registrar writes, whoever sends it.
func TestSchema(t *testing.T) {
	c := newCluster(t)
	for want, change := range map[string]func(*v1alpha1.ServiceEndpointSpec){
		"spec.ip":                 func(s *v1alpha1.ServiceEndpointSpec) { s.IP = "fe80::1%eth0" },
		"spec.addresses[1]":       func(s *v1alpha1.ServiceEndpointSpec) { s.Addresses[1] = "payments" },
		"spec.ports":              func(s *v1alpha1.ServiceEndpointSpec) { s.Ports = "08080" },
		"port is not among ports": func(s *v1alpha1.ServiceEndpointSpec) { s.Port = 80 },
		"port is missing":         func(s *v1alpha1.ServiceEndpointSpec) { s.Port = 0 },
		"spec.health":             func(s *v1alpha1.ServiceEndpointSpec) { s.Health = "Ill" },
		"spec.portHealth":         func(s *v1alpha1.ServiceEndpointSpec) { s.PortHealth["9090"] = "Ill" },
		"spec.weight":             func(s *v1alpha1.ServiceEndpointSpec) { s.Weight = 65536 },
		"spec.service":            func(s *v1alpha1.ServiceEndpointSpec) { s.Service = "Pay" },
		"spec.generation":         func(s *v1alpha1.ServiceEndpointSpec) { s.Generation = 0 },
		"spec.nodeName":           func(s *v1alpha1.ServiceEndpointSpec) { s.NodeName = "" },
		"spec.trustDomain":        func(s *v1alpha1.ServiceEndpointSpec) { s.TrustDomain = "a/b" },
		"at most 63 bytes":        func(s *v1alpha1.ServiceEndpointSpec) { s.Metadata[strings.Repeat("k", 64)] = "v" },
	} {
		object, err := objectOf(endpoint("n1", "a", 1), "")
		must(t, err)
		change(&object.Spec)
		if _, err := c.objects.apply(t.Context(), object); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	object, err := objectOf(endpoint("n1", "a", 1), "")
	must(t, err)
	_, err = c.objects.apply(t.Context(), object)
	must(t, err)
	for want, change := range map[string]func(*v1alpha1.ServiceEndpointSpec){
		"does not move to another node": func(s *v1alpha1.ServiceEndpointSpec) { s.NodeName = "n2" },
		"the uid of a record":           func(s *v1alpha1.ServiceEndpointSpec) { s.UID = "other" },
	} {
		other := object.DeepCopy()
		change(&other.Spec)
		if _, err := c.objects.apply(t.Context(), other); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
