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
	pod, err := r.owner(ctx, "many")
	if err != nil {
		return nil, err
	}
	var c *course
	begun := time.Now()
	atOnce, err := processorTime(processes["registrar"], func() (err error) {
		c, err = r.start(ctx, newFleet("many", manyCount, manyServices, 78, pod), manySubscribed)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	writeRate := manyCount / time.Since(begun).Seconds()
	idle, err := processorTime(processes["registrar"], func() error { return pause(ctx, manyChanges*pace) })
	if err != nil {
		return nil, err
	}
	var d delays
	begin := time.Now()
	used, err := processorTime(processes["registrar"], func() (err error) {
		d, err = c.changes(ctx, manyChanges)
		return err
	})
	if err != nil {
		return nil, err
	}
	rate := manyChanges / time.Since(begin).Seconds()
	many, err := processes.memory()
	if err != nil {
		return nil, err
	}
	requests, err := r.requests(ctx)
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf(", %d endpoints, %.0f changes/s, %d of %d services asked for", manyCount, rate, manySubscribed, manyServices)
	return []measure.Figure{
		d.figure(what), processorFigure(what, used, idle, atOnce, writeRate), memoryFigure(few["registrar"], many["registrar"]), requested(few, many, requests),
	}, nil
}

// processorFigure is for so much time used with the changes, in the same time without
// them, and for the first writes of all.
func processorFigure(what string, used, idle, atOnce time.Duration, writeRate float64) measure.Figure {
	const thousands = manyChanges / 1000
	each := (used - idle).Seconds() / thousands
	return measure.Figure{
		OK: each < 0.4, What: "processor time of the registrar for 1,000 changes" + what,
		Measured: fmt.Sprintf("%.2f s (and %.2f s in the same time without changes; %.2f s when they came at %.0f/s, as all were written)",
			each, idle.Seconds()/thousands, atOnce.Seconds()/(manyCount/1000), writeRate),
		Aim: "< 0.4 s (Istio's pilot: 0.4-0.7 s)",
	}
}

func memoryFigure(few, many int64) measure.Figure {
	return measure.Figure{
		OK: many < 110<<20, What: fmt.Sprintf("resident memory of the registrar after that, %d endpoints with two ports", manyCount),
		Measured: fmt.Sprintf("%d MB", many>>20), Compared: fmt.Sprintf("few endpoints (%d MB)", few>>20), Aim: "< 110 MB (Istio's pilot: 110-130 MB)",
	}
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
	for i := range n {
		<-ticker.C
		group.Go(func() error {
			at := i * 7 % len(c.endpoints)
			if at%c.services >= manySubscribed {
				ep, _ := c.next(at)
				return c.registrar.apply(ctx, ep)
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
