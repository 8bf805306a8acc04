package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// usageError is a call that the program did not understand; it exits 2.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program: its arguments, its two streams and its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := dispatch(ctx, args, stdout)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintln(stderr, "podserver:", err)
		return 2
	default:
		fmt.Fprintln(stderr, "podserver:", err)
		return 1
	}
}

func dispatch(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return usageError{errors.New("want a command: serve, get, grpc, tcp or lookup")}
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var command func(context.Context, []string, io.Writer) error
	switch args[0] {
	case "serve":
		command = serveCommand(flags)
	case "get":
		command = getCommand(flags)
	case "grpc":
		command = grpcCommand(flags)
	case "tcp":
		command = tcpCommand(flags)
	case "lookup":
		command = lookupCommand(flags)
	default:
		return usageError{fmt.Errorf("unknown command %q: want serve, get, grpc, tcp or lookup", args[0])}
	}
	if err := flags.Parse(args[1:]); err != nil {
		return usageError{fmt.Errorf("%s: %w", args[0], err)}
	}
	return command(ctx, flags.Args(), stdout)
}

// printJSON writes v as one line.
func printJSON(w io.Writer, v any) error {
	return json.NewEncoder(w).Encode(v)
}
