package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/lab"
)

// containers of the mesh and how their programs are started.
func containers() map[string][]string {
	const registrar = "/usr/local/bin/registrar"
	return map[string][]string{
		"registrar": {registrar, "run"}, "dns": {registrar, "dns"}, "signer": {registrar, "signer"}, "envoy": {"/usr/local/bin/envoy"},
	}
}

// processes of the mesh on a node, by container.
type processes map[string]int

func (r *rig) processes(node int) (processes, error) {
	all := make(processes)
	for container, program := range containers() {
		pid, err := r.lab.Process(node, program...)
		if err != nil {
			return nil, err
		}
		all[container] = pid
	}
	return all, nil
}

// memory is what is resident of each.
func (p processes) memory() (map[string]int64, error) {
	all := make(map[string]int64)
	for container, pid := range p {
		var err error
		if all[container], err = measure.ResidentMemory(pid); err != nil {
			return nil, fmt.Errorf("%s: %w", container, err)
		}
	}
	return all, nil
}

// requests are how much memory the manifests ask for, by container.
func (r *rig) requests(ctx context.Context) (map[string]int64, error) {
	pods, err := r.client.CoreV1().Pods(lab.MeshNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	all := make(map[string]int64)
	for i := range pods.Items {
		for _, container := range pods.Items[i].Spec.Containers {
			request := container.Resources.Requests[corev1.ResourceMemory]
			all[container.Name] = request.Value()
		}
	}
	return all, nil
}

// requested compares what is resident, with few endpoints and with many, with what
// the manifests ask for.
func requested(few, many, requests map[string]int64) measure.Figure {
	ok := true
	var measured, asked []string
	for container := range containers() {
		ok = ok && many[container] <= requests[container]
		measured = append(measured, fmt.Sprintf("%s %d / %d", container, few[container]>>20, many[container]>>20))
		asked = append(asked, fmt.Sprintf("%s %d", container, requests[container]>>20))
	}
	slices.Sort(measured)
	slices.Sort(asked)
	return measure.Figure{
		OK: ok, What: fmt.Sprintf("resident memory with few / %d endpoints", manyCount), Measured: strings.Join(measured, ", ") + " MB",
		Compared: "the requests of registrar/deploy (" + strings.Join(asked, ", ") + " MB)", Aim: "not more than requested",
	}
}
