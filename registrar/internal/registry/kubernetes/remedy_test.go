package kubernetes

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// Whoever refuses a registrar, Health has what that one says and the remedy for it, and
// no other's: rights are not what an admission policy asks for, nor what a token lacks.
func TestRemedy(t *testing.T) {
	c := newCluster(t, "policy.yaml")
	const rights, policy, token = "bind the registrar's ServiceAccount to its ClusterRole",
		"run the registrar as a pod of the node that --node-name names, and install it and the policy from one version",
		"the token is not taken"
	told := func(n *node, refusal, remedy string) {
		t.Helper()
		ep := endpoint(n.name, refusal[:2], 1) // each another
		ep.PodUID = "4c0b6ad5-0000-4000-8000-000000000001"
		must(t, n.Publish(t.Context(), ep))
		var text string
		await(t, "Health says "+refusal, func() bool {
			n.retryNow()
			if err := n.Health(); err != nil {
				text = err.Error()
			}
			return strings.Contains(text, refusal)
		})
		for _, one := range []string{rights, policy, token} {
			if strings.Contains(text, one) != (one == remedy) {
				t.Errorf("%s: Health says %q", refusal, text)
			}
		}
	}
	account := func(node string) *rest.Config {
		return c.server.PodAccount(t, "portolan-system", "portolan-registrar", node)
	}
	told(newNode(t, "n1", account("n1")), `resource "serviceendpoints" in API group`, rights)
	c.install(t, "rbac/endpoints.yaml")
	told(newNode(t, "n1", account("n2")), "only the registrar of that node may write it, not one of node n2", policy)

	unknown := rest.CopyConfig(account("n1"))
	unknown.BearerToken = "unknown"
	told(newNode(t, "n1", unknown), "Unauthorized", token)

	deny := admissionv1.Deny
	scope := admissionv1.AllScopes
	_, err := c.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Create(t.Context(), &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "freeze"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"serviceendpoints"}, Scope: &scope},
			}}}},
			Validations: []admissionv1.Validation{{Expression: "false", Message: "frozen until Monday", Reason: new(metav1.StatusReasonForbidden)}},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.admin.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "freeze"},
		Spec:       admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "freeze", ValidationActions: []admissionv1.ValidationAction{deny}},
	}, metav1.CreateOptions{})
	must(t, err)
	probe := c.as(t, "registrar of n1", account("n1"))
	await(t, "the other policy works", func() bool {
		object := owned(t, "n1", "probe")
		_, err := probe.apply(t.Context(), object)
		if err == nil {
			must(t, c.objects.delete(t.Context(), key("probe"), c.list(t)[key("probe").Name].UID))
		}
		return err != nil && strings.Contains(err.Error(), "frozen until Monday")
	})
	told(newNode(t, "n1", account("n1")), "frozen until Monday", "")
}
