package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/pflag"
	clientgo "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/cri"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/podsource"
	"github.com/portolan-mesh/portolan/registrar/internal/topology"
)

const (
	defaultNamespace = "portolan-system"
	defaultCRISocket = "/run/containerd/containerd.sock"
)

// clusterConfig is where the parts of a cluster are.
type clusterConfig struct {
	Kubeconfig string
	// Namespace is the mesh's own.
	Namespace string
	// CRISocket is the container runtime's; empty leaves missed pods alone.
	CRISocket string
}

func (c *clusterConfig) flags(f *pflag.FlagSet) {
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "how to reach the Kubernetes API (default: as the pod that the registrar runs in)")
	f.StringVar(&c.Namespace, "namespace", defaultNamespace, "namespace of the mesh's own objects in Kubernetes")
	f.StringVar(&c.CRISocket, "cri-socket", defaultCRISocket, "the container runtime, which is asked for pods that started without the plugin (empty: they stay outside the mesh)")
}

func (c *clusterConfig) validate() error {
	_, err := kubernetesConfig(c.Kubeconfig)
	if !authority.ValidLabel(c.Namespace) {
		err = errors.Join(err, fmt.Errorf("--namespace %q is not a DNS label", c.Namespace))
	}
	return err
}

// cluster is what a node of a cluster has besides a machine of its own; nil
// standalone.
type cluster struct {
	client    clientgo.Interface
	source    *podsource.Source
	reporter  *podsource.Reporter
	sandboxes *cri.Runtime   // nil: not asked
	place     *topology.Node // nil: flags say it
}

// makeCluster makes what asks the API server about this node's pods.
func (d *daemon) makeCluster() error {
	if d.cfg.Registry != backendKubernetes {
		return nil
	}
	config, err := kubernetesConfig(d.cfg.Cluster.Kubeconfig)
	if err != nil {
		return err
	}
	client, err := clientgo.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client of the Kubernetes API: %w", err)
	}
	namespaces, err := metadata.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client of the Kubernetes API: %w", err)
	}
	c := &cluster{client: client}
	c.source, err = podsource.New(podsource.Config{
		Client: client, Namespaces: namespaces, Node: d.cfg.Mesh.Node, Leaving: d.leaving, Log: d.component("podsource"), Metrics: d.metrics,
	})
	if err != nil {
		return err
	}
	if d.cfg.Cluster.CRISocket != "" {
		if c.sandboxes, err = cri.Open(d.cfg.Cluster.CRISocket, d.component("cri")); err != nil {
			return err
		}
	}
	c.reporter = podsource.NewReporter(client, d.cfg.Mesh.Node)
	d.cluster = c
	return nil
}

// close lets go of the connections; c may be nil.
func (c *cluster) close(log *slog.Logger) {
	if c == nil {
		return
	}
	c.reporter.Close()
	if c.sandboxes != nil {
		if err := c.sandboxes.Close(); err != nil {
			log.Warn("connection to the container runtime was not closed cleanly", "error", err)
		}
	}
}

// join gives the attachments what the cluster knows; nothing standalone.
func (c *cluster) join(cfg *attach.Config, bypass []string) {
	if c == nil {
		return
	}
	cfg.Workloads, cfg.Reporter, cfg.Bypass = c.source, c.reporter, bypass
	if c.sandboxes != nil {
		cfg.Sandboxes = c.sandboxes
	}
}

// locate finds the node's region and zone, by flag or, in a cluster, by the labels of
// its Node (contract 3).
func (d *daemon) locate(ctx context.Context) error {
	d.locality = model.Locality{Region: d.cfg.Mesh.Region, Zone: d.cfg.Mesh.Zone}
	if d.cluster == nil || d.locality != (model.Locality{}) {
		return nil
	}
	node, err := topology.Open(topology.Config{
		Client: d.cluster.client.CoreV1().Nodes(), Node: d.cfg.Mesh.Node, DB: d.db, Log: d.component("topology"),
	})
	if err != nil {
		return err
	}
	d.cluster.place, d.locality = node, node.Locality(ctx)
	return nil
}

// followPlace tells the parts of a region and zone that were not known at the start, or
// have changed since; nothing where flags say them.
func (d *daemon) followPlace(ctx context.Context) error {
	if d.cluster.place == nil {
		return nil
	}
	return d.cluster.place.Run(ctx, func(ctx context.Context, l model.Locality) {
		d.publisher.SetSelf(l)
		d.pods.SetLocality(ctx, l)
	})
}
