package kubetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// kubectlCommand is kubectl as administrator.
func (c *cluster) kubectlCommand(ctx context.Context, args ...string) *exec.Cmd {
	return c.lab.Command(ctx, append([]string{
		filepath.Join(c.lab.Root, "bin/lab/hyperkube"), "kubectl", "--kubeconfig", filepath.Join(c.lab.Dir, "kubeconfig"),
	}, args...)...)
}

// nodeCommand is a command in a node.
func (c *cluster) nodeCommand(ctx context.Context, node string, args ...string) *exec.Cmd {
	return c.lab.Command(ctx, append([]string{c.lab.Script(), "node", strings.TrimPrefix(node, "node")}, args...)...)
}

// inNode runs a command in a node and returns its output.
func (c *cluster) inNode(t *testing.T, node string, args ...string) string {
	t.Helper()
	out, err := c.nodeCommand(t.Context(), node, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %s: %v: %s", node, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// inPod is a podserver command in a pod.
func (c *cluster) inPod(ctx context.Context, pod *corev1.Pod, args ...string) *exec.Cmd {
	return c.kubectlCommand(ctx, append([]string{
		"-n", pod.Namespace, "exec", "-i", pod.Name, "-c", pod.Spec.Containers[0].Name, "--", "/usr/local/bin/podserver",
	}, args...)...)
}

// podserver runs a podserver command in a pod and decodes what it prints into into.
func (c *cluster) podserver(t *testing.T, pod *corev1.Pod, into any, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := c.inPod(ctx, pod, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if decoding := json.Unmarshal(stdout.Bytes(), into); decoding != nil {
		t.Fatalf("podserver %s in %s: %v, %v: %s%s", strings.Join(args, " "), pod.Name, err, decoding, stdout.String(), stderr.String())
	}
}

// get runs `podserver get` in a pod.
func (c *cluster) get(t *testing.T, pod *corev1.Pod, args ...string) answer.Tally {
	t.Helper()
	var tally answer.Tally
	c.podserver(t, pod, &tally, append([]string{"get"}, args...)...)
	return tally
}

// load is a stream of requests out of a pod, from startLoad to stop.
type load struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	stdout bytes.Buffer
	stderr bytes.Buffer
}

// startLoad lets a pod send so many requests a second to the URLs in turn, until stop.
func (c *cluster) startLoad(t *testing.T, pod *corev1.Pod, rate int, urls ...string) *load {
	t.Helper()
	args := []string{"get", "-until-eof", "-c", "20", "-rate", fmt.Sprint(rate)}
	l := &load{name: pod.Name, cmd: c.inPod(t.Context(), pod, append(args, urls...)...)}
	l.cmd.Stdout, l.cmd.Stderr = &l.stdout, &l.stderr
	var err error
	if l.stdin, err = l.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.stdin.Close() })
	return l
}

// stop ends the load after the requests in flight, and returns what came of all.
func (l *load) stop(t *testing.T) answer.Tally {
	t.Helper()
	timer := time.AfterFunc(patience, func() { _ = l.cmd.Process.Kill() })
	defer timer.Stop()
	_ = l.stdin.Close()
	if err := l.cmd.Wait(); err != nil {
		t.Fatalf("load of %s: %v: %s", l.name, err, l.stderr.String())
	}
	var tally answer.Tally
	if err := json.Unmarshal(l.stdout.Bytes(), &tally); err != nil {
		t.Fatalf("load of %s: %v: %s", l.name, err, l.stdout.String())
	}
	if tally.Requests == 0 {
		t.Errorf("load of %s sent nothing", l.name)
	}
	return tally
}

// failed is how many requests had another answer than a 200 of a pod, and which.
func failed(tally answer.Tally) (count int, answers []string) {
	for got, n := range tally.Answers {
		if !strings.HasPrefix(got, "200 ") {
			count += n
			answers = append(answers, fmt.Sprintf("%d x %s", n, got))
		}
	}
	return count, answers
}
