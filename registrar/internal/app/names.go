package app

import (
	"context"
	"log/slog"
	"net/netip"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
)

// meshNames implements attach.Names and publisher.Names over the mesh DNS client.
type meshNames struct {
	client *dns.Client
	socket string
	log    *slog.Logger
}

// Missing implements attach.Names.
func (n meshNames) Missing() string {
	if n.client.Connected() {
		return ""
	}
	return "mesh DNS is not connected at " + n.socket + ": start `registrar dns`, or look into its log"
}

// SetNames implements publisher.Names.
func (n meshNames) SetNames(names map[string]publisher.Address) {
	vips := make(map[string]dns.VIP, len(names))
	for name, a := range names {
		vips[name] = dns.VIP{V4: a.V4, V6: a.V6}
	}
	if err := n.client.SetNames(vips); err != nil {
		n.log.Error("mesh DNS refuses a name", "error", err)
	}
}

// SetPod implements attach.Names.
func (n meshNames) SetPod(pod model.Pod) {
	if err := n.client.SetPod(dnsPod(pod)); err != nil {
		n.log.Error("mesh DNS refuses a pod", "attachment", pod.Key.String(), "error", err)
	}
}

// RemovePod implements attach.Names.
func (n meshNames) RemovePod(key model.AttachmentKey) { n.client.RemovePod(key) }

// AwaitPod implements attach.Names.
func (n meshNames) AwaitPod(ctx context.Context, key model.AttachmentKey) error {
	return n.client.AwaitPod(ctx, key)
}

// setPods says which pods there are after a restart; only then is the client
// complete.
func (n meshNames) setPods(pods []model.Pod) error {
	out := make([]dns.Pod, 0, len(pods))
	for _, p := range pods {
		out = append(out, dnsPod(p))
	}
	return n.client.SetPods(out)
}

// maxUpstreams is how many resolvers api/dns/v1 takes for a pod; no client asks more.
const maxUpstreams = dnsv1.MaxUpstreams

func dnsPod(pod model.Pod) dns.Pod {
	out := dns.Pod{Key: pod.Key, Netns: pod.Netns, IPv6: pod.IPv6(), Disabled: !pod.MeshDNS()}
	for _, a := range pod.DNSServers[:min(len(pod.DNSServers), maxUpstreams)] {
		out.Upstreams = append(out.Upstreams, netip.AddrPortFrom(a, 53))
	}
	return out
}
