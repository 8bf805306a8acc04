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
	"slices"
	"strings"
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

// command is one of podserver's.
type command struct {
	name, arguments, does string
	// define adds its flags and returns what runs it.
	define func(*flag.FlagSet) func(context.Context, []string, io.Writer) error
}

func commands() []command {
	return []command{
		{"serve", "PROTOCOL:PORT[,delay=3s][,bind=ADDRESS]...", "answer on ports of http, h2 or tcp", serveCommand},
		{"get", "URL...", "send HTTP requests and count the answers", getCommand},
		{"grpc", "HOST:PORT", "call the gRPC health service", grpcCommand},
		{"tcp", "HOST:PORT [LINE]", "read the banner, send a line and read it back", tcpCommand},
		{"lookup", "NAME", "ask the resolver of /etc/resolv.conf", lookupCommand},
	}
}

// wanted is what a call without a known command is told.
const wanted = "want serve, get, grpc, tcp or lookup; podserver --help says more"

func dispatch(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return usageError{errors.New(wanted)}
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		return help(stdout)
	}
	i := slices.IndexFunc(commands(), func(c command) bool { return c.name == args[0] })
	if i < 0 {
		return usageError{fmt.Errorf("unknown command %q: %s", args[0], wanted)}
	}
	chosen := commands()[i]
	flags := flag.NewFlagSet(chosen.name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	run := chosen.define(flags)
	switch err := flags.Parse(args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		return chosen.help(stdout, flags)
	case err != nil:
		return usageError{fmt.Errorf("%s: %w", chosen.name, err)}
	}
	return run(ctx, flags.Args(), stdout)
}

// help prints all commands.
func help(w io.Writer) error {
	var text strings.Builder
	text.WriteString("usage: podserver COMMAND [FLAGS] ARGUMENTS\n\n")
	for _, c := range commands() {
		fmt.Fprintf(&text, "  %s %s\n        %s\n", c.name, c.arguments, c.does)
	}
	text.WriteString("\npodserver COMMAND --help lists its flags.\n")
	_, err := io.WriteString(w, text.String())
	return err
}

// help prints one command with its flags.
func (c command) help(w io.Writer, flags *flag.FlagSet) error {
	var text strings.Builder
	fmt.Fprintf(&text, "usage: podserver %s [FLAGS] %s\n\n%s\n\n", c.name, c.arguments, c.does)
	flags.SetOutput(&text)
	flags.PrintDefaults()
	_, err := io.WriteString(w, text.String())
	return err
}

// printJSON writes v as one line.
func printJSON(w io.Writer, v any) error {
	return json.NewEncoder(w).Encode(v)
}
