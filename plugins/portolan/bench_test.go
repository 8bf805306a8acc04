package main

import (
	"context"
	"encoding/json"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// BenchmarkAdd compares the chain with and without portolan behind the reference
// bridge and host-local plugins: what a pod's start pays for the mesh, less
// Envoy's part. Compare the sub-benchmarks with each other, not with a clock.
func BenchmarkAdd(b *testing.B) {
	bridge := map[string]any{
		"type": "bridge", "bridge": "br0", "isGateway": true,
		"ipam": map[string]any{"type": "host-local", "dataDir": b.TempDir(), "ranges": []any{[]any{map[string]string{"subnet": "10.88.0.0/16"}}}},
	}
	for _, name := range []string{"bridge", "bridge+portolan, not meshed", "bridge+portolan, meshed"} {
		annotations := map[string]map[string]string{"bridge+portolan, not meshed": plain, "bridge+portolan, meshed": joins}[name]
		b.Run(name, func(b *testing.B) {
			r := cnitest.Start(b, meshed())
			if name == "bridge+portolan, not meshed" {
				r.Set(cnitest.Behaviour{})
			}
			plugins := []any{bridge}
			if annotations != nil {
				dir := b.TempDir()
				plugins = append(plugins, map[string]any{
					"type": "portolan", "socket": r.Socket, "spoolDir": dir + "/spool", "netnsDir": "/run/portolan/netns",
					"capabilities": map[string]bool{"io.kubernetes.cri.pod-annotations": true},
				})
			}
			text, err := json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": "bench", "plugins": plugins})
			if err != nil {
				b.Fatal(err)
			}
			list, err := libcni.NetworkConfFromBytes(text)
			if err != nil {
				b.Fatal(err)
			}
			cni := libcni.NewCNIConfigWithCacheDir([]string{bin.dir}, b.TempDir(), &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: io.Discard}})
			var took []time.Duration
			var cpu time.Duration
			for b.Loop() {
				b.StopTimer()
				pod := nettest.New(b)
				rt := sandboxOf("bench", pod.Path, annotations)
				before, start := childrensCPU(b), time.Now()
				b.StartTimer()
				if _, err := cni.AddNetworkList(context.Background(), list, rt); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				took = append(took, time.Since(start))
				cpu += childrensCPU(b) - before
				if err := cni.DelNetworkList(context.Background(), list, rt); err != nil {
					b.Fatal(err)
				}
				pod.Unmount(b)
				b.StartTimer()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2]), "p50-ns/op")
			b.ReportMetric(float64(cpu)/float64(len(took)), "plugins-cpu-ns/op")
		})
	}
}

// childrensCPU is the processor time of the plugins so far: it is steadier than
// the clock on a machine that does other things too.
func childrensCPU(b *testing.B) time.Duration {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
