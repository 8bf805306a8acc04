package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/annotation"
	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/node"
)

const (
	memoryServices  = 1000
	memoryEndpoints = 10
	memoryAim       = 160 << 20
	// memoryAskers ask at the same time.
	memoryAskers = 20
	stateFile    = "/var/lib/portolan/state.db"
	// localClusters are the one of the registrar and those of the callers' certificates.
	localClusters = 1 + (memoryServices+annotation.MaxUpstreams-1)/annotation.MaxUpstreams
)

// envoyMemory starts a node that knows many services of other nodes and looks at
// Envoy's resident memory when it has all their clusters, declared by pods as their
// upstreams, and again when each was asked for once: Envoy makes the statistics of a
// cluster at its first use.
func envoyMemory(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	if err := r.close(ctx); err != nil {
		return nil, err
	}
	if err := storeEndpoints(); err != nil {
		return nil, err
	}
	n, err := node.Start(ctx, r.options())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeNode(ctx, n)) }()
	before, err := measure.ResidentMemory(n.Envoy.Pid())
	if err != nil {
		return nil, err
	}
	client, err := addCallers(ctx, n)
	if err != nil {
		return nil, err
	}
	if err := awaitClusters(ctx, n); err != nil {
		return nil, err
	}
	loaded, err := measure.ResidentMemory(n.Envoy.Pid())
	if err != nil {
		return nil, err
	}
	if err := askForAll(ctx, client); err != nil {
		return nil, err
	}
	used, err := measure.ResidentMemory(n.Envoy.Pid())
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("resident memory of Envoy, %d clusters with %d endpoints each", memoryServices, memoryEndpoints)
	compared, aim := fmt.Sprintf("before: %d MB", before>>20), fmt.Sprintf("<= %d MB", memoryAim>>20)
	return []measure.Figure{
		{OK: loaded <= memoryAim, What: what + ", none used yet", Measured: fmt.Sprintf("%d MB", loaded>>20), Compared: compared, Aim: aim},
		{OK: used <= memoryAim, What: what + ", each used once", Measured: fmt.Sprintf("%d MB", used>>20), Compared: compared, Aim: aim},
	}, nil
}

// addCallers adds pods that declare all services, each at most as many as a pod
// may, and returns one of them.
func addCallers(ctx context.Context, n *node.Node) (pod *node.Pod, err error) {
	for from := 0; from < memoryServices; from += annotation.MaxUpstreams {
		var upstreams []string
		for s := from; s < min(from+annotation.MaxUpstreams, memoryServices); s++ {
			upstreams = append(upstreams, serviceName(s))
		}
		pod, err = n.AddPod(ctx, node.PodSpec{Name: fmt.Sprintf("memory-client-%d", from), Annotations: map[string]string{
			"endpoint.aether.io/ports": "none", "config.aether.io/upstreams": strings.Join(upstreams, ","),
		}})
		if err != nil {
			return nil, err
		}
	}
	return pod, nil
}

// awaitClusters polls until Envoy has the clusters of all services.
func awaitClusters(ctx context.Context, n *node.Node) error {
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		found, err := activeClusters(ctx, n)
		if err == nil && found >= memoryServices+localClusters {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%d clusters in Envoy, want %d", found, memoryServices+localClusters), err)
		case <-ticker.C:
		}
	}
}

// otherNodes is where the pods of other nodes are.
const otherNodes = "10.77.0.0/16"

// storeEndpoints writes the records of pods of other nodes as a registrar keeps
// them. Their addresses are made the node's own, where nobody listens, so that each
// request ends at once.
func storeEndpoints() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback interface: %w", err)
	}
	_, dst, err := net.ParseCIDR(otherNodes)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: unix.RT_TABLE_LOCAL}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("make %s the node's own: %w", otherNodes, err)
	}
	if err := os.MkdirAll(filepath.Dir(stateFile), 0o700); err != nil {
		return fmt.Errorf("make the state folder: %w", err)
	}
	db, err := bbolt.Open(stateFile, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return fmt.Errorf("open the state file: %w", err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		bucket, err := tx.CreateBucketIfNotExists([]byte("endpoints"))
		if err != nil {
			return err
		}
		for s := range memoryServices {
			for e := range memoryEndpoints {
				record, err := proto.Marshal(otherNodesPod(s, e))
				if err != nil {
					return err
				}
				if err := bucket.Put(fmt.Appendf(nil, "other-%d-%d-eth0", s, e), record); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return errors.Join(err, db.Close())
}

func serviceName(s int) string { return fmt.Sprintf("memory-%d", s) }

func otherNodesPod(s, e int) *endpointv1.ServiceEndpoint {
	n := s*memoryEndpoints + e
	ip := fmt.Sprintf("10.77.%d.%d", n/250, n%250+1)
	return &endpointv1.ServiceEndpoint{
		Ip: ip, Addresses: []string{ip}, ClusterName: serviceName(s) + ".aether.internal", Port: 8080, Ports: []uint32{8080}, Weight: 1,
		Health: endpointv1.Health_HEALTH_HEALTHY, Service: serviceName(s), ServiceAccount: serviceName(s), TrustDomain: "aether.internal",
		Generation: 1,
		KubernetesMetadata: &endpointv1.KubernetesMetadata{
			Namespace: "default", PodName: fmt.Sprintf("%s-%d", serviceName(s), e), NodeName: "other",
		},
	}
}

// askForAll sends a request to every service.
func askForAll(ctx context.Context, client *node.Pod) error {
	call := newCaller(client, false)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(memoryAskers)
	for s := range memoryServices {
		group.Go(func() error {
			url := "http://" + serviceName(s) + ".aether.internal/"
			got, _, err := call.get(ctx, url)
			if err == nil && got != http.StatusServiceUnavailable {
				err = fmt.Errorf("%s: status %d, want 503", url, got)
			}
			return err
		})
	}
	return group.Wait()
}

// activeClusters is how many clusters Envoy has.
func activeClusters(ctx context.Context, n *node.Node) (int, error) {
	// Not /clusters: its text is of tens of megabytes, which Envoy would keep.
	text, err := n.EnvoyAdmin(ctx, "/stats?filter=^cluster_manager.active_clusters$&format=json")
	if err != nil {
		return 0, err
	}
	var stats struct {
		Stats []struct{ Value int }
	}
	if err := json.Unmarshal([]byte(text), &stats); err != nil || len(stats.Stats) != 1 {
		return 0, fmt.Errorf("read Envoy's statistics %q: %w", text, err)
	}
	return stats.Stats[0].Value, nil
}
