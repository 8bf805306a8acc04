package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/handwritten"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/traffic"
)

const (
	fortioImage = "portolan/fortio:lab"
	// pins is where the plugin keeps the pods' network namespaces, with a note each.
	pins = "/run/portolan/netns"
	// workers of each of the four Envoys: what the nodes of the lab have processors.
	workers = 2
)

// requests compares requests from a pod to one on the other node. Each node's Envoy is
// passed once.
func requests(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	if err := r.lab.Run(ctx, r.lab.Script(), "load", fortioImage, filepath.Join(r.lab.Root, "bin/fortio")); err != nil {
		return nil, err
	}
	w, err := r.watchPods(ctx)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	server := fortioPod("traffic", writerNode, map[string]string{"endpoint.aether.io/service": "traffic", "endpoint.aether.io/ports": "8080"})
	client := fortioPod("traffic-client", readerNode, map[string]string{"endpoint.aether.io/ports": "none"})
	if _, err := w.begin(ctx, r, server, client); err != nil {
		return nil, err
	}
	running, err := r.client.CoreV1().Pods(namespace).Get(ctx, server.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	ip, err := netip.ParseAddr(running.Status.PodIP)
	if err != nil {
		return nil, err
	}
	written, err := r.startByHand(ctx, client.Name, server.Name, ip)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, written.stop()) }()
	var ours []int
	for _, node := range []int{writerNode, readerNode} {
		mesh, err := r.processes(node)
		if err != nil {
			return nil, err
		}
		ours = append(ours, mesh["envoy"])
	}
	comparison := traffic.Comparison{
		Hops:   fmt.Sprintf("two Envoys with %d workers each, on two nodes", workers),
		Direct: traffic.Way{URL: fmt.Sprintf("http://%s:8080/", ip)},
		Mesh:   traffic.Way{URL: "http://traffic." + namespace + ".aether.internal/", Envoys: ours},
		HTTP1:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP1Port), Envoys: written.pids},
		HTTP2:  traffic.Way{URL: fmt.Sprintf("http://127.0.0.1:%d/", handwritten.HTTP2Port), Envoys: written.pids},
		Fortio: func(ctx context.Context, args ...string) (string, error) { return r.fortio(ctx, client.Name, args...) },
	}
	for _, way := range []traffic.Way{comparison.Direct, comparison.Mesh, comparison.HTTP1, comparison.HTTP2} {
		if err := poll(ctx, 100*time.Millisecond, way.URL+" to answer", func() (bool, error) {
			_, err := r.fortio(ctx, client.Name, "curl", "-loglevel", "error", way.URL)
			return err == nil, err
		}); err != nil {
			return nil, err
		}
	}
	figures, err := comparison.Latency(ctx)
	if err == nil {
		var throughput []measure.Figure
		throughput, err = comparison.Throughput(ctx)
		figures = append(figures, throughput...)
	}
	return figures, errors.Join(err, w.end(ctx, r, server, client))
}

// fortioPod is a pod that runs fortio's server.
func fortioPod(name string, node int, annotations map[string]string) *corev1.Pod {
	pod := newPod(name, node, annotations)
	pod.Spec.Containers[0].Image = fortioImage
	pod.Spec.Containers[0].Command = append([]string{"/usr/local/bin/fortio"}, traffic.FortioServer()...)
	return pod
}

// fortio runs fortio in a pod and returns what it prints.
func (r *rig) fortio(ctx context.Context, pod string, args ...string) (string, error) {
	cmd := r.lab.Command(ctx, append([]string{r.lab.Script(), "kubectl", "-n", namespace, "exec", pod, "--", "/usr/local/bin/fortio"}, args...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("fortio in %s: %w: %s", pod, err, errs.Bytes())
	}
	return string(out), nil
}

// byHand are two Envoys with a hand-written configuration, one on each node.
type byHand struct {
	dir  string
	cmds []*exec.Cmd // lab.sh; the Envoys are its children
	pids []int       // of the Envoys
}

// startByHand starts them; what they serve is there a moment later.
func (r *rig) startByHand(ctx context.Context, client, server string, ip netip.Addr) (_ *byHand, err error) {
	h := &byHand{}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.stop())
		}
	}()
	if h.dir, err = os.MkdirTemp("", "portolan-handwritten-"); err != nil { // both nodes have the machine's /tmp
		return h, err
	}
	if err := handwritten.WriteCertificates(h.dir); err != nil {
		return h, err
	}
	clientNetns, err := r.netns(readerNode, client)
	if err != nil {
		return h, err
	}
	serverNetns, err := r.netns(writerNode, server)
	if err != nil {
		return h, err
	}
	for node, config := range map[int]handwritten.Config{
		readerNode: {Dir: h.dir, ClientNetns: clientNetns, ServerIP: ip},
		writerNode: {Dir: h.dir, ServerNetns: serverNetns},
	} {
		if err := h.start(ctx, r, node, config); err != nil {
			return h, err
		}
	}
	return h, nil
}

func (h *byHand) start(ctx context.Context, r *rig, node int, config handwritten.Config) error {
	path := filepath.Join(h.dir, fmt.Sprintf("node%d.yaml", node))
	if err := config.Write(path); err != nil {
		return err
	}
	program := append([]string{cmp.Or(os.Getenv("ENVOY"), filepath.Join(r.lab.Root, "bin/envoy"))}, handwritten.Arguments(path, workers)...)
	cmd := r.lab.Command(context.WithoutCancel(ctx), append([]string{r.lab.Script(), "node", fmt.Sprint(node)}, program...)...)
	if err := cmd.Start(); err != nil {
		return err
	}
	h.cmds = append(h.cmds, cmd)
	return poll(ctx, 20*time.Millisecond, fmt.Sprintf("the hand-written Envoy of node%d", node), func() (bool, error) {
		pid, err := r.lab.Process(node, program...)
		if err == nil {
			h.pids = append(h.pids, pid)
		}
		return err == nil, err
	})
}

// stop ends the Envoys; the lab would, at its end.
func (h *byHand) stop() error {
	errs := []error{os.RemoveAll(h.dir)}
	for _, pid := range h.pids {
		errs = append(errs, syscall.Kill(pid, syscall.SIGKILL))
	}
	for i, cmd := range h.cmds {
		if i < len(h.pids) {
			_ = cmd.Wait() // its error is the signal
		}
	}
	return errors.Join(errs...)
}

// netns is the path of a pod's network namespace on its node.
func (r *rig) netns(node int, pod string) (string, error) {
	dir, err := r.lab.File(node, pins)
	if err != nil {
		return "", err
	}
	notes, err := spool.Scan(dir)
	for _, e := range notes {
		if attached := e.Note.GetAttached(); attached.GetCniArgs()["K8S_POD_NAME"] == pod {
			return attached.GetNetns(), nil
		}
	}
	return "", errors.Join(fmt.Errorf("node%d has no pod %s", node, pod), err)
}
