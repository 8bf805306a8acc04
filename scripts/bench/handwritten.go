package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/handwritten"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// byHand is an Envoy with a hand-written configuration.
type byHand struct{ cmd *exec.Cmd }

// startByHand starts it and waits until it answers.
func startByHand(ctx context.Context, r *rig, workers int, client, server *node.Pod) (*byHand, error) {
	dir := filepath.Join(logDir, "handwritten")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	path := filepath.Join(dir, "envoy.yaml")
	config := handwritten.Config{Dir: dir, ClientNetns: client.Netns, ServerNetns: server.Netns, ServerIP: server.IP()}
	if err := errors.Join(handwritten.WriteCertificates(dir), config.Write(path)); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "envoy.log"))
	if err != nil {
		return nil, fmt.Errorf("make a log: %w", err)
	}
	defer log.Close()                                                           // Envoy has its own descriptor
	cmd := exec.Command(r.envoyPath(), handwritten.Arguments(path, workers)...) //nolint:noctx // lives until stop
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the hand-written Envoy: %w", err)
	}
	h := &byHand{cmd: cmd}
	if err := h.await(ctx, client); err != nil {
		said, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("the hand-written Envoy does not answer: %w; it said:\n%s", err, said), h.stop())
	}
	return h, nil
}

// await polls until both ports answer.
func (h *byHand) await(ctx context.Context, client *node.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	for _, port := range []int{handwritten.HTTP1Port, handwritten.HTTP2Port} {
		args := []string{"--retry", "100", "--retry-delay", "1", "--retry-all-errors", "--fail", fmt.Sprintf("http://127.0.0.1:%d/", port)}
		if _, err := client.Curl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

func (h *byHand) stop() error {
	if err := h.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		return fmt.Errorf("end the hand-written Envoy: %w", err)
	}
	_ = h.cmd.Wait() // its error is the signal
	return nil
}
