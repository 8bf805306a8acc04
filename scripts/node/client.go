package node

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// Reply is an HTTP answer as curl saw it.
type Reply struct {
	// Status is the HTTP status.
	Status int
	// Took is the time from curl's start to the end of the answer.
	Took time.Duration
	// Echo is what the pod that answered says; zero when no pod answered.
	Echo answer.Echo
}

// String returns "200 payments-1:8080", or "503" for an answer of no pod.
func (r Reply) String() string {
	return strings.TrimSpace(fmt.Sprintf("%d %s", r.Status, r.Echo.Origin))
}

// Curl runs curl inside the pod with these arguments.
func (p *Pod) Curl(ctx context.Context, args ...string) (Reply, error) {
	argv := append([]string{"curl", "-sS", "--max-time", "20", "-w", "\n%{http_code} %{time_total}"}, args...)
	out, err := p.Exec(ctx, argv...)
	if err != nil {
		return Reply{}, err
	}
	at := strings.LastIndexByte(out, '\n')
	var reply Reply
	var seconds float64
	if _, err := fmt.Sscanf(out[at+1:], "%d %g", &reply.Status, &seconds); err != nil {
		return Reply{}, fmt.Errorf("read what curl printed, %q: %w", out, err)
	}
	reply.Took = time.Duration(seconds * float64(time.Second))
	// Envoy's own answers have no JSON body.
	if json.Unmarshal([]byte(out[:at]), &reply.Echo) != nil {
		reply.Echo = answer.Echo{}
	}
	return reply, nil
}

// Get sends requests by `podserver get` with these arguments.
func (p *Pod) Get(ctx context.Context, args ...string) (answer.Tally, error) {
	var tally answer.Tally
	err := p.ask(ctx, &tally, "get", args...)
	return tally, err
}

// GRPC calls the health service at target (host:port) by grpc-go.
func (p *Pod) GRPC(ctx context.Context, target string) (answer.GRPC, error) {
	var got answer.GRPC
	err := p.ask(ctx, &got, "grpc", target)
	return got, err
}

// TCP speaks podserver's raw TCP protocol by `podserver tcp` with these arguments.
func (p *Pod) TCP(ctx context.Context, args ...string) (answer.TCP, error) {
	var got answer.TCP
	err := p.ask(ctx, &got, "tcp", args...)
	return got, err
}

// Lookup asks the pod's resolver by `podserver lookup` with these arguments.
func (p *Pod) Lookup(ctx context.Context, args ...string) (answer.DNS, error) {
	var got answer.DNS
	err := p.ask(ctx, &got, "lookup", args...)
	return got, err
}

func (p *Pod) ask(ctx context.Context, into any, command string, args ...string) error {
	out, err := p.Podserver(ctx, append([]string{command}, args...)...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), into); err != nil {
		return fmt.Errorf("read what podserver %s printed, %q: %w", command, out, err)
	}
	return nil
}
