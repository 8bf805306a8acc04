package publisher

import (
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

const (
	// stepRetry is when a step whose resources Envoy rejected is offered again.
	stepRetry = 5 * time.Second
	// An Envoy that is away may come back with what it had: a step is not taken
	// without it before stepGrace, looked at every stepPoll.
	stepGrace = 15 * time.Second
	stepPoll  = time.Second
)

// awaitedStep is one step of a service that waits for acknowledgements.
type awaitedStep struct {
	token  uint64
	since  time.Time
	cancel func()
}

// awaitStep waits for what the service's present step needs, if anything; the
// acknowledgement takes the next step (contract 2: each step after the previous
// one is acknowledged). The caller holds mu.
func (p *Publisher) awaitStep(key model.ServiceKey) {
	view, _ := p.engine.Shape(key)
	if a := p.awaited[key]; a != nil {
		if a.token == view.Token && len(view.Await) > 0 {
			return
		}
		a.cancel()
		delete(p.awaited, key)
	}
	if len(view.Await) == 0 {
		return
	}
	p.await(key, &awaitedStep{token: view.Token, since: p.cfg.Now()}, p.awaitKeys(view.Await))
}

func (p *Publisher) await(key model.ServiceKey, step *awaitedStep, keys []cache.Key) {
	p.awaited[key] = step
	step.cancel = p.cache.Await(keys, func(r cache.Result) { p.onStep(key, step, keys, r) })
}

// clusterKeys are the cache keys of a service's cluster, wherever it was given: Envoy has
// one of a name, and its removal from the one source may be on its way to an Envoy while
// the other source has it, or nobody but readers of its endpoints. What Envoy never had
// of a key is acknowledged at once.
func clusterKeys(name string) []cache.Key {
	return []cache.Key{{Kind: cache.WildcardCluster, Name: name}, {Kind: cache.OnDemandCluster, Name: name}}
}

// awaitKeys turns what a step awaits into cache keys. A cluster that Envoy does
// not hold counts as acknowledged.
func (p *Publisher) awaitKeys(awaits []projection.Await) []cache.Key {
	var keys []cache.Key
	for _, a := range awaits {
		switch a.Kind {
		case projection.AwaitRoutes:
			keys = append(keys, cache.Key{Kind: cache.Route, Name: resource.RoutesName})
		case projection.AwaitCluster:
			keys = append(keys, clusterKeys(a.Name)...)
		case projection.AwaitClusters:
			keys = append(keys, clusterKeys(a.Name)...)
			for _, kind := range []cache.Kind{cache.WildcardCluster, cache.OnDemandCluster} {
				keys = append(keys, p.cache.Unsettled(kind, a.Name+":")...)
			}
		case projection.AwaitEndpoints:
			if _, ok := p.given[a.Name]; ok {
				keys = append(keys, cache.Key{Kind: cache.Endpoints, Name: a.Name})
			}
		}
	}
	return keys
}

func (p *Publisher) onStep(key model.ServiceKey, step *awaitedStep, keys []cache.Key, r cache.Result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.awaited[key] != step {
		return
	}
	switch {
	case len(r.Rejections) > 0:
		p.log.Error("envoy rejected a step of a service; it is offered again", "service", key.String(), "reason", r.Rejections[0].Reason)
		p.retryLater(key, step, stepRetry, keys)
	case r.Disconnected && p.cfg.Now().Sub(step.since) < stepGrace:
		p.retryLater(key, step, stepPoll, nil)
	default:
		delete(p.awaited, key)
		if p.engine.Advance(key, step.token) {
			p.flush()
		}
	}
}

// retryLater awaits a step anew after d, and has resend sent again then.
func (p *Publisher) retryLater(key model.ServiceKey, step *awaitedStep, d time.Duration, resend []cache.Key) {
	t := time.AfterFunc(d, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.awaited[key] != step {
			return
		}
		if len(resend) > 0 {
			p.cache.Apply(cache.Batch{Resend: resend})
		}
		shape, _ := p.engine.Shape(key)
		p.await(key, step, p.awaitKeys(shape.Await))
	})
	step.cancel = func() { t.Stop() }
}
