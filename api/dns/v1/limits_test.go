package dnsv1_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/api/limit"
)

func attachment(i int) *cniv1.Attachment {
	return &cniv1.Attachment{ContainerId: fmt.Sprintf("c%d", i), Ifname: "eth0"}
}

// full is a valid first message.
func full() *dnsv1.SyncRequest {
	return &dnsv1.SyncRequest{
		Session: 7, Revision: 1, Full: true,
		Settings: &dnsv1.Settings{MeshDomain: "aether.internal", Upstreams: []string{"10.0.0.53:53", "[fd00::53%eth0]:53"}},
		SetNames: []*dnsv1.Name{
			{Name: "payments.aether.internal", Vip4: "198.18.0.1", Vip6: "fd70:6f72:746f::1"},
			{Name: "_x.partner.example", Vip6: "fd70:6f72:746f::2"},
		},
		SetPods: []*dnsv1.Pod{{Attachment: attachment(1), Netns: "/run/portolan/netns/c1-eth0", Ipv6: true, Upstreams: []string{"127.0.0.53:53"}}},
	}
}

// Every limit that dns.proto states is checked, and the error names field,
// value or length, and limit.
func TestSyncRequestValidate(t *testing.T) {
	names := func(n int) (out []*dnsv1.Name) {
		for i := range n {
			out = append(out, &dnsv1.Name{Name: fmt.Sprintf("s%d.aether.internal", i), Vip4: "198.18.0.1"})
		}
		return out
	}
	label := strings.Repeat("a", 63)
	for _, tc := range []struct {
		name   string
		change func(*dnsv1.SyncRequest)
		want   string
	}{
		{name: "valid", change: func(*dnsv1.SyncRequest) {}},
		{name: "longest name", change: func(m *dnsv1.SyncRequest) {
			m.SetNames[0].Name = strings.Join([]string{label, label, label, strings.Repeat("a", 61)}, ".")
		}},
		{name: "most names", change: func(m *dnsv1.SyncRequest) { m.SetNames = names(dnsv1.MaxChunkNames) }},
		{name: "a change", change: func(m *dnsv1.SyncRequest) {
			m.Full, m.Settings, m.RemoveNames, m.RemovePods = false, nil, []string{"a.b"}, []*cniv1.Attachment{attachment(2)}
		}},

		{name: "no revision", change: func(m *dnsv1.SyncRequest) { m.Revision = 0 }, want: "revision: is 0"},
		{name: "full removes names", change: func(m *dnsv1.SyncRequest) { m.RemoveNames = []string{"a.b"} }, want: "full: is true although the message removes something"},
		{name: "full removes pods", change: func(m *dnsv1.SyncRequest) { m.RemovePods = []*cniv1.Attachment{attachment(1)} }, want: "full: is true although"},
		{name: "domain", change: func(m *dnsv1.SyncRequest) { m.Settings.MeshDomain = "Aether.internal" }, want: `settings.mesh_domain: mesh domain "Aether.internal": "Aether" is no DNS label`},
		{name: "no domain", change: func(m *dnsv1.SyncRequest) { m.Settings.MeshDomain = "" }, want: "settings.mesh_domain: mesh domain is empty"},
		{name: "upstream without port", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[1] = "10.0.0.53" }, want: `settings.upstreams[1]: "10.0.0.53" is no address:port`},
		{name: "upstream by name", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "dns.example:53" }, want: `settings.upstreams[0]: "dns.example:53" is no address:port`},
		{name: "upstream port 0", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "10.0.0.53:0" }, want: "is no address of a resolver"},
		{name: "upstream unspecified", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "0.0.0.0:53" }, want: "is no address of a resolver"},
		{name: "upstream multicast", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "[ff02::fb]:5353" }, want: "is no address of a resolver"},
		{name: "upstream is us", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "127.9.9.9:15053" }, want: "settings.upstreams[0]: \"127.9.9.9:15053\" is the mesh DNS itself; name the resolver behind it"},
		{name: "upstream is us, IPv6", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "[::1]:15053" }, want: "is the mesh DNS itself"},
		{name: "upstream is us, mapped", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "[::ffff:127.0.0.1]:15053" }, want: "is the mesh DNS itself"},
		{name: "upstream of a pod is us", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Upstreams[0] = "127.0.0.1:15053" }, want: "set_pods[0].upstreams[0]: \"127.0.0.1:15053\" is the mesh DNS itself"},
		{name: "upstream too long", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams[0] = "[fe80::1%" + strings.Repeat("e", 60) + "]:53" }, want: "settings.upstreams[0]: 73 bytes, at most 64 are allowed"},
		{name: "too many upstreams", change: func(m *dnsv1.SyncRequest) { m.Settings.Upstreams = make([]string, 9) }, want: "settings.upstreams: 9 entries, at most 8 are allowed"},
		{name: "too many names", change: func(m *dnsv1.SyncRequest) { m.SetNames = names(dnsv1.MaxChunkNames + 1) }, want: "set_names: 4097 entries, at most 4096 are allowed"},
		{name: "name too long", change: func(m *dnsv1.SyncRequest) {
			m.SetNames[0].Name = strings.Join([]string{label, label, label, strings.Repeat("a", 62)}, ".")
		}, want: "set_names[0].name: 254 bytes, at most 253 are allowed"},
		{name: "label too long", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = label + "a.b" }, want: "is no label of a host name"},
		{name: "one label", change: func(m *dnsv1.SyncRequest) { m.SetNames[1].Name = "localhost" }, want: `set_names[1].name: "localhost" has one label, two or more are needed`},
		{name: "trailing dot", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = "a.b." }, want: "is no label of a host name"},
		{name: "upper case", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = "A.b" }, want: "is no label of a host name"},
		{name: "hyphen at the end", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = "a-.b" }, want: "is no label of a host name"},
		{name: "empty name", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = "" }, want: "is no label of a host name"},
		{name: "no address", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip4, m.SetNames[0].Vip6 = "", "" }, want: `set_names[0].vip4: neither vip4 nor vip6 of "payments.aether.internal" is given`},
		{name: "wrong family", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip4 = "::1" }, want: "set_names[0].vip4: \"::1\" is of the wrong address family"},
		{name: "mapped address", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip6 = "::ffff:1.2.3.4" }, want: "is of the wrong address family"},
		{name: "loopback address", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip4 = "127.0.0.1" }, want: "is no address of a service"},
		{name: "zone", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip6 = "fe80::1%eth0" }, want: "is no IP address without zone"},
		{name: "address too long", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Vip6 = strings.Repeat("f", 40) }, want: "set_names[0].vip6: 40 bytes, at most 39 are allowed"},
		{name: "too many removed names", change: func(m *dnsv1.SyncRequest) { m.Full, m.RemoveNames = false, make([]string, 4097) }, want: "remove_names: 4097 entries, at most 4096 are allowed"},
		{name: "removed name", change: func(m *dnsv1.SyncRequest) { m.Full, m.RemoveNames = false, []string{"a.b", "x"} }, want: `remove_names[1]: "x" has one label`},
		{name: "too many pods", change: func(m *dnsv1.SyncRequest) { m.SetPods = make([]*dnsv1.Pod, 513) }, want: "set_pods: 513 entries, at most 512 are allowed"},
		{name: "no key", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Attachment = nil }, want: "set_pods[0].attachment: attachment: is missing"},
		{name: "bad key", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Attachment.ContainerId = "../x" }, want: "set_pods[0].attachment: attachment.container_id"},
		{name: "relative path", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Netns = "netns" }, want: `set_pods[0].netns: "netns" is no absolute path`},
		{name: "path with a zero byte", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Netns = "/a\x00b" }, want: "is no absolute path"},
		{name: "path too long", change: func(m *dnsv1.SyncRequest) { m.SetPods[0].Netns = "/" + strings.Repeat("a", 4096) }, want: "set_pods[0].netns: 4097 bytes, at most 4096 are allowed"},
		{name: "too many removed pods", change: func(m *dnsv1.SyncRequest) { m.Full, m.RemovePods = false, make([]*cniv1.Attachment, 4097) }, want: "remove_pods: 4097 entries, at most 4096 are allowed"},
		{name: "removed pod", change: func(m *dnsv1.SyncRequest) {
			m.Full, m.RemovePods = false, []*cniv1.Attachment{{ContainerId: "a", Ifname: "e/0"}}
		}, want: "remove_pods[0]: attachment.ifname"},
		{name: "message too large", change: func(m *dnsv1.SyncRequest) { m.SetNames[0].Name = strings.Repeat("a", 4<<20) }, want: "message: 4194"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := full()
			tc.change(m)
			checkError(t, m.Validate(), tc.want)
		})
	}
}

