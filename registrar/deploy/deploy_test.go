package deploy_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedv1 "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/scripts/apiservertest"
	"github.com/portolan-mesh/portolan/scripts/programtest"
)

const namespace = "portolan-system"

// A real API server takes the manifests as they are, and with each component, by the
// one command that README names; a component changes what it says it does.
func TestApply(t *testing.T) {
	hyperkube := programtest.Binary(t, "HYPERKUBE", "hyperkube")
	for _, tt := range []struct {
		component string // none: the folder itself
		args      []string
		mounts    []string
		signer    bool
	}{
		{"", nil, nil, true},
		{"birth-taint", []string{"--birth-taint"}, nil, true},
		{"spire", []string{"--identity=spire", "--spire-admin-socket=/run/spire/admin/admin.sock"}, []string{"/run/spire/admin"}, false},
	} {
		t.Run("component "+tt.component, func(t *testing.T) {
			server := apiservertest.Start(t)
			folder := "."
			if tt.component != "" {
				folder = overlay(t, tt.component)
			}
			apply(t, server, hyperkube, folder)
			admin, err := kubernetes.NewForConfig(server.Admin())
			if err != nil {
				t.Fatal(err)
			}
			ds, err := admin.AppsV1().DaemonSets(namespace).Get(t.Context(), "portolan-registrar", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			wantRegistrar(t, ds, tt.args, tt.mounts)
			if tt.signer {
				wantRollableSigner(t, admin, ds)
			}
			switch _, err := admin.AppsV1().Deployments(namespace).Get(t.Context(), "portolan-signer", metav1.GetOptions{}); {
			case err != nil && !apierrors.IsNotFound(err):
				t.Fatal(err)
			case (err == nil) != tt.signer:
				t.Errorf("portolan-signer is there: %v, want %v", err == nil, tt.signer)
			}
			switch _, err := admin.RbacV1().ClusterRoles().Get(t.Context(), "portolan-signer", metav1.GetOptions{}); {
			case err != nil && !apierrors.IsNotFound(err):
				t.Fatal(err)
			case (err == nil) != tt.signer:
				t.Errorf("the signer's rights are there: %v, want %v", err == nil, tt.signer)
			}
		})
	}
}

// A registrar asks the mesh's signer alone and takes back what its own node asked; it
// touches nobody else's request, whoever made it, and nobody else is held up.
func TestCertificateRequests(t *testing.T) {
	hyperkube := programtest.Binary(t, "HYPERKUBE", "hyperkube")
	server := apiservertest.Start(t)
	apply(t, server, hyperkube, ".")
	admin := server.Admin()
	as := func(config *rest.Config) typedv1.CertificateSigningRequestInterface {
		t.Helper()
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		return client.CertificatesV1().CertificateSigningRequests()
	}
	registrar1 := as(server.PodAccount(t, namespace, "portolan-registrar", "n1"))
	registrar2 := as(server.PodAccount(t, namespace, "portolan-registrar", "n2"))
	unbound := as(server.User(rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":portolan-registrar", Groups: []string{"system:serviceaccounts", "system:authenticated"},
	}))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(who typedv1.CertificateSigningRequestInterface, signer string) (string, error) {
		made, err := who.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer,
				Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			},
		}, metav1.CreateOptions{})
		return made.GetName(), err
	}
	const ours, kubelet = "portolan.aether.io/workload", certificatesv1.KubeAPIServerClientSignerName
	// The API server takes a moment to learn of a policy, and of rights.
	deadline := time.Now().Add(time.Minute)
	for {
		if _, err := ask(registrar1, kubelet); apierrors.IsForbidden(err) && strings.Contains(err.Error(), "asks the signer "+ours+" only") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the policy does not work")
		}
		time.Sleep(50 * time.Millisecond)
	}
	made := func(who typedv1.CertificateSigningRequestInterface, signer string) string {
		t.Helper()
		name, err := ask(who, signer)
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	other := as(admin)
	for _, tt := range []struct {
		what    string
		who     typedv1.CertificateSigningRequestInterface
		request string
		allowed bool
	}{
		{"a registrar its own", registrar1, made(registrar1, ours), true},
		{"a registrar another node's", registrar1, made(registrar2, ours), false},
		{"a registrar an administrator's to our signer", registrar1, made(other, ours), false},
		{"a registrar a kubelet's", registrar1, made(other, kubelet), false},
		{"a registrar without a node its account's", unbound, made(registrar1, ours), false},
		{"an administrator a registrar's", other, made(registrar1, ours), true},
		{"an administrator a kubelet's", other, made(other, kubelet), true},
	} {
		err := tt.who.Delete(t.Context(), tt.request, metav1.DeleteOptions{})
		if tt.allowed && err != nil || !tt.allowed && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", tt.what, err)
		}
	}
}

