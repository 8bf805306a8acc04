package app

import (
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/embedded"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/kubernetes"
)

// The backends of --registry.
const (
	backendEmbedded   = "embedded"
	backendKubernetes = "kubernetes"
)

// backend is what the daemon needs of a registry.
type backend interface {
	registry.Backend
	// Health says what is wrong, with the remedy; nil when nothing is.
	Health() error
	Stats() embedded.Stats
	Close() error
}

// openRegistry opens what --registry names.
func (d *daemon) openRegistry() (backend, error) {
	log := d.component("registry")
	if d.cfg.Registry == backendEmbedded {
		return embedded.Open(embedded.Options{DB: d.db, TrustDomain: d.cfg.Mesh.TrustDomain, MeshName: d.meshName, Log: log})
	}
	klog.SetSlogLogger(d.component("client-go")) // what the libraries of Kubernetes log
	config, err := kubernetesConfig(d.cfg.Cluster.Kubeconfig)
	if err != nil {
		return nil, err
	}
	return kubernetes.Open(kubernetes.Options{
		Config: config, Node: d.cfg.Mesh.Node, TrustDomain: d.cfg.Mesh.TrustDomain, DB: d.db, MeshName: d.meshName,
		ServiceRanges: d.capture.vipRanges, Leaving: d.leaving, Log: log, Metrics: d.metrics,
	})
}

// kubernetesConfig says where the API server is and who we are there: by a
// kubeconfig file, or, when path is empty, as the pod that this process is in.
func kubernetesConfig(path string) (*rest.Config, error) {
	if path == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("--registry=kubernetes outside of a pod needs --kubeconfig: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %s: %w", path, err)
	}
	return config, nil
}