// A whole table obeys the limits of its entries, its totals, and has each key once.
func TestTableValidate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*dnsv1.Table)
		want   string
	}{
		{name: "valid", change: func(*dnsv1.Table) {}},
		{name: "no settings", change: func(m *dnsv1.Table) { m.Settings = nil }, want: "settings.mesh_domain: mesh domain is empty"},
		{name: "name", change: func(m *dnsv1.Table) { m.Names[1].Name = "x" }, want: "names[1].name"},
		{name: "name twice", change: func(m *dnsv1.Table) { m.GetNames()[1].Name = m.GetNames()[0].GetName() }, want: `names[1]: "payments.aether.internal" occurs twice`},
		{name: "too many names", change: func(m *dnsv1.Table) { m.Names = make([]*dnsv1.Name, dnsv1.MaxNames+1) }, want: "names: 262145 entries, at most 262144 are allowed"},
		{name: "pod", change: func(m *dnsv1.Table) { m.Pods[0].Netns = "" }, want: "pods[0].netns"},
		{name: "pod twice", change: func(m *dnsv1.Table) { m.Pods = append(m.Pods, m.GetPods()[0]) }, want: `pods[1]: "c1-eth0" occurs twice`},
		{name: "too many pods", change: func(m *dnsv1.Table) { m.Pods = make([]*dnsv1.Pod, dnsv1.MaxPods+1) }, want: "pods: 4097 entries, at most 4096 are allowed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := full()
			m := &dnsv1.Table{Settings: f.GetSettings(), Names: f.GetSetNames(), Pods: f.GetSetPods()}
			tc.change(m)
			checkError(t, m.Validate(), tc.want)
		})
	}
}

