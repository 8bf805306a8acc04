package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// grpcCommand calls grpc.health.v1.Health/Check -n times, each on a connection
// of its own, and prints one line for each call.
func grpcCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	calls := flags.Int("n", 1, "number of calls")
	timeout := flags.Duration("timeout", 10*time.Second, "time for each call")
	return func(ctx context.Context, args []string, stdout io.Writer) error {
		if len(args) != 1 {
			return usageError{errors.New("grpc: want one host:port")}
		}
		for range *calls {
			got, err := call(ctx, args[0], *timeout)
			if err != nil {
				return err
			}
			if err := printJSON(stdout, got); err != nil {
				return err
			}
		}
		return nil
	}
}

func call(ctx context.Context, target string, timeout time.Duration) (answer.GRPC, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return answer.GRPC{}, fmt.Errorf("dial %s: %w", target, err)
	}
	defer conn.Close()
	var header metadata.MD
	resp, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{}, grpc.Header(&header))
	first := func(key string) string { return strings.Join(header.Get(key), ",") }
	number, _ := strconv.ParseUint(first(headerPort), 10, 16) // 0 when no server answered
	return answer.GRPC{
		Code:      status.Code(err).String(),
		Message:   status.Convert(err).Message(),
		Health:    resp.GetStatus().String(),
		Origin:    answer.Origin{Pod: first(headerPod), Container: first(headerContainer), Port: uint16(number)},
		Authority: first(headerAuthority),
		XFCC:      first(headerXFCC),
	}, nil
}
