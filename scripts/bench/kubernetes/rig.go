package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/portolan-mesh/portolan/scripts/lab"
)

const (
	// namespace has everything that is measured.
	namespace = "bench"
	// patience bounds every wait for an event.
	patience = 60 * time.Second
	// writerNode is where pods run and endpoints are written, readerNode the other one,
	// which learns of them.
	writerNode, readerNode = 1, 2
)

// rig is what the measurements share.
type rig struct {
	lab       lab.Lab
	config    *rest.Config
	client    kubernetes.Interface
	installed bool
}

// newRig makes the namespace, in which pods can be made on return.
func newRig(ctx context.Context, l lab.Lab) (*rig, error) {
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(l.Dir, "kubeconfig"))
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	_, err = client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	err = poll(ctx, 50*time.Millisecond, "the account of the pods", func() (bool, error) {
		_, err := client.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, err
	})
	return &rig{lab: l, config: config, client: client}, err
}

// mesh installs the mesh, unless it is.
func (r *rig) mesh(ctx context.Context) error {
	if r.installed {
		return nil
	}
	if err := r.lab.Install(ctx); err != nil {
		return fmt.Errorf("install the mesh: %w", err)
	}
	r.installed = true
	return nil
}

// noMesh takes the mesh away again.
func (r *rig) noMesh(ctx context.Context) error {
	if err := r.lab.Uninstall(ctx); err != nil {
		return fmt.Errorf("take the mesh away: %w", err)
	}
	r.installed = false
	return nil
}

// poll calls check every pause until it reports true.
func poll(ctx context.Context, pause time.Duration, what string, check func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for {
		done, err := check()
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("wait for %s: %w", what, ctx.Err()), err)
		case <-ticker.C:
		}
	}
}