// wantRegistrar checks the container, and that each of its mounts has a volume.
func wantRegistrar(t *testing.T, ds *appsv1.DaemonSet, args, mounts []string) {
	t.Helper()
	pod := ds.Spec.Template.Spec
	// An image that was imported on the nodes is not asked for elsewhere.
	if policy := pod.Containers[0].ImagePullPolicy; policy != corev1.PullIfNotPresent {
		t.Errorf("imagePullPolicy %s", policy)
	}
	for _, arg := range args {
		if !slices.Contains(pod.Containers[0].Args, arg) {
			t.Errorf("arguments %q have no %s", pod.Containers[0].Args, arg)
		}
	}
	var mounted []string
	for _, m := range pod.Containers[0].VolumeMounts {
		mounted = append(mounted, m.MountPath)
	}
	for _, path := range mounts {
		if !slices.Contains(mounted, path) {
			t.Errorf("mounts %q have no %s", mounted, path)
		}
	}
}

// wantRollableSigner checks that a rollout needs no third node: two signers never share
// one. What both are told, the signer is told as the registrar is.
func wantRollableSigner(t *testing.T, admin kubernetes.Interface, registrar *appsv1.DaemonSet) {
	t.Helper()
	d, err := admin.AppsV1().Deployments(namespace).Get(t.Context(), "portolan-signer", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if surge := d.Spec.Strategy.RollingUpdate.MaxSurge.IntValue(); surge != 0 {
		t.Errorf("maxSurge %d", surge)
	}
	for flag, key := range map[string]string{"bypass-namespaces": "bypassNamespaces", "svid-lifetime": "svidLifetime"} {
		for name, pod := range map[string]corev1.PodSpec{"signer": d.Spec.Template.Spec, "registrar": registrar.Spec.Template.Spec} {
			if got := setting(pod.Containers[0], flag); got != key {
				t.Errorf("--%s of the %s is the setting %q, want %s", flag, name, got, key)
			}
		}
	}
}

// setting returns the key of the ConfigMap portolan that a flag has its value from.
func setting(c corev1.Container, flag string) string {
	for _, env := range c.Env {
		if env.ValueFrom == nil {
			continue
		}
		if ref := env.ValueFrom.ConfigMapKeyRef; ref != nil && ref.Name == "portolan" && slices.Contains(c.Args, "--"+flag+"=$("+env.Name+")") {
			return ref.Key
		}
	}
	return ""
}

// overlay is a folder as a user writes one.
func overlay(t *testing.T, component string) string {
	t.Helper()
	dir := t.TempDir()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	base, err := filepath.Rel(dir, here)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("resources: [%s]\ncomponents: [%s]\n", base, filepath.Join(base, "components", component))
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func apply(t *testing.T, server *apiservertest.Server, hyperkube, folder string) {
	t.Helper()
	admin := server.Admin()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, admin.CAData, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), hyperkube, "kubectl", "--kubeconfig=", "--server="+admin.Host, "--token="+admin.BearerToken,
		"--certificate-authority="+ca, "apply", "--server-side", "-k", folder)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args[5:], " "), err, out)
	}
}
