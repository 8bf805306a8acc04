package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// churnFlags make the registrar forget and sweep as fast as a test can wait for.
func churnFlags() []string {
	return []string{"--service-retention=1s", "--svid-linger=1s", "--sweep-interval=200ms"}
}

// churnPod is one of some kinds of pods, without any process.
func churnPod(i int) node.PodSpec {
	ports := []string{"8080", "8080,9090=h2,5432=tcp", "none"}[i%3]
	return node.PodSpec{
		Name: fmt.Sprintf("pod-%d", i),
		Annotations: map[string]string{
			"endpoint.aether.io/service": fmt.Sprintf("churn-%d", i%40),
			"endpoint.aether.io/ports":   ports,
		},
	}
}

// cycle adds a pod and deletes it.
func cycle(ctx context.Context, n *node.Node, i int) error {
	p, err := n.NewPod(ctx, churnPod(i))
	if err != nil {
		return err
	}
	err = p.Add(ctx)
	if err == nil {
		err = witness(p)
	}
	return errors.Join(err, p.Delete(ctx))
}

// cycles runs so many of them, some at a time.
func cycles(t *testing.T, n *node.Node, from, to int) {
	t.Helper()
	const workers = 16
	var group sync.WaitGroup
	next := make(chan int)
	for range workers {
		group.Go(func() {
			for i := range next {
				if err := cycle(t.Context(), n, i); err != nil {
					t.Errorf("cycle %d: %v", i, err)
				}
			}
		})
	}
	for i := from; i < to && !t.Failed(); i++ {
		next <- i
	}
	close(next)
	group.Wait()
}

// A thousand ADDs and DELs through libcni leave nothing: no network namespace,
// mount, descriptor, goroutine, table, pin, note, record, name, listener, cluster or
// secret (I9, XDS-41, MESH-42).
func TestChurn(t *testing.T) {
	n := startNode(t, node.Options{
		RegistrarFlags: churnFlags(),
		Plugin:         map[string]any{"timeoutSeconds": 60}, // many at once on a busy machine are slow, and nothing here is about time
	})
	// What is made once and kept is made before the first count.
	cycles(t, n, 0, 40)
	before := settle(t, n, idle)
	begin := time.Now()
	cycles(t, n, 0, 1000)
	t.Logf("1,000 ADDs and DELs in %v", time.Since(begin).Round(time.Millisecond))
	awaitFootprint(t, n, before)
	for what, count := range before {
		if count > 0 {
			t.Logf("held before and after: %d %s", count, what)
		}
	}
	if err := n.Registrar.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, key := range storedKeys(t) {
		t.Errorf("left in state.db: %s", key)
	}
	if table, err := os.ReadFile("/var/lib/portolan/dns.json"); err != nil || strings.Contains(string(table), "churn-") {
		t.Errorf("the table on disk is %s (%v)", table, err)
	}
}

