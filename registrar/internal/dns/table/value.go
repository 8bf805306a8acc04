package table

import (
	"fmt"
	"net/netip"
	"slices"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// VIP holds the addresses of one service; at least one is valid.
type VIP struct {
	// V4 is the answer to A.
	V4 netip.Addr
	// V6 is the answer to AAAA, in pods that have IPv6.
	V6 netip.Addr
}

// Settings hold for all pods.
type Settings struct {
	// Domain is the mesh domain, lower case, without a trailing dot.
	Domain string
	// Upstreams are the resolvers for every other name, the preferred one first.
	Upstreams []netip.AddrPort
}

// Equal compares every field.
func (s Settings) Equal(o Settings) bool {
	return s.Domain == o.Domain && slices.Equal(s.Upstreams, o.Upstreams)
}

// Message returns the wire form.
func (s Settings) Message() *dnsv1.Settings {
	return &dnsv1.Settings{MeshDomain: s.Domain, Upstreams: upstreamTexts(s.Upstreams)}
}

// Pod is one pod in whose network namespace DNS is served.
type Pod struct {
	// Key identifies the pod.
	Key model.AttachmentKey
	// Netns is the path of its network namespace.
	Netns string
	// IPv6 says that the pod has usable IPv6: [::1] is served, AAAA is answered.
	IPv6 bool
	// Upstreams replace Settings.Upstreams when there are any.
	Upstreams []netip.AddrPort
	// Disabled pods serve DNS themselves: nothing is opened, nothing captured.
	Disabled bool
}

// Equal compares every field.
func (p Pod) Equal(o Pod) bool {
	return p.Key == o.Key && p.Netns == o.Netns && p.IPv6 == o.IPv6 && p.Disabled == o.Disabled &&
		slices.Equal(p.Upstreams, o.Upstreams)
}

// Message returns the wire form.
func (p Pod) Message() *dnsv1.Pod {
	return &dnsv1.Pod{
		Attachment: KeyMessage(p.Key), Netns: p.Netns, Ipv6: p.IPv6,
		Upstreams: upstreamTexts(p.Upstreams), Disabled: p.Disabled,
	}
}

// KeyMessage returns the wire form of a key.
func KeyMessage(k model.AttachmentKey) *cniv1.Attachment {
	return &cniv1.Attachment{ContainerId: k.ContainerID, Ifname: k.IfName}
}

// NameMessage returns the wire form of one name.
func NameMessage(name string, vip VIP) *dnsv1.Name {
	return &dnsv1.Name{Name: name, Vip4: addrText(vip.V4), Vip6: addrText(vip.V6)}
}

func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func upstreamTexts(list []netip.AddrPort) []string {
	if len(list) == 0 {
		return nil
	}
	out := make([]string, len(list))
	for i, u := range list {
		out[i] = u.String()
	}
	return out
}

// settingsFrom, podFrom and vipFrom read messages that Validate accepted; the
// errors are for a caller that forgot to.
func settingsFrom(m *dnsv1.Settings) (Settings, error) {
	upstreams, err := upstreamsFrom(m.GetUpstreams())
	return Settings{Domain: m.GetMeshDomain(), Upstreams: upstreams}, err
}

func podFrom(m *dnsv1.Pod) (Pod, error) {
	upstreams, err := upstreamsFrom(m.GetUpstreams())
	return Pod{
		Key: model.KeyOf(m.GetAttachment()), Netns: m.GetNetns(), IPv6: m.GetIpv6(),
		Upstreams: upstreams, Disabled: m.GetDisabled(),
	}, err
}

func vipFrom(m *dnsv1.Name) (VIP, error) {
	v4, err := addrFrom(m.GetVip4())
	if err != nil {
		return VIP{}, fmt.Errorf("address of %s: %w", m.GetName(), err)
	}
	v6, err := addrFrom(m.GetVip6())
	if err != nil {
		return VIP{}, fmt.Errorf("address of %s: %w", m.GetName(), err)
	}
	return VIP{V4: v4, V6: v6}, nil
}

func addrFrom(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	return netip.ParseAddr(text)
}

func upstreamsFrom(list []string) ([]netip.AddrPort, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := make([]netip.AddrPort, 0, len(list))
	for _, text := range list {
		u, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, fmt.Errorf("upstream resolver: %w", err)
		}
		out = append(out, netip.AddrPortFrom(u.Addr().Unmap(), u.Port()))
	}
	return out, nil
}
