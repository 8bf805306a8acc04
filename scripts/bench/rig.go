package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// logDir is the sandbox's: it goes with it.
const logDir = "/run/bench"

// closeTime bounds the deletion of a node.
const closeTime = 20 * time.Second

// rig is what the measurements share.
type rig struct {
	bin, envoy string
	running    *node.Node // nil until somebody asks for it
}

func newRig(bin, envoy string) (*rig, error) {
	if err := os.Mkdir(logDir, 0o755); err != nil {
		return nil, fmt.Errorf("make the folder for logs: %w", err)
	}
	return &rig{bin: bin, envoy: envoy}, nil
}

// node is a running node without the wait for drained connections at DEL, which
// the measurements share.
func (r *rig) node(ctx context.Context) (*node.Node, error) {
	if r.running != nil {
		return r.running, nil
	}
	n, err := node.Start(ctx, r.options())
	if err != nil {
		return nil, err
	}
	r.running = n
	return n, nil
}

func (r *rig) options() node.Options {
	return node.Options{
		Bin: r.bin, Envoy: r.envoy, LogDir: logDir,
		RegistrarFlags: []string{"--drain-wait=0s", "--log-level=info"},
	}
}

// envoyPath is the Envoy that nodes run.
func (r *rig) envoyPath() string { return cmp.Or(r.envoy, filepath.Join(r.bin, "envoy")) }

// close ends the shared node, so that another can be started.
func (r *rig) close(ctx context.Context) error {
	if r.running == nil {
		return nil
	}
	n := r.running
	r.running = nil
	return closeNode(ctx, n)
}

func closeNode(ctx context.Context, n *node.Node) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		return fmt.Errorf("end the node: %w", err)
	}
	return nil
}

// deletePods ends pods; what goes wrong is added to *err.
func deletePods(ctx context.Context, err *error, pods ...*node.Pod) {
	for _, p := range pods {
		if p != nil {
			*err = errors.Join(*err, p.Delete(context.WithoutCancel(ctx)))
		}
	}
}
