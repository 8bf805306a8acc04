package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
	"github.com/portolan-mesh/portolan/scripts/delta"
)

const (
	writeEndpoints = 100
	writeServices  = 10
	writeChanges   = 500
	// pace is the time from one change to the next.
	pace = 10 * time.Millisecond
	// writers write at once when many endpoints are written, burst is how many.
	writers = 16
	burst   = 500
)

// delays are how long changes took from their write on: to the other node's answer,
// and to a plain watch of the API server.
type delays struct{ answer, watch []time.Duration }

func (d delays) figure(what string) measure.Figure {
	p50, p99 := measure.P50(d.answer), measure.Quantile(d.answer, 0.99)
	return measure.Figure{
		OK: p50 <= 3*time.Millisecond && p99 <= 10*time.Millisecond, What: "ServiceEndpoint written -> the other node's registrar has it in an EDS answer" + what,
		Measured: fmt.Sprintf("p50 %s, p99 %s", measure.Millis(p50), measure.Millis(p99)),
		Compared: fmt.Sprintf("a plain watch of the API server (p50 %s, p99 %s); the registrar adds p50 %s", measure.Millis(measure.P50(d.watch)),
			measure.Millis(measure.Quantile(d.watch, 0.99)), measure.Millis(measure.P50(measure.Minus(d.answer, d.watch)))),
		Aim: "p50 <= 3 ms, p99 <= 10 ms",
	}
}

// source is where a mesh has its endpoints from.
type source interface {
	size() (endpoints, services int)
	// next is the next change of the i-th endpoint, which is of service i modulo
	// services: its write, and how it shows.
	next(i int) (write func(context.Context) error, ch change)
}

// course is a source whose changes are followed to both places.
type course struct {
	source
	answered, heard *arrivals
	stops           []func() error
}

// places are where changes arrive.
type places struct {
	// target is a server that is asked, as a node, for clusters.
	target, node string
	clusters     []string
	// path is what of the API server is watched, and changes are in each object there.
	path    string
	changes func(object json.RawMessage) []change
}

// attend follows a source that is written.
func (r *rig) attend(ctx context.Context, s source, to places) (*course, error) {
	c := &course{source: s, answered: newArrivals(), heard: newArrivals()}
	client, err := subscribe(ctx, to.target, to.node, to.clusters, c.answered)
	if err != nil {
		return nil, err
	}
	c.stops = append(c.stops, client.Close)
	stop, err := r.follow(ctx, to.path, to.changes, c.heard)
	if err != nil {
		return nil, errors.Join(err, c.stop())
	}
	c.stops = append(c.stops, stop)
	// Changes are taken in their order: who has the last one has all.
	if err := c.follow(ctx, 0, &delays{}); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

// start writes endpoints and follows them; subscribed says for how many of their services
// the reader's registrar is asked.
func (r *rig) start(ctx context.Context, f *fleet, subscribed int) (*course, error) {
	all := make([]int, len(f.endpoints))
	for i := range all {
		all[i] = i
	}
	// Before it is watched: the API server ends a watch that falls behind so many at once.
	if err := writeAll(ctx, f, all[1:]); err != nil {
		return nil, err
	}
	socket, err := r.lab.File(readerNode, "/run/portolan/xds/xds.sock")
	if err != nil {
		return nil, err
	}
	return r.attend(ctx, f, places{
		target: "unix://" + socket, node: delta.Watcher, clusters: f.clusters(subscribed), path: endpointsPath, changes: changesOfEndpoint,
	})
}

func changesOfEndpoint(object json.RawMessage) []change {
	var ep v1alpha1.ServiceEndpoint
	if json.Unmarshal(object, &ep) != nil {
		return nil // what is waited for does not come
	}
	return []change{changeOf(&ep)}
}

func (c *course) stop() error {
	var err error
	for _, stop := range c.stops {
		err = errors.Join(err, stop())
	}
	return err
}

// writeAll writes the next change of endpoints, many at once.
func writeAll(ctx context.Context, s source, endpoints []int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	for _, i := range endpoints {
		write, _ := s.next(i)
		group.Go(func() error { return write(ctx) })
	}
	return group.Wait()
}

// follow writes the next change of an endpoint of a subscribed service and adds how
// long it took to arrive.
func (c *course) follow(ctx context.Context, i int, to *delays) error {
	write, ch := c.next(i)
	answered, heard := c.answered.expect(ch), c.heard.expect(ch)
	begin := time.Now()
	if err := write(ctx); err != nil {
		return err
	}
	answer, err := wait(ctx, "the client of load assignments", answered)
	if err != nil {
		return err
	}
	watch, err := wait(ctx, "the watch", heard)
	if err != nil {
		return err
	}
	to.answer, to.watch = append(to.answer, answer.Sub(begin)), append(to.watch, watch.Sub(begin))
	return nil
}

// writeToAnswer measures single changes, and a burst of them.
func writeToAnswer(ctx context.Context, r *rig) (_ []measure.Figure, err error) {
	if err := r.mesh(ctx); err != nil {
		return nil, err
	}
	f, err := r.newFleet(ctx, "few", writeEndpoints, writeServices, 77)
	if err != nil {
		return nil, err
	}
	c, err := r.start(ctx, f, writeServices)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	var d delays
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	for i := range writeChanges {
		<-ticker.C
		if err := c.follow(ctx, i%writeEndpoints, &d); err != nil {
			return nil, err
		}
	}
	before := c.answered.count()
	one := make([]int, burst)
	for i := range one {
		one[i] = i * writeServices % writeEndpoints // all of one service
	}
	if err := errors.Join(writeAll(ctx, c, one), c.follow(ctx, 0, &delays{})); err != nil {
		return nil, err
	}
	figure := d.figure(", one change at a time")
	figure.Measured += fmt.Sprintf("; a burst of %d came in %d answers", burst, c.answered.count()-before)
	return []measure.Figure{figure}, nil
}
