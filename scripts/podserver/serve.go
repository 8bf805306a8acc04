package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/scripts/answer"
)

// drainTime bounds how long requests in flight may take after SIGTERM.
const drainTime = 5 * time.Second

// serveCommand runs the servers that its arguments list until the context ends.
// It prints one line for each server that began to listen.
func serveCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	name := flags.String("name", "pod", "name of the pod, part of every answer")
	container := flags.String("container", "", "name of the container, part of every answer")
	return func(ctx context.Context, args []string, stdout io.Writer) error {
		if len(args) == 0 {
			return usageError{errors.New("serve: want at least one protocol:port")}
		}
		specs := make([]listenSpec, len(args))
		for i, arg := range args {
			var err error
			if specs[i], err = parseListenSpec(arg); err != nil {
				return usageError{fmt.Errorf("serve: %w", err)}
			}
		}
		log := slog.New(slog.NewTextHandler(stdout, nil))
		group, ctx := errgroup.WithContext(ctx)
		for _, spec := range specs {
			group.Go(func() error {
				return serve(ctx, log, spec, answer.Origin{Pod: *name, Container: *container, Port: spec.number})
			})
		}
		return group.Wait()
	}
}

// serve waits for the server's delay, listens and serves until the context ends.
func serve(ctx context.Context, log *slog.Logger, spec listenSpec, from answer.Origin) error {
	if !sleep(ctx, spec.delay) {
		return nil
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", spec.address())
	if err != nil {
		return fmt.Errorf("listen on %s: %w", spec.address(), err)
	}
	log.Info("listening", "protocol", spec.protocol.String(), "address", listener.Addr().String())
	if spec.protocol == port.TCP {
		return serveTCP(ctx, log, listener, from)
	}
	server := &http.Server{
		Handler:           newHTTPHandler(log, spec.protocol, from),
		Protocols:         new(http.Protocols),
		ReadHeaderTimeout: 30 * time.Second,
	}
	// An http port speaks HTTP/1.1 and h2c; an h2 port nothing but h2c, so that
	// a request which arrives there as HTTP/1.1 is seen to fail.
	server.Protocols.SetUnencryptedHTTP2(true)
	server.Protocols.SetHTTP1(spec.protocol == port.HTTP)
	stopped := context.AfterFunc(ctx, func() {
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		_ = server.Shutdown(drain)
	})
	defer stopped()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", spec.address(), err)
	}
	return nil
}

// sleep reports whether it slept for all of d.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
