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
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// measurement gives one or more rows of the table.
type measurement struct {
	// name is what -rows calls it.
	name string
	run  func(context.Context, *rig) ([]figure, error)
}

// measurements are in the order of the table.
func measurements() []measurement {
	return []measurement{
		{"add", addAndDel},
		{"parallel", addInParallel},
		{"change", endpointChange},
		{"memory", memoryPerEndpoint},
		{"use", endpointChangeToEnvoy},
		{"first", firstRequest},
		{"traffic", traffic},
		{"envoy-memory", envoyMemory},
	}
}

func main() {
	os.Exit(sandbox.RunForCaller(inside))
}

func inside() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	var names []string
	for _, m := range measurements() {
		names = append(names, m.name)
	}
	bin := flag.String("bin", "bin", "folder with the binaries that make builds")
	envoy := flag.String("envoy", "", "another Envoy, 1.40 or later (default: the one in -bin)")
	rows := flag.String("rows", "", "measure only these, separated by commas: "+strings.Join(names, ", "))
	readme := flag.String("readme", "", "put the table into this file too")
	flag.Parse()
	err := run(ctx, os.Stdout, settings{bin: *bin, envoy: *envoy, rows: *rows, readme: *readme})
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

type settings struct {
	bin, envoy, rows, readme string
}

// selected are the measurements that rows names.
func selected(rows string) ([]measurement, error) {
	all := measurements()
	if rows == "" {
		return all, nil
	}
	var out []measurement
	for name := range strings.SplitSeq(rows, ",") {
		i := slices.IndexFunc(all, func(m measurement) bool { return m.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("-rows: there is no %q", name)
		}
		out = append(out, all[i])
	}
	return out, nil
}

func run(ctx context.Context, out io.Writer, s settings) error {
	chosen, err := selected(s.rows)
	if err != nil {
		return err
	}
	if s.readme != "" && s.rows != "" {
		return errors.New("-readme: the table there has all rows: leave -rows out")
	}
	bin, err := filepath.Abs(s.bin)
	if err != nil {
		return fmt.Errorf("find %s: %w", s.bin, err)
	}
	r, err := newRig(bin, s.envoy)
	if err != nil {
		return err
	}
	var figures []figure
	var errs []error
	for _, m := range chosen {
		begin := time.Now()
		fmt.Fprintf(os.Stderr, "bench: %s ...\n", m.name)
		got, err := m.run(ctx, r)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s could not be measured: %w", m.name, err))
		}
		for _, f := range got {
			f.print(out)
		}
		figures = append(figures, got...)
		fmt.Fprintf(os.Stderr, "bench: %s took %s\n", m.name, time.Since(begin).Round(100*time.Millisecond))
		if ctx.Err() != nil {
			break
		}
	}
	errs = append(errs, r.close(ctx))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if s.readme == "" {
		return nil
	}
	return writeTable(s.readme, markdown(figures, environment()))
}

// environment says on what the figures were taken.
func environment() string {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d cores, Linux %s, %s.", runtime.NumCPU(), unix.ByteSliceToString(uts.Release[:]), runtime.Version())
}
