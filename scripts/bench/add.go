package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
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

func addAndDel(ctx context.Context, r *rig) ([]figure, error) {
	if _, err := r.node(ctx); err != nil {
		return nil, err
	}
	bridge, withNoop, withPortolan, err := networks(r.bin)
	if err != nil {
		return nil, err
	}
	got, err := interleave(ctx, addRounds,
		variant[life]{"bridge", lifeOf(bridge, nil)},
		variant[life]{"bridge, no-op", lifeOf(withNoop, nil)},
		variant[life]{"bridge, portolan, unmeshed", lifeOf(withPortolan, map[string]string{})},
		variant[life]{"bridge, portolan, meshed", lifeOf(withPortolan, meshed())},
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
	plain, noopAdds := p50(adds[0]), p50(minus(adds[1], adds[0]))
	unmeshed, mesh := p50(minus(adds[2], adds[0])), p50(minus(adds[3], adds[0]))
	plainDel, noopDel, meshDel := p50(dels[0]), p50(minus(dels[1], dels[0])), p50(minus(dels[3], dels[0]))
	return []figure{
		{
			ok: ratio(unmeshed, noopAdds) <= 2.5, what: "ADD through libcni, pod not in the mesh",
			measured: fmt.Sprintf("adds %.2fx what the no-op adds (+%s)", ratio(unmeshed, noopAdds), millis(unmeshed)),
			compared: fmt.Sprintf("[bridge, no-op plugin] (+%s to [bridge], %s)", millis(noopAdds), millis(plain)), aim: "<= 2.5x",
		},
		{
			ok: ratio(mesh, plain) <= 1.5, what: "ADD of a pod in the mesh, to proven listeners",
			measured: fmt.Sprintf("adds %.2fx (+%s)", ratio(mesh, plain), millis(mesh)),
			compared: fmt.Sprintf("[bridge] (%s)", millis(plain)), aim: "adds <= 1.5x",
		},
		{
			ok: ratio(meshDel, plainDel) <= 0.25, what: "DEL of a pod in the mesh, without the wait for its drain",
			measured: fmt.Sprintf("adds %.2fx (%+.3g ms)", ratio(meshDel, plainDel), float64(meshDel)/1e6),
			compared: fmt.Sprintf("[bridge] (%s; the no-op plugin adds %+.3g ms)", millis(plainDel), float64(noopDel)/1e6), aim: "adds <= 0.25x",
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

func addInParallel(ctx context.Context, r *rig) ([]figure, error) {
	if _, err := r.node(ctx); err != nil {
		return nil, err
	}
	bridge, _, withPortolan, err := networks(r.bin)
	if err != nil {
		return nil, err
	}
	got, err := interleave(ctx, parallelRounds,
		variant[time.Duration]{"bridge", atOnce(bridge, nil)},
		variant[time.Duration]{"bridge, portolan, meshed", atOnce(withPortolan, meshed())},
	)
	if err != nil {
		return nil, err
	}
	plain, mesh := p50(got[0]), p50(got[1])
	return []figure{{
		ok: ratio(mesh, plain) <= 2.5, what: fmt.Sprintf("%d ADDs at once, pods in the mesh, until the last one is proven", parallelPods),
		measured: fmt.Sprintf("%.2fx (%s)", ratio(mesh, plain), millis(mesh)),
		compared: fmt.Sprintf("[bridge] (%s)", millis(plain)), aim: "<= 2.5x",
	}}, nil
}
