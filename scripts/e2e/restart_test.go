package e2e

import (
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

// load sends requests from the pod for so long, in the background, and returns
// a function that waits for what came of them.
func load(t *testing.T, from *node.Pod, duration time.Duration, args ...string) func() answer.Tally {
	t.Helper()
	type result struct {
		tally answer.Tally
		err   error
	}
	done := make(chan result, 1)
	go func() {
		tally, err := from.Get(t.Context(), append([]string{"-duration", duration.String(), "-c", "2"}, args...)...)
		done <- result{tally, err}
	}()
	return func() answer.Tally {
		t.Helper()
		r := <-done
		if r.err != nil {
			t.Fatal(r.err)
		}
		return r.tally
	}
}

// A pod that is deleted under load is drained: with another pod of the service
// there, no request fails (contract 4.6, MESH-31).
func TestDeleteUnderLoad(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	going := addPod(t, n, multiPort("payments-2"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 2)
	finish := load(t, client, 4*time.Second, "http://payments.aether.internal/")
	time.Sleep(500 * time.Millisecond) // under load before and after
	// A runtime ends the containers first; kubelet's preStop is what gives the
	// mesh its time then. Standalone, DEL does both.
	if err := going.Del(t.Context()); err != nil {
		t.Fatal(err)
	}
	tally := finish()
	for got, count := range tally.Answers {
		if got != "200 payments-1:8080" && got != "200 payments-2:8080" {
			t.Errorf("%d x %s", count, got)
		}
	}
	if tally.Answers["200 payments-2:8080"] == 0 || tally.Answers["200 payments-1:8080"] == 0 {
		t.Errorf("answers %v: the load reached one pod only, which proves nothing", tally.Answers)
	}
}

// A port that is served anew mid-rollout is a 503 before the first pod serves
// it, then a 200; no request is reset or reaches a pod without it (contract
// section 5, new port mid-rollout).
func TestNewPortMidRollout(t *testing.T) {
	n := startNode(t, node.Options{})
	addPod(t, n, payments("payments-1", "8080", "http:8080", "http:9090"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	finish := load(t, client, 5*time.Second, "-keepalive=false", "http://payments.aether.internal:9090/")
	time.Sleep(500 * time.Millisecond) // some requests before there is the port
	addPod(t, n, payments("payments-2", "8080,9090", "http:8080", "http:9090"))
	waitHealthy(t, n, 9090, 1)
	tally := finish()
	for got, count := range tally.Answers {
		if got != "503" && got != "200 payments-2:9090" {
			t.Errorf("%d x %s", count, got)
		}
	}
	if tally.Answers["503"] == 0 || tally.Answers["200 payments-2:9090"] == 0 {
		t.Errorf("answers %v, want some of each: 503 and 200 payments-2:9090", tally.Answers)
	}
}
