package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

const (
	manyCount      = 10_000
	manyServices   = 500
	manySubscribed = 200
	manyChanges    = 2000
)

// manyEndpoints gives the registrars many endpoints of another node and looks at
// the reader's processes: before, with them at rest, and while they change.
func manyEndpoints(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	processes, err := r.processes(readerNode)
	if err != nil {
		return nil, err
	}
	few, err := processes.memory()
	if err != nil {
		return nil, err
	}
	f, err := r.newFleet(ctx, "many", manyCount, manyServices, 78)
	if err != nil {
		return nil, err
	}
	var c *course
	begun := time.Now()
	atOnce, err := processorTime(processes["registrar"], func() (err error) {
		c, err = r.start(ctx, f, manySubscribed)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	writeRate := manyCount / time.Since(begun).Seconds()
	ours, err := c.load(ctx, processes["registrar"])
	if err != nil {
		return nil, err
	}
	many, err := processes.memory()
	if err != nil {
		return nil, err
	}
	requests, err := r.requests(ctx)
	if err != nil {
		return nil, err
	}
	pilots, err := manyOfPilot(ctx, r)
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf(", %d endpoints, %.0f changes/s, %d of %d services asked for", manyCount, ours.rate, manySubscribed, manyServices)
	processor := processorFigure(what, ours, pilots)
	processor.Measured += fmt.Sprintf(" (%.2f s when they came at %.0f/s, as all were written)", atOnce.Seconds()/(manyCount/1000), writeRate)
	return []measure.Figure{
		ours.figure(what), addedFigure(what, ours, pilots), processor, memoryFigure(few["registrar"], ours, pilots), requested(few, many, requests),
	}, nil
}

// addedFigure is what the registrar and pilot add to the way through the API server.
func addedFigure(what string, ours, pilots load) measure.Figure {
	added, theirs := measure.Minus(ours.answer, ours.watch), measure.Minus(pilots.answer, pilots.watch)
	return measure.Figure{
		OK: measure.P50(added) <= measure.P50(theirs), What: "of that, what the registrar adds to a plain watch" + what,
		Measured: fmt.Sprintf("p50 %s, p99 %s", measure.Millis(measure.P50(added)), measure.Millis(measure.Quantile(added, 0.99))),
		Compared: fmt.Sprintf("Istio's pilot without its debounce (p50 %s, p99 %s; from the write of an EndpointSlice to its EDS answer p50 %s, p99 %s, to a plain watch p50 %s)",
			measure.Millis(measure.P50(theirs)), measure.Millis(measure.Quantile(theirs, 0.99)),
			measure.Millis(measure.P50(pilots.answer)), measure.Millis(measure.Quantile(pilots.answer, 0.99)), measure.Millis(measure.P50(pilots.watch))),
		Aim: "p50 not more than pilot",
	}
}

// processorFigure is for the time that changes took beyond that without them.
func processorFigure(what string, ours, pilots load) measure.Figure {
	return measure.Figure{
		OK: ours.each() < pilots.each(), What: "processor time of the registrar for 1,000 changes" + what,
		Measured: fmt.Sprintf("%.2f s", ours.each().Seconds()), Compared: fmt.Sprintf("Istio's pilot without its debounce (%.2f s)", pilots.each().Seconds()),
		Aim: "less than pilot",
	}
}

func memoryFigure(few int64, ours, pilots load) measure.Figure {
	return measure.Figure{
		OK: ours.memory < pilots.memory, What: fmt.Sprintf("resident memory of the registrar after that, %d endpoints with two ports", manyCount),
		Measured: fmt.Sprintf("%d MB", ours.memory>>20), Compared: fmt.Sprintf("Istio's pilot (%d MB); with few endpoints (%d MB)", pilots.memory>>20, few>>20), Aim: "less than pilot",
	}
}

// load is what changes at a pace cost a process.
type load struct {
	delays
	// used is its processor time with them, idle that in the same time without.
	used, idle time.Duration
	// rate is how many came in a second.
	rate   float64
	memory int64
}

// each is the processor time of a thousand changes.
func (l load) each() time.Duration { return (l.used - l.idle) / (manyChanges / 1000) }

func (c *course) load(ctx context.Context, pid int) (l load, err error) {
	l.idle, err = processorTime(pid, func() error { return pause(ctx, manyChanges*pace) })
	if err != nil {
		return l, err
	}
	begin := time.Now()
	l.used, err = processorTime(pid, func() (err error) {
		l.delays, err = c.changes(ctx, manyChanges)
		return err
	})
	if err != nil {
		return l, err
	}
	l.rate = manyChanges / time.Since(begin).Seconds()
	l.memory, err = measure.ResidentMemory(pid)
	return l, err
}

// changes writes so many changes at a pace, whatever becomes of those before, and
// follows those that arrive at the client.
func (c *course) changes(ctx context.Context, n int) (delays, error) {
	var mu sync.Mutex
	var all delays
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	endpoints, services := c.size()
	for i := range n {
		<-ticker.C
		group.Go(func() error {
			at := i * 7 % endpoints
			if at%services >= manySubscribed {
				write, _ := c.next(at)
				return write(ctx)
			}
			var one delays
			err := c.follow(ctx, at, &one)
			mu.Lock()
			defer mu.Unlock()
			all.answer, all.watch = append(all.answer, one.answer...), append(all.watch, one.watch...)
			return err
		})
	}
	err := group.Wait()
	return all, err
}

// processorTime is what a process uses while f runs.
func processorTime(pid int, f func() error) (time.Duration, error) {
	before, err := measure.ProcessorTime(pid)
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := measure.ProcessorTime(pid)
	return after - before, err
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
