package lab_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/portolan-mesh/portolan/api/annotation"
)

// The example of README.md has no field that Kubernetes does not know, joins the mesh,
// serves what it advertises, and each of its accounts is there.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	accounts, pods := map[string]bool{}, 0
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
			t.Fatal(err)
		}
		var deployment appsv1.Deployment
		var account corev1.ServiceAccount
		var pod corev1.Pod
		into := map[string]any{"Deployment": &deployment, "ServiceAccount": &account, "Pod": &pod}[kind.Kind]
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Fatalf("%s: %v", kind.Kind, err)
		}
		switch kind.Kind {
		case "ServiceAccount":
			accounts[account.Name] = true
			continue
		case "Deployment":
			pod.ObjectMeta, pod.Spec = deployment.Spec.Template.ObjectMeta, deployment.Spec.Template.Spec
		}
		pods++
		cfg, err := annotation.Parse(pod.Annotations)
		if err != nil || !cfg.Meshed {
			t.Errorf("%s: in the mesh %v, %v", kind.Kind, cfg.Meshed, err)
		}
		for _, p := range cfg.Ports {
			if command := strings.Join(pod.Spec.Containers[0].Command, " "); !strings.Contains(command, p.Protocol.String()+":"+fmt.Sprint(p.Number)) {
				t.Errorf("%s advertises %v %d and serves %s", kind.Kind, p.Protocol, p.Number, command)
			}
		}
		if !accounts[pod.Spec.ServiceAccountName] {
			t.Errorf("%s: no account %q before it", kind.Kind, pod.Spec.ServiceAccountName)
		}
	}
	if pods != 2 {
		t.Errorf("%d workloads, want 2", pods)
	}
}
