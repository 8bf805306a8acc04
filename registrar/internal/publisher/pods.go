package publisher

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/authority"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// localPod is one pod and the cache keys of its resources.
type localPod struct {
	pod       model.Pod
	listeners []cache.Key
	clusters  []cache.Key
	// failed says why the listeners could not be built.
	failed error
}

// AddPod builds the pod's app clusters and listeners, in the place of those that it
// had. Its identity's secrets must have been set before.
func (p *Publisher) AddPod(pod model.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := newBatch()
	lp := localPod{pod: pod}
	if err := p.buildPod(b, &lp); err != nil {
		p.log.Error("listeners of a pod cannot be built", "attachment", pod.Key.String(), "error", err)
		b, lp = newBatch(), localPod{pod: pod, failed: err}
	}
	// A second call with other ports leaves nothing of the first behind.
	old := p.pods[pod.Key]
	for _, k := range slices.Concat(old.listeners, old.clusters) {
		if !slices.Contains(lp.clusters, k) && !slices.Contains(lp.listeners, k) {
			b.remove(k)
		}
	}
	p.pods[pod.Key] = lp
	p.warm(b, pod)
	p.applyBatch(b)
}

func (p *Publisher) buildPod(b *batch, lp *localPod) error {
	rp := p.resourcePod(lp.pod)
	for _, pt := range rp.Ports {
		c, err := resource.AppCluster(rp, pt)
		if err != nil {
			return err
		}
		p.set(b, cache.WildcardCluster, c.GetName(), c)
		lp.clusters = append(lp.clusters, cache.Key{Kind: cache.WildcardCluster, Name: c.GetName()})
	}
	if len(rp.Ports) > 0 {
		l, err := resource.Inbound(rp)
		if err != nil {
			return err
		}
		p.set(b, cache.Listener, l.GetName(), l)
		lp.listeners = append(lp.listeners, cache.Key{Kind: cache.Listener, Name: l.GetName()})
	}
	http, err := resource.OutboundHTTP(rp)
	if err != nil {
		return err
	}
	tcp, err := resource.OutboundTCP(rp)
	if err != nil {
		return err
	}
	p.set(b, cache.Listener, http.GetName(), http)
	p.set(b, cache.Listener, tcp.GetName(), tcp)
	lp.listeners = append(lp.listeners,
		cache.Key{Kind: cache.Listener, Name: http.GetName()}, cache.Key{Kind: cache.Listener, Name: tcp.GetName()})
	return nil
}

// resourcePod says of a pod what Envoy must know. Ports of a protocol that this
// version does not know are not routable and have no chain.
func (p *Publisher) resourcePod(pod model.Pod) resource.Pod {
	long := authority.Authority{Service: pod.Service.Name, Namespace: pod.Service.Namespace}
	names := []string{long.HostPort(p.cfg.Domain)}
	if slices.Contains(p.cfg.FlatNamespaces, pod.Service.Namespace) {
		flat := authority.Authority{Service: pod.Service.Name}
		names = append(names, flat.HostPort(p.cfg.Domain))
	}
	rp := resource.Pod{
		ID: pod.Key.String(), Netns: pod.Netns, Identity: pod.Identity, Service: pod.Service, OwnNames: names,
		Domain: p.cfg.Domain, Default: pod.Default, IPv6: pod.IPv6(), VIPRanges: p.cfg.VIPRanges,
	}
	for _, pt := range pod.Ports {
		if pt.Protocol.Class() != port.ClassNone {
			rp.Ports = append(rp.Ports, pt)
		}
	}
	return rp
}

// RemovePod takes the pod's listeners away, and its clusters once Envoy no longer
// has the listeners; the cache keeps that order (XDS-R14).
func (p *Publisher) RemovePod(key model.AttachmentKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lp, ok := p.pods[key]
	if !ok {
		return
	}
	delete(p.pods, key)
	b := newBatch()
	b.remove(lp.listeners...)
	b.remove(lp.clusters...)
	p.applyBatch(b)
}

// warm gives the pod's declared upstreams, as far as they exist by now.
func (p *Publisher) warm(b *batch, pod model.Pod) {
	for _, ref := range pod.Upstreams {
		for _, name := range p.engine.UpstreamClusters(ref, pod.Service.Namespace) {
			g, given := p.given[name]
			if (!given || g.kind == cache.Endpoints) && !p.cache.Subscribed(cache.Key{Kind: cache.OnDemandCluster, Name: name}) {
				p.give(b, name, cache.WildcardCluster)
			}
		}
	}
}

func (p *Publisher) pod(key model.AttachmentKey) (localPod, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lp, ok := p.pods[key]
	if !ok {
		return localPod{}, fmt.Errorf("attachment %s was removed meanwhile", key)
	}
	return lp, nil
}

