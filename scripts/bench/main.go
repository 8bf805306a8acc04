package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// rows are in the order of the table.
func rows() []measure.Row[*rig] {
	return []measure.Row[*rig]{
		{Name: "add", Measure: addAndDel},
		{Name: "parallel", Measure: addInParallel},
		{Name: "change", Measure: endpointChange},
		{Name: "memory", Measure: memoryPerEndpoint},
		{Name: "use", Measure: endpointChangeToEnvoy},
		{Name: "first", Measure: firstRequest},
		{Name: "traffic", Measure: requests},
		{Name: "envoy-memory", Measure: envoyMemory},
	}
}

func main() {
	os.Exit(sandbox.RunForCaller(inside))
}

func inside() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	bin := flag.String("bin", "bin", "folder with the binaries that make builds")
	envoy := flag.String("envoy", "", "another Envoy, 1.40 or later (default: the one in -bin)")
	selection := measure.Flags(rows())
	flag.Parse()
	err := run(ctx, os.Stdout, *bin, *envoy, *selection)
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "bench: interrupted; everything it made is gone")
		return 130
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
}

func run(ctx context.Context, out io.Writer, bin, envoy string, s measure.Selection) error {
	chosen, err := measure.Choose(s, rows())
	if err != nil {
		return err
	}
	if bin, err = filepath.Abs(bin); err != nil {
		return fmt.Errorf("find %s: %w", bin, err)
	}
	r, err := newRig(bin, envoy)
	if err != nil {
		return err
	}
	figures, err := measure.Run(ctx, "bench", out, r, chosen)
	if err := errors.Join(err, r.close(ctx)); err != nil {
		return err
	}
	if s.Readme == "" {
		return nil
	}
	return measure.WriteTable(s.Readme, "bench", figures)
}
