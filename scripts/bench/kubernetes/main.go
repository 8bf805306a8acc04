package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/lab"
)

// program is how this one calls itself, and its target of make.
const program = "bench-kubernetes"

// rows are in the order of the table. The first one wants a lab without the mesh.
func rows() []measure.Row[*rig] {
	return []measure.Row[*rig]{
		{Name: "pods", Measure: podLives},
		{Name: "ready", Measure: readyToEnvoy},
		{Name: "traffic", Measure: requests},
		{Name: "write", Measure: writeToAnswer},
		{Name: "many", Measure: manyEndpoints},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	selection := measure.Flags(rows())
	flag.Parse()
	err := run(ctx, *selection)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		if !lab.Inside() {
			fmt.Fprintln(os.Stderr, program+": interrupted; everything it made is gone")
		}
		os.Exit(130)
	default:
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s measure.Selection) error {
	chosen, err := measure.Choose(s, rows())
	if err != nil {
		return err
	}
	l, err := lab.Open(".", "/tmp/portolan-bench", 2, os.Stderr)
	if err != nil {
		return err
	}
	if !lab.Inside() {
		return l.Host(ctx, false, func(context.Context) error { return nil })
	}
	r, err := newRig(ctx, l)
	if err != nil {
		return err
	}
	figures, err := measure.Run(ctx, program, os.Stdout, r, chosen)
	if err != nil {
		if ctx.Err() == nil {
			l.Dump(ctx, program, "failed")
		}
		return err
	}
	if s.Readme == "" {
		return nil
	}
	return measure.WriteTable(s.Readme, program, figures)
}
