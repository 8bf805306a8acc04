// Package topology knows in which region and zone the node is (contract 3), as its
// Node object says it. What was heard last is kept on disk: a registrar that starts
// while the API server is away must not publish poorer records than its predecessor did.
package topology

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	bolt "go.etcd.io/bbolt"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
)

const (
	// bucket of state.db belongs to this package: the node's name -> entry.
	bucket = "topology"

	// firstWait bounds how long a start waits for a node of which nothing is known.
	firstWait = 2 * time.Second
	// askTimeout bounds one question: an API server may take it and never answer.
	askTimeout = 10 * time.Second
	// minPause doubles up to maxPause while there is no answer.
	minPause = time.Second
	maxPause = 30 * time.Second
	// period is how often a node that answered is asked again. Its labels hardly ever
	// change, but a cloud may set them only after the node has joined. Asking needs no
	// more than get, where a watch would need to list every node.
	period = 5 * time.Minute
)

// Client reads Node objects; client-go's has this method.
type Client interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.Node, error)
}

// Config is what a Node needs.
type Config struct {
	Client Client
	// Node is this node's name in the API.
	Node string
	DB   *bolt.DB
	Log  *slog.Logger
}

// entry is what is on disk. The name guards against a state folder that was copied from
// another node.
type entry struct {
	Node         string
	Region, Zone string
}

// Node is this node's place. Its methods are called one after the other.
type Node struct {
	cfg     Config
	records *state.Records[entry]
	last    model.Locality
	// known: last was heard, by this process or an earlier one. answered: by this one.
	known, answered bool
}

// Open returns a Node that knows what was stored.
func Open(cfg Config) (*Node, error) {
	records, err := state.OpenRecords[entry](cfg.DB, bucket, cfg.Log)
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, records: records}
	stored, err := records.Load(func(key string, e entry) error {
		if e.Node != key {
			return fmt.Errorf("it is the place of node %q", e.Node)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, e := range stored {
		if e.Node == cfg.Node {
			n.last, n.known = model.Locality{Region: e.Region, Zone: e.Zone}, true
		}
	}
	return n, nil
}

// Locality returns what is known at a start. Only a node of which nothing is known waits
// for the API server, and not for long.
func (n *Node) Locality(ctx context.Context) model.Locality {
	if n.known {
		return n.last
	}
	if _, err := n.ask(ctx, firstWait); err != nil {
		n.cfg.Log.Warn("the node's region and zone are not known yet; its endpoints carry none until the API server answers",
			"node", n.cfg.Node, "error", err)
	}
	return n.last
}

// Run asks until there is an answer, and from then on now and again, until ctx ends.
// changed is called with every place that differs from the last one told.
func (n *Node) Run(ctx context.Context, changed func(context.Context, model.Locality)) error {
	pause, failed := minPause, false
	timer := time.NewTimer(0)
	defer timer.Stop()
	if n.answered {
		timer.Reset(jitter(period))
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		moved, err := n.ask(ctx, askTimeout)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if !failed {
				n.cfg.Log.Warn("the node's region and zone cannot be read; what was known last stands, and they are asked for again",
					"node", n.cfg.Node, "region", n.last.Region, "zone", n.last.Zone, "error", err)
			}
			failed = true
			timer.Reset(jitter(pause))
			pause = min(2*pause, maxPause)
			continue
		case moved:
			n.cfg.Log.Info("the node's region and zone are known", "node", n.cfg.Node, "region", n.last.Region, "zone", n.last.Zone)
			changed(ctx, n.last)
		}
		pause, failed = minPause, false
		timer.Reset(jitter(period))
	}
}

// ask reads the Node once; moved says that the answer is another one than the last.
func (n *Node) ask(ctx context.Context, timeout time.Duration) (moved bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	node, err := n.cfg.Client.Get(ctx, n.cfg.Node, metav1.GetOptions{})
	if err != nil {
		return false, fmt.Errorf("get node %s: %w", n.cfg.Node, err)
	}
	l := model.Locality{Region: node.Labels[corev1.LabelTopologyRegion], Zone: node.Labels[corev1.LabelTopologyZone]}
	moved = l != n.last
	if moved || !n.known {
		// What cannot be written is asked for at the next start.
		if err := n.records.Save(map[string]entry{n.cfg.Node: {Node: n.cfg.Node, Region: l.Region, Zone: l.Zone}}); err != nil {
			n.cfg.Log.Warn("the node's region and zone are not kept", "node", n.cfg.Node, "error", err)
		}
	}
	n.last, n.known, n.answered = l, true, true
	return moved, nil
}

// jitter keeps the nodes of a cluster from asking all at once.
func jitter(d time.Duration) time.Duration { return d - rand.N(d/4) } //nolint:gosec // nobody gains by guessing it
