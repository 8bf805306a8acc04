package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.etcd.io/bbolt"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// footprint counts what a node holds, by what it is. What pods need comes and goes
// with them; what is left of them shows as a count that is higher than before.
type footprint map[string]int

// measure counts everything that a pod leaves its mark on.
func measure(ctx context.Context, n *node.Node) (footprint, error) {
	f := footprint{}
	for _, count := range []func(context.Context, *node.Node) error{f.kernel, f.folders, f.registrar, f.dns, f.envoy} {
		if err := count(ctx, n); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// kernel counts descriptors and threads of the programs, processes, mounts, links
// and nftables tables. Links are the witnesses of network namespaces, too: see
// witness.
func (f footprint) kernel(ctx context.Context, n *node.Node) error {
	for name, p := range map[string]*node.Process{"Envoy": n.Envoy, "registrar run": n.Registrar, "registrar dns": n.DNS} {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
		if err != nil {
			return err
		}
		f["descriptors of "+name] = len(fds)
		mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", p.Pid()))
		if err != nil {
			return err
		}
		f["mounts that "+name+" sees"] = strings.Count(string(mounts), "\n")
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	f["processes"] = len(processes)
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	f["links"] = len(links)
	tables, err := exec.CommandContext(ctx, "nft", "list", "tables").Output()
	if err != nil {
		return err
	}
	f["nftables tables of the node"] = strings.Count(string(tables), "\n")
	return nil
}

// folders counts files: pins and notes, the spool, keys, leases, libcni's cache.
func (f footprint) folders(context.Context, *node.Node) error {
	for _, dir := range []string{
		"/run/netns", "/run/portolan/netns", "/run/portolan/spool", "/var/lib/portolan/ca/svids",
		"/var/lib/cni/networks/pods", "/var/lib/cni/results",
	} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		f["files in "+dir] = len(entries)
		// host-local's note of the last address stays.
		if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), "last_reserved_ip") }) {
			f["files in "+dir] = 0
			for _, e := range entries {
				if !strings.HasPrefix(e.Name(), "last_reserved_ip") && e.Name() != "lock" {
					f["files in "+dir]++
				}
			}
		}
	}
	return nil
}

// registrar counts records, resources and goroutines.
func (f footprint) registrar(ctx context.Context, n *node.Node) error {
	status, err := n.RegistrarStatus(ctx)
	if err != nil {
		return err
	}
	f["attachments"] = len(status.Attachments)
	f["rejected resources"] = len(status.NACKs)
	metrics, err := n.Metrics(ctx)
	if err != nil {
		return err
	}
	return f.gauges(metrics, "go_goroutines", "portolan_xds_resources", "portolan_xds_subscriptions", "portolan_xds_pending_resources",
		"portolan_xds_streams", "portolan_registry_endpoints", "portolan_registry_unsaved", "portolan_services", "portolan_unknown_names")
}

// dns counts names, pods and goroutines of `registrar dns`.
func (f footprint) dns(ctx context.Context, _ *node.Node) error {
	metrics, err := dnsMetrics(ctx)
	if err != nil {
		return err
	}
	return f.gauges(metrics, "portolan_dns_names", "portolan_dns_pods", "portolan_dns_pods_serving", "portolan_dns_pods_captured")
}

func dnsMetrics(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:15071/metrics", http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

// gauges takes the series of these metrics.
func (f footprint) gauges(metrics string, names ...string) error {
	for line := range strings.Lines(metrics) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, _, _ := strings.Cut(series, "{")
		if !slices.Contains(names, name) {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return fmt.Errorf("metric %s: %w", series, err)
		}
		f[series] = int(number)
	}
	return nil
}

