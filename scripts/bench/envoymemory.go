package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	endpointv1 "github.com/portolan-mesh/portolan/api/endpoint/v1"
	"github.com/portolan-mesh/portolan/scripts/node"
)

const (
	memoryServices  = 1000
	memoryEndpoints = 10
	memoryAim       = 160 << 20
	// memoryAskers ask at the same time.
	memoryAskers = 20
	stateFile    = "/var/lib/portolan/state.db"
)

// envoyMemory starts a node that knows many services of other nodes, has every one
// of them asked for once, and looks at Envoy's resident memory.
func envoyMemory(ctx context.Context, r *rig) (_ []figure, err error) {
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
	before, err := residentMemory(n.Envoy.Pid())
	if err != nil {
		return nil, err
	}
	client, err := n.AddPod(ctx, node.PodSpec{Name: "memory-client", Annotations: map[string]string{"endpoint.aether.io/ports": "none"}})
	if err != nil {
		return nil, err
	}
	if err := askForAll(ctx, client); err != nil {
		return nil, err
	}
	clusters, err := activeClusters(ctx, n)
	if err != nil {
		return nil, err
	}
	if clusters < memoryServices {
		return nil, fmt.Errorf("%d clusters in Envoy, want %d", clusters, memoryServices)
	}
	after, err := residentMemory(n.Envoy.Pid())
	if err != nil {
		return nil, err
	}
	return []figure{{
		ok: after <= memoryAim, what: fmt.Sprintf("resident memory of Envoy, %d clusters with %d endpoints each", memoryServices, memoryEndpoints),
		measured: fmt.Sprintf("%d MB (%d MB before the first was asked for)", after>>20, before>>20), aim: fmt.Sprintf("<= %d MB", memoryAim>>20),
	}}, nil
}

// storeEndpoints writes the records of pods of other nodes as a registrar keeps
// them. Nobody listens at their addresses, which are the node's own, so that each
// request ends at once.
func storeEndpoints() error {
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
	ip := fmt.Sprintf("127.1.%d.%d", n/250, n%250+1)
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

// activeClusters is how many clusters of services Envoy has.
func activeClusters(ctx context.Context, n *node.Node) (int, error) {
	list, err := n.EnvoyAdmin(ctx, "/clusters")
	if err != nil {
		return 0, err
	}
	found := make(map[string]bool)
	for line := range strings.Lines(list) {
		name, _, _ := strings.Cut(line, "::")
		if strings.HasPrefix(name, "memory-") && strings.HasSuffix(name, ".aether.internal") {
			found[name] = true
		}
	}
	return len(found), nil
}

// residentMemory of a process, in bytes.
func residentMemory(pid int) (int64, error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return 0, fmt.Errorf("read Envoy's memory: %w", err)
	}
	stat, err := proc.Stat()
	if err != nil {
		return 0, fmt.Errorf("read Envoy's memory: %w", err)
	}
	return int64(stat.ResidentMemory()), nil
}