// AwaitListeners waits until Envoy acknowledged the pod's listeners and clusters.
func (p *Publisher) AwaitListeners(ctx context.Context, key model.AttachmentKey) error {
	lp, err := p.pod(key)
	if err != nil {
		return err
	}
	if lp.failed != nil {
		return lp.failed
	}
	keys := append(slices.Clone(lp.listeners), lp.clusters...)
	return p.awaitAcknowledged(ctx, keys, present)
}

// AwaitSecrets waits until Envoy acknowledged the certificates and the bundle that
// the pod's connections are made with, and those of its inbound listener if it has one.
func (p *Publisher) AwaitSecrets(ctx context.Context, key model.AttachmentKey) error {
	lp, err := p.pod(key)
	if err != nil {
		return err
	}
	names := []string{resource.OutboundSecret(lp.pod.Identity), resource.BundleSecret(p.cfg.TrustDomain)}
	if len(lp.clusters) > 0 {
		names = append(names, resource.InboundSecret(lp.pod.Identity))
	}
	keys := make([]cache.Key, 0, len(names))
	for _, name := range names {
		keys = append(keys, cache.Key{Kind: cache.Secret, Name: name})
	}
	return p.awaitAcknowledged(ctx, keys, subscribed)
}

// awaitMode says which streams an acknowledgement is awaited from.
type awaitMode bool

const (
	// present: those that subscribe to the key.
	present awaitMode = false
	// subscribed: every Envoy's; it will subscribe in a moment.
	subscribed awaitMode = true
)

// identifyPoll is how often it is looked whether an Envoy that answers nothing has
// begun to, or has gone.
const identifyPoll = 10 * time.Millisecond

// awaitAcknowledged waits for keys; the error names what is missing, or Envoy's
// reason for a rejection.
func (p *Publisher) awaitAcknowledged(ctx context.Context, keys []cache.Key, mode awaitMode) error {
	for {
		r, err := p.awaitOnce(ctx, keys, mode)
		switch {
		case err != nil:
			return err
		case len(r.Rejections) > 0:
			return fmt.Errorf("envoy rejected %s: %s", r.Rejections[0].Key, r.Rejections[0].Reason)
		case !r.Disconnected:
			return nil
		case p.Missing() != "":
			return fmt.Errorf("no Envoy is connected to %s any more", p.cfg.XDSSocket)
		}
		t := time.NewTimer(identifyPoll)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("the Envoy that is connected to %s answers nothing: look into its log, or start it again (%w)", p.cfg.XDSSocket, ctx.Err())
		}
	}
}

func (p *Publisher) awaitOnce(ctx context.Context, keys []cache.Key, mode awaitMode) (cache.Result, error) {
	await := p.cache.Await
	if mode == subscribed {
		await = p.cache.AwaitSubscribed
	}
	done := make(chan cache.Result, 1)
	cancel := await(keys, func(r cache.Result) { done <- r })
	defer cancel()
	select {
	case r := <-done:
		return r, nil
	case <-ctx.Done():
		var missing []string
		for _, o := range p.cache.Outstanding(keys, mode == subscribed) {
			missing = append(missing, o.String())
		}
		return cache.Result{}, fmt.Errorf("no acknowledgement from Envoy in time for %s: %w", strings.Join(missing, "; "), ctx.Err())
	}
}

// AwaitWithdrawn waits until the withdrawal of the endpoint reached this node's
// Envoy: the load assignments of its service that Envoy holds are acknowledged
// without it.
func (p *Publisher) AwaitWithdrawn(ctx context.Context, service model.ServiceKey, uid string) error {
	gone := make(chan struct{})
	p.mu.Lock()
	switch pc := p.pending[service]; {
	case p.engine.Has(uid):
		p.withdrawn[uid] = append(p.withdrawn[uid], withdrawal{service: service, gone: gone})
	case pc != nil:
		pc.waiters = append(pc.waiters, gone)
	default:
		close(gone)
	}
	p.mu.Unlock()
	select {
	case <-gone:
	case <-ctx.Done():
		return fmt.Errorf("withdrawal of %s has not come back from the registry: %w", uid, ctx.Err())
	}
	p.mu.Lock()
	var keys []cache.Key
	for name := range p.names[service] {
		if !p.given[name].tombstone {
			keys = append(keys, cache.Key{Kind: cache.Endpoints, Name: name})
		}
	}
	p.mu.Unlock()
	if len(keys) == 0 {
		return nil
	}
	return p.awaitAcknowledged(ctx, keys, present)
}

// TCPPorts returns the (VIP, port) pairs of raw TCP, sorted: what every pod's
// capture sends to the TCP listener. The caller must not change it.
func (p *Publisher) TCPPorts() []netip.AddrPort {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dns.tcpPorts()
}