// envoy counts listeners, clusters and secrets.
func (f footprint) envoy(ctx context.Context, n *node.Node) error {
	stats, err := n.EnvoyAdmin(ctx, "/stats?filter=^(listener_manager.total_listeners_|cluster_manager.(active|warming)_clusters)")
	if err != nil {
		return err
	}
	for line := range strings.Lines(stats) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if f["Envoy's "+name], err = strconv.Atoi(value); err != nil {
			return fmt.Errorf("Envoy's %s: %w", name, err)
		}
	}
	for _, which := range []string{"dynamic_active_secrets", "dynamic_warming_secrets"} {
		dump, err := n.EnvoyAdmin(ctx, "/config_dump?resource="+which)
		if err != nil {
			return err
		}
		var secrets struct {
			Configs []json.RawMessage `json:"configs"`
		}
		if err := json.Unmarshal([]byte(dump), &secrets); err != nil {
			return err
		}
		f["Envoy's "+which] = len(secrets.Configs)
	}
	return nil
}

// more lists what of f is more than in before; with prefixes, of that alone.
func (f footprint) more(before footprint, prefixes ...string) []string {
	var out []string
	for what, count := range f {
		if len(prefixes) > 0 && !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(what, p) }) {
			continue
		}
		if count > before[what] {
			out = append(out, fmt.Sprintf("%s: %d, before %d", what, count, before[what]))
		}
	}
	slices.Sort(out)
	return out
}

// awaitFootprint waits until the node holds nothing more than before, longer than
// Envoy drains and the registrar remembers.
func awaitFootprint(t *testing.T, n *node.Node, before footprint) {
	t.Helper()
	settle(t, n, func(now footprint) []string { return now.more(before) })
}

// settlePause is between two looks at a footprint, which starts programs.
const settlePause = 250 * time.Millisecond

// settle measures until left has nothing more to say.
func settle(t *testing.T, n *node.Node, left func(footprint) []string) footprint {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	ticker := time.NewTicker(settlePause)
	defer ticker.Stop()
	var last []string
	for {
		now, err := measure(ctx, n)
		if err != nil && ctx.Err() == nil {
			t.Fatal(err)
		}
		if err == nil {
			if last = left(now); len(last) == 0 {
				return now
			}
		}
		select {
		case <-ctx.Done():
			t.Fatalf("too much is left:\n%s", strings.Join(last, "\n"))
		case <-ticker.C:
		}
	}
}

// idle says what shows that pods are not quite gone yet.
func idle(now footprint) []string {
	return now.more(footprint{
		"portolan_xds_resources{type=\"secret\"}": 1, // of the trust domain
		"portolan_xds_resources{type=\"route\"}":  1,
	}, "attachments", "portolan_services", "portolan_xds_resources", "portolan_dns_names", "Envoy's listener_manager")
}

// witness puts an interface into the pod's network namespace whose other end is the
// node's: it is there for as long as anything holds the namespace, be it a mount, a
// descriptor or a socket in it.
func witness(p *node.Pod) error {
	netns, err := os.Open(p.Netns)
	if err != nil {
		return err
	}
	defer netns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "w" + p.ContainerID[:12]
	return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "witness", PeerNamespace: netlink.NsFd(int(netns.Fd()))})
}

// storedKeys lists what is in state.db, as bucket/key, but for the addresses of
// services that are forgotten: they are kept on purpose, as many as the range has,
// so that no name's address becomes another's while somebody remembers it. The
// registrar must not run.
func storedKeys(t *testing.T) []string {
	t.Helper()
	db, err := bbolt.Open(stateFile, 0o600, &bbolt.Options{Timeout: time.Second, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var found []string
	var walk func(path string, b *bbolt.Bucket) error
	walk = func(path string, b *bbolt.Bucket) error {
		return b.ForEach(func(key, value []byte) error {
			if value == nil {
				return walk(path+"/"+string(key), b.Bucket(key))
			}
			var entry struct{ ReleasedAt time.Time }
			if path == "services" && json.Unmarshal(value, &entry) == nil && !entry.ReleasedAt.IsZero() {
				return nil
			}
			found = append(found, fmt.Sprintf("%s/%q = %s", path, key, value))
			return nil
		})
	}
	err = db.View(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error { return walk(string(name), b) })
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
