package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

// addRounds is how often each chain is measured; parallelRounds the same for many
// pods at once.
const (
	addRounds      = 60
	parallelRounds = 8
	parallelPods   = 20
)

// meshed are the annotations of a pod with three ports.
func meshed() map[string]string {
	return map[string]string{"endpoint.aether.io/service": "bench", "endpoint.aether.io/ports": "8080,9090=h2,5432=tcp"}
}

// life is how long ADD and DEL of one pod took.
type life struct{ add, del time.Duration }

// lifeOf measures ADD and DEL of one pod in a network.
func lifeOf(n *network, annotations map[string]string) func(context.Context) (life, error) {
	return func(ctx context.Context) (life, error) {
		a, err := newAttachment(n, "bench", annotations)
		if err != nil {
			return life{}, err
		}
		var l life
		l.add, err = a.add(ctx)
		var delErr error
		l.del, delErr = a.del(context.WithoutCancel(ctx))
		return l, errors.Join(err, delErr, a.remove())
	}
}

// networks are the chains that are compared.
func networks(bin string) (bridge, withNoop, withPortolan *network, err error) {
	var errs [3]error
	bridge, errs[0] = newNetwork(bin)
	withNoop, errs[1] = newNetwork(bin, noop())
	withPortolan, errs[2] = newNetwork(bin, portolan())
	return bridge, withNoop, withPortolan, errors.Join(errs[:]...)
}

func addAndDel(ctx context.Context, r *rig) ([]measure.Figure, error) {
	if _, err := r.node(ctx); err != nil {
		return nil, err
	}
	bridge, withNoop, withPortolan, err := networks(r.bin)
	if err != nil {
		return nil, err
	}
	got, err := measure.Interleave(ctx, addRounds,
		measure.Variant[life]{Name: "bridge", Measure: lifeOf(bridge, nil)},
		measure.Variant[life]{Name: "bridge, no-op", Measure: lifeOf(withNoop, nil)},
		measure.Variant[life]{Name: "bridge, portolan, unmeshed", Measure: lifeOf(withPortolan, map[string]string{})},
		measure.Variant[life]{Name: "bridge, portolan, meshed", Measure: lifeOf(withPortolan, meshed())},
	)
	if err != nil {
		return nil, err
	}
	var adds, dels [4][]time.Duration
	for i, lives := range got {
		for _, l := range lives {
			adds[i], dels[i] = append(adds[i], l.add), append(dels[i], l.del)
		}
	}
	plain, noopAdds := measure.P50(adds[0]), measure.P50(measure.Minus(adds[1], adds[0]))
	unmeshed, mesh := measure.P50(measure.Minus(adds[2], adds[0])), measure.P50(measure.Minus(adds[3], adds[0]))
	plainDel, noopDel, meshDel := measure.P50(dels[0]), measure.P50(measure.Minus(dels[1], dels[0])), measure.P50(measure.Minus(dels[3], dels[0]))
	return []measure.Figure{
		{
			OK: measure.Ratio(unmeshed, noopAdds) <= 2.5, What: "ADD through libcni, pod not in the mesh",
			Measured: fmt.Sprintf("adds %.2fx what the no-op adds (+%s)", measure.Ratio(unmeshed, noopAdds), measure.Millis(unmeshed)),
			Compared: fmt.Sprintf("[bridge, no-op plugin] (+%s to [bridge], %s)", measure.Millis(noopAdds), measure.Millis(plain)), Aim: "<= 2.5x",
		},
		{
			OK: measure.Ratio(mesh, plain) <= 1.5, What: "ADD of a pod in the mesh, to proven listeners",
			Measured: fmt.Sprintf("adds %.2fx (+%s)", measure.Ratio(mesh, plain), measure.Millis(mesh)),
			Compared: fmt.Sprintf("[bridge] (%s)", measure.Millis(plain)), Aim: "adds <= 1.5x",
		},
		{
			OK: measure.Ratio(meshDel, plainDel) <= 0.25, What: "DEL of a pod in the mesh, without the wait for its drain",
			Measured: fmt.Sprintf("adds %.2fx (%+.3g ms)", measure.Ratio(meshDel, plainDel), float64(meshDel)/1e6),
			Compared: fmt.Sprintf("[bridge] (%s; the no-op plugin adds %+.3g ms)", measure.Millis(plainDel), float64(noopDel)/1e6), Aim: "adds <= 0.25x",
		},
	}, nil
}

// atOnce measures how long the ADDs of many pods take that begin together.
func atOnce(n *network, annotations map[string]string) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) {
		pods := make([]*attachment, parallelPods)
		for i := range pods {
			var err error
			if pods[i], err = newAttachment(n, fmt.Sprintf("bench-%d", i), annotations); err != nil {
				return 0, err
			}
		}
		errs := make([]error, len(pods))
		var group sync.WaitGroup
		begin := time.Now()
		for i, a := range pods {
			group.Go(func() { _, errs[i] = a.add(ctx) })
		}
		group.Wait()
		took := time.Since(begin)
		for i, a := range pods {
			group.Go(func() {
				_, err := a.del(context.WithoutCancel(ctx))
				errs[i] = errors.Join(errs[i], err, a.remove())
			})
		}
		group.Wait()
		return took, errors.Join(errs...)
	}
}

func addInParallel(ctx context.Context, r *rig) ([]measure.Figure, error) {
	if _, err := r.node(ctx); err != nil {
		return nil, err
	}
	bridge, _, withPortolan, err := networks(r.bin)
	if err != nil {
		return nil, err
	}
	got, err := measure.Interleave(ctx, parallelRounds,
		measure.Variant[time.Duration]{Name: "bridge", Measure: atOnce(bridge, nil)},
		measure.Variant[time.Duration]{Name: "bridge, portolan, meshed", Measure: atOnce(withPortolan, meshed())},
	)
	if err != nil {
		return nil, err
	}
	plain, mesh := measure.P50(got[0]), measure.P50(got[1])
	return []measure.Figure{{
		OK: measure.Ratio(mesh, plain) <= 2.5, What: fmt.Sprintf("%d ADDs at once, pods in the mesh, until the last one is proven", parallelPods),
		Measured: fmt.Sprintf("%.2fx (%s)", measure.Ratio(mesh, plain), measure.Millis(mesh)),
		Compared: fmt.Sprintf("[bridge] (%s)", measure.Millis(plain)), Aim: "<= 2.5x",
	}}, nil
}