// Fifty pods at once, against a registrar with the race detector: all of them are
// added and are gone after their DELs, and nothing raced (CNI-54, XDS-46).
func TestParallelAdds(t *testing.T) {
	n := startNode(t, node.Options{
		Bin: binWith(t, "registrar", "github.com/portolan-mesh/portolan/registrar", "-race"), RegistrarFlags: churnFlags(),
		Plugin: map[string]any{"timeoutSeconds": 60}, // the race detector is slow
	})
	// The bridge must be there: CHECK of one that many ADDs made at once fails by its
	// hardware address, which the kernel changes until the plugin has set it.
	if err := cycle(t.Context(), n, 0); err != nil {
		t.Fatal(err)
	}
	before := settle(t, n, idle)
	const pods = 50
	added := make([]*node.Pod, pods)
	var group sync.WaitGroup
	for i := range pods {
		group.Go(func() {
			p, err := n.NewPod(t.Context(), churnPod(i))
			if err == nil {
				added[i] = p
				err = p.Add(t.Context())
			}
			if err != nil {
				t.Errorf("ADD %d: %v", i, err)
			}
		})
	}
	group.Wait()
	status, err := n.RegistrarStatus(t.Context())
	if err != nil || len(status.Attachments) != pods {
		t.Errorf("%d attachments (%v), want %d", len(status.Attachments), err, pods)
	}
	if t.Failed() {
		t.FailNow()
	}
	for _, p := range added {
		if err := n.Check(t.Context(), p); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
	for _, p := range added {
		group.Go(func() {
			if err := p.Delete(t.Context()); err != nil {
				t.Errorf("DEL: %v", err)
			}
		})
	}
	group.Wait()
	settle(t, n, func(now footprint) []string {
		return now.more(before, "attachments", "portolan_registry_endpoints", "files in /run/portolan")
	})
	for _, p := range []*node.Process{n.Registrar, n.DNS} {
		if err := p.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if log := p.Log(); strings.Contains(log, "DATA RACE") {
			t.Errorf("%s raced:\n%s", p.Name, log[strings.Index(log, "DATA RACE"):])
		}
	}
}

// The plugin is killed at each step of ADD: before the pin, after it, after the
// registrar's decision, and once the pod is captured. The runtime's DEL leaves
// nothing, and without a DEL the registrar finds by itself what is left (CNI-48,
// CNI-26). The plugin here is built with points to die at; the released one has
// none.
func TestKilledInAdd(t *testing.T) {
	n := startNode(t, node.Options{
		Bin:            binWith(t, "portolan", "github.com/portolan-mesh/portolan/plugins/portolan", "-tags=failpoints,grpcnotrace"),
		RegistrarFlags: churnFlags(),
	})
	spec := churnPod(1)
	killed := func(t *testing.T, point string) *node.Pod {
		t.Helper()
		p, err := n.NewPod(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv("PORTOLAN_FAILPOINT", point+"=kill")
		if err := p.Add(t.Context()); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("ADD: %v, want a killed plugin", err)
		}
		t.Setenv("PORTOLAN_FAILPOINT", "")
		if left, err := filepath.Glob("/run/portolan/netns/" + p.ContainerID + "*"); err != nil || len(left) == 0 {
			t.Fatalf("the killed plugin has left %v (%v): it had not begun", left, err)
		}
		return p
	}
	if err := cycle(t.Context(), n, 1); err != nil {
		t.Fatal(err)
	}
	before := settle(t, n, idle)
	for _, point := range []string{"noted", "pinned", "decided", "proven"} {
		t.Run(point+", DEL", func(t *testing.T) {
			p := killed(t, point)
			for range 2 { // a runtime may send it again
				if err := p.Del(t.Context()); err != nil {
					t.Errorf("DEL: %v", err)
				}
			}
			for _, what := range [][]string{{"nft", "list", "tables"}, {"ip", "-o", "link", "show", "type", "veth"}, {"ip", "route", "show", "table", "all", "proto", "112"}} {
				if out, err := p.Exec(t.Context(), what...); err != nil || out != "" {
					t.Errorf("%v in the network namespace: %q (%v), want nothing", what, out, err)
				}
			}
			if err := errors.Join(witness(p), p.Delete(t.Context())); err != nil {
				t.Error(err)
			}
			awaitFootprint(t, n, before)
		})
		t.Run(point+", no DEL", func(t *testing.T) {
			p := killed(t, point)
			if err := errors.Join(witness(p), p.Vanish()); err != nil {
				t.Fatal(err)
			}
			settle(t, n, func(now footprint) []string {
				return now.more(before, "attachments", "portolan_registry_endpoints", "files in /run/portolan", "links")
			})
			// The address is the other plugin's affair, and comes with DEL only.
			if err := p.Del(t.Context()); err != nil {
				t.Errorf("DEL after all: %v", err)
			}
			awaitFootprint(t, n, before)
		})
	}
	if err := n.Registrar.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, key := range storedKeys(t) {
		t.Errorf("left in state.db: %s", key)
	}
}