// What the server reports is bounded too: the client holds it in memory.
func TestSyncResponseValidate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*dnsv1.SyncResponse)
		want   string
	}{
		{name: "valid", change: func(*dnsv1.SyncResponse) {}},
		{name: "too many", change: func(m *dnsv1.SyncResponse) { m.Pods = make([]*dnsv1.PodStatus, 513) }, want: "pods: 513 entries, at most 512 are allowed"},
		{name: "key", change: func(m *dnsv1.SyncResponse) { m.Pods[0].Attachment = nil }, want: "pods[0].attachment: attachment: is missing"},
		{name: "error", change: func(m *dnsv1.SyncResponse) { m.Pods[0].Error = strings.Repeat("e", 513) }, want: "pods[0].error: 513 bytes, at most 512 are allowed"},
		{name: "capture error", change: func(m *dnsv1.SyncResponse) { m.Pods[0].CaptureError = strings.Repeat("e", 513) }, want: "pods[0].capture_error: 513 bytes, at most 512 are allowed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := &dnsv1.SyncResponse{Pods: []*dnsv1.PodStatus{{Attachment: attachment(1), State: dnsv1.PodState_POD_STATE_FAILED, Error: "why"}}}
			tc.change(m)
			checkError(t, m.Validate(), tc.want)
		})
	}
}

func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	var field *limit.FieldError
	if !errors.As(err, &field) || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want a *limit.FieldError with %q", err, want)
	}
}

// No bytes of a peer make the checks panic, and what passes them fits a message.
func FuzzSyncRequest(f *testing.F) {
	seed, err := proto.Marshal(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		m := &dnsv1.SyncRequest{}
		if proto.Unmarshal(data, m) != nil || m.Validate() != nil {
			return
		}
		if n := proto.Size(m); n > dnsv1.MaxMessage {
			t.Errorf("a message of %d bytes is valid", n)
		}
	})
}
