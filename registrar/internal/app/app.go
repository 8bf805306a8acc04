// Package app reads flags, validates them, wires the packages together and runs
// them. It is the only importer of all; nothing below it reads a flag, the
// environment or a global.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Version is the release; the linker sets it.
var Version = "dev" //nolint:gochecknoglobals // set by -ldflags -X, never by code

// exitError ends the program with a status other than 1.
type exitError struct {
	status int
	err    error
}

// Error returns what is printed.
func (e exitError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e exitError) Unwrap() error { return e.err }

// Main runs the command line and returns the exit status: 0, or another with the
// error on stderr. That is 1 but where a command's help says otherwise.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cmd := newCommand(streams{out: stdout, err: stderr})
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	if err := cmd.ExecuteContext(ctx); err != nil {
		for line := range strings.Lines(err.Error()) { // a line for each of several errors
			fmt.Fprintf(stderr, "registrar: %s\n", strings.TrimSuffix(line, "\n"))
		}
		if e, ok := errors.AsType[exitError](err); ok {
			return e.status
		}
		return 1
	}
	return 0
}

// streams are the process's outputs.
type streams struct{ out, err io.Writer }

func newCommand(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:           "registrar",
		Short:         "the node's half of the Portolan mesh",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       Version,
		Args:          cobra.NoArgs,
		// A command that starts nothing must not look like success to a supervisor.
		RunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(cmd.Usage(), errors.New("a command is needed"))
		},
	}
	root.AddCommand(newRunCommand(s), newDNSCommand(s), newBootstrapCommand(s), newStatusCommand(s), newInstallCommand(s), newUninstallCommand(s), newSignerCommand(s), newVersionCommand(s))
	return root
}

func newVersionCommand(s streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(s.out, Version)
			return err
		},
	}
}

// newLogger returns a logger of the level named by text.
func newLogger(w io.Writer, text string) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(text)); err != nil {
		return nil, fmt.Errorf("--log-level %q: use debug, info, warn or error", text)
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})), nil
}

// ended returns nil for the errors that only say that the context was cancelled.
func ended(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
