package table_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

func vip(n int) table.VIP {
	v6 := netip.MustParseAddr("fd70:6f72:746f::").As16()
	v6[13], v6[14], v6[15] = byte(n>>16), byte(n>>8), byte(n)
	return table.VIP{V4: netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)}), V6: netip.AddrFrom16(v6)}
}

func key(n int) model.AttachmentKey {
	return model.AttachmentKey{ContainerID: fmt.Sprintf("c%d", n), IfName: "eth0"}
}

func pod(n int) table.Pod { return table.Pod{Key: key(n), Netns: fmt.Sprintf("/run/netns/c%d", n)} }

func settings() *table.Settings {
	return &table.Settings{Domain: "aether.internal", Upstreams: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.53:53")}}
}

func apply(t *testing.T, tb *table.Table, c table.Change) []model.AttachmentKey {
	t.Helper()
	removed, err := tb.Apply(c)
	if err != nil {
		t.Fatal(err)
	}
	return removed
}

// lookup asks as a query does: by its bytes.
func lookup(t *testing.T, tb *table.Table, name string) (table.VIP, table.Kind) {
	t.Helper()
	raw := make([]byte, 300)
	n, err := dns.PackDomainName(dns.Fqdn(name), raw, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	var q table.QueryName
	if end, ok := q.Parse(raw[:n], 0); !ok || end != n {
		t.Fatalf("parse %q: end %d of %d, %t", name, end, n, ok)
	}
	return tb.Lookup(q.Bytes())
}

// Contract 2: what is a mesh name is exactly what the table has, whatever the
// case; the rest of the mesh domain does not exist, everything else is foreign.
// XDS-70: a name of a pod below a service is not the service. What pods make of a
// mesh name with their search list is foreign.
func TestLookup(t *testing.T) {
	tb := table.New()
	apply(t, tb, table.Change{
		Full: true, Settings: settings(),
		SetNames: map[string]table.VIP{
			"payments.aether.internal": vip(1), "payments.default.aether.internal": vip(1),
			"cart.shop.aether.internal": vip(2), "ratings.partner.example": vip(3),
		},
	})
	for _, tc := range []struct {
		name string
		want table.Kind
		vip  int
	}{
		{name: "payments.aether.internal", want: table.Known, vip: 1},
		{name: "PayMents.Aether.INTERNAL", want: table.Known, vip: 1},
		{name: "payments.default.aether.internal", want: table.Known, vip: 1},
		{name: "cart.shop.aether.internal", want: table.Known, vip: 2},
		{name: "ratings.partner.example", want: table.Known, vip: 3},
		{name: "cart.aether.internal", want: table.Unknown},
		{name: "ghost.aether.internal", want: table.Unknown},
		{name: "pod-0.payments.default.aether.internal", want: table.Unknown},
		{name: "pod-0.payments.aether.internal", want: table.Unknown},
		{name: "_grpc._tcp.payments.aether.internal", want: table.Unknown},
		{name: "default.aether.internal", want: table.Branch},
		{name: "shop.aether.internal", want: table.Branch},
		{name: "aether.internal", want: table.Apex},
		{name: "AETHER.internal", want: table.Apex},
		{name: "internal", want: table.Foreign},
		{name: ".", want: table.Foreign},
		{name: "example.com", want: table.Foreign},
		{name: "partner.example", want: table.Foreign},
		{name: "x.partner.example", want: table.Foreign},
		{name: "xaether.internal", want: table.Foreign},
		{name: `payments\.aether.internal`, want: table.Foreign},
		{name: `x\.aether.internal`, want: table.Foreign},
		{name: `x\006aether\008internal`, want: table.Foreign},
		{name: "payments.aether.internal.default.svc.cluster.local", want: table.Foreign},
		{name: "payments.aether.internal.com", want: table.Foreign},
	} {
		want := table.VIP{}
		if tc.want == table.Known {
			want = vip(tc.vip)
		}
		if got, kind := lookup(t, tb, tc.name); kind != tc.want || got != want {
			t.Errorf("%s: %v of kind %d, want %v of kind %d", tc.name, got, kind, want, tc.want)
		}
	}
}

// An empty table knows no domain: nothing is refused that might be somebody else's.
func TestLookupBeforeFirstTable(t *testing.T) {
	for _, name := range []string{".", "internal", "payments.aether.internal"} {
		if _, kind := lookup(t, table.New(), name); kind != table.Foreign {
			t.Errorf("%s: kind %d, want foreign", name, kind)
		}
	}
}

// A name that is cut off, too long or compressed is no name.
func TestQueryNameParse(t *testing.T) {
	label := "\x3f" + strings.Repeat("a", 63)
	for _, tc := range []struct {
		name, in string
		want     bool
		end      int
	}{
		{name: "root", in: "\x00", want: true, end: 1},
		{name: "labels", in: "\x01a\x02bc\x00rest", want: true, end: 6},
		{name: "longest", in: label + label + label + "\x3d" + strings.Repeat("a", 61) + "\x00", want: true, end: 255},
		{name: "too long", in: label + label + label + "\x3e" + strings.Repeat("a", 62) + "\x00"},
		{name: "much too long", in: strings.Repeat(label, 10) + "\x00"},
		{name: "empty", in: ""},
		{name: "no root", in: "\x01a"},
		{name: "cut label", in: "\x05abc"},
		{name: "pointer", in: "\xc0\x00"},
		{name: "pointer after a label", in: "\x01a\xc0\x00"},
		{name: "reserved length", in: "\x40" + strings.Repeat("a", 64) + "\x00"},
	} {
		var q table.QueryName
		if end, ok := q.Parse([]byte(tc.in), 0); ok != tc.want || end != tc.end {
			t.Errorf("%s: %d, %t, want %d, %t", tc.name, end, ok, tc.end, tc.want)
		}
	}
}

// I5: whatever order changes come in, and however they are cut, the table is what
// a plain map would be: names, branches and pods, and the message that goes to disk.
func TestApplyAgainstModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		tb := table.New()
		names, pods := map[string]table.VIP{}, map[model.AttachmentKey]table.Pod{}
		apply(t, tb, table.Change{Full: true, Settings: settings()})
		for range 40 {
			c := randomChange(rnd)
			if c.Full {
				clear(names)
				clear(pods)
			}
			for n := range c.RemoveNames {
				delete(names, n)
			}
			maps.Copy(names, c.SetNames)
			before := len(pods)
			gone := 0
			for k := range c.RemovePods {
				if _, ok := pods[k]; ok {
					if _, again := c.SetPods[k]; !again {
						gone++
					}
				}
				delete(pods, k)
			}
			maps.Copy(pods, c.SetPods)
			removed := apply(t, tb, c)
			if !c.Full && len(removed) != gone {
				t.Fatalf("%d pods reported as removed, want %d of %d", len(removed), gone, before)
			}
			checkModel(t, tb, names, pods)
		}
	}
}

var modelNames = []string{
	"a.aether.internal", "b.aether.internal", "a.x.aether.internal", "b.x.aether.internal",
	"x.aether.internal", "a.y.aether.internal", "deep.a.x.aether.internal", "a.partner.example",
}

func randomChange(rnd *rand.Rand) table.Change {
	c := table.Change{
		Full: rnd.IntN(10) == 0, SetNames: map[string]table.VIP{}, RemoveNames: map[string]struct{}{},
		SetPods: map[model.AttachmentKey]table.Pod{}, RemovePods: map[model.AttachmentKey]struct{}{},
	}
	if c.Full {
		c.Settings = settings()
	}
	for _, n := range modelNames {
		switch rnd.IntN(4) {
		case 0:
			c.SetNames[n] = vip(rnd.IntN(100))
		case 1:
			if !c.Full {
				c.RemoveNames[n] = struct{}{}
			}
		}
	}
	for i := range 5 {
		switch rnd.IntN(4) {
		case 0:
			c.SetPods[key(i)] = pod(i)
		case 1, 2:
			if !c.Full {
				c.RemovePods[key(i)] = struct{}{}
			}
			if rnd.IntN(3) == 0 {
				c.SetPods[key(i)] = pod(i)
			}
		}
	}
	return c
}

func checkModel(t *testing.T, tb *table.Table, names map[string]table.VIP, pods map[model.AttachmentKey]table.Pod) {
	t.Helper()
	for _, n := range append([]string{"y.aether.internal", "z.aether.internal"}, modelNames...) {
		want := table.Unknown
		v, known := names[n]
		switch {
		case known:
			want = table.Known
		case !strings.HasSuffix(n, ".aether.internal"):
			want = table.Foreign
		default:
			for other := range names {
				if strings.HasSuffix(other, "."+n) {
					want = table.Branch
				}
			}
		}
		if got, kind := lookup(t, tb, n); kind != want || got != v {
			t.Fatalf("%s: %v of kind %d, want %v of kind %d", n, got, kind, v, want)
		}
	}
	want := table.New()
	apply(t, want, table.Change{Full: true, Settings: settings(), SetNames: names, SetPods: pods})
	if w, g := want.Message(), tb.Message(); !proto.Equal(w, g) {
		t.Fatalf("table (-want +got):\n%s", cmp.Diff(w, g, protocmp.Transform()))
	}
	list := make([]table.Pod, 0, len(pods))
	for _, p := range pods {
		list = append(list, p)
	}
	if d := cmp.Diff(list, tb.Pods(), cmpopts.SortSlices(func(a, b table.Pod) bool { return a.Netns < b.Netns }), cmpopts.EquateEmpty(),
		cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
		t.Fatalf("pods (-want +got):\n%s", d)
	}
}

// I9: no change grows the table past its totals, and one that would leaves it as
// it was. Room that the same change makes counts.
func TestApplyTotals(t *testing.T) {
	many := func(n int) map[model.AttachmentKey]table.Pod {
		out := map[model.AttachmentKey]table.Pod{}
		for i := range n {
			out[key(i)] = pod(i)
		}
		return out
	}
	tb := table.New()
	apply(t, tb, table.Change{Full: true, Settings: settings(), SetPods: many(dnsv1.MaxPods)})
	more := table.Change{SetPods: map[model.AttachmentKey]table.Pod{key(-1): pod(-1)}, SetNames: map[string]table.VIP{"a.aether.internal": vip(1)}}
	if _, err := tb.Apply(more); err == nil || err.Error() != "the table would have 4097 pods, at most 4096 are kept" {
		t.Errorf("one pod too many: error %v", err)
	}
	if _, kind := lookup(t, tb, "a.aether.internal"); kind != table.Unknown {
		t.Error("the refused change was applied in part")
	}
	more.RemovePods = map[model.AttachmentKey]struct{}{key(-2): {}, key(-1): {}}
	if _, err := tb.Apply(more); err == nil {
		t.Error("removing what is not there made room")
	}
	more.RemovePods = map[model.AttachmentKey]struct{}{key(7): {}}
	if removed := apply(t, tb, more); len(removed) != 1 || removed[0] != key(7) {
		t.Errorf("removed %v, want %v", removed, key(7))
	}
	names := map[string]table.VIP{}
	for i := range dnsv1.MaxNames {
		names["s"+strconv.Itoa(i)+".aether.internal"] = table.VIP{}
	}
	apply(t, tb, table.Change{Full: true, Settings: settings(), SetNames: names})
	if _, err := tb.Apply(table.Change{SetNames: map[string]table.VIP{"x.aether.internal": vip(1)}}); err == nil || err.Error() != "the table would have 262145 names, at most 262144 are kept" {
		t.Errorf("one name too many: error %v", err)
	}
}

// A change cannot move the mesh domain under the names that are there; only a
// full state, which brings its own names, can.
func TestApplySettings(t *testing.T) {
	tb := table.New()
	if _, err := tb.Apply(table.Change{Full: true}); err == nil {
		t.Error("a full state without settings was applied")
	}
	apply(t, tb, table.Change{Full: true, Settings: settings(), SetNames: map[string]table.VIP{"a.aether.internal": vip(1)}})
	other := settings()
	other.Domain = "mesh.example"
	if _, err := tb.Apply(table.Change{Settings: other}); err == nil || !strings.Contains(err.Error(), `"mesh.example" replaces "aether.internal"`) {
		t.Errorf("domain changed: error %v", err)
	}
	other.Domain, other.Upstreams = "aether.internal", nil
	apply(t, tb, table.Change{Settings: other})
	if got := tb.Upstreams(); got != nil {
		t.Errorf("upstreams %v, want none", got)
	}
	other = settings()
	other.Domain = "mesh.example"
	apply(t, tb, table.Change{Full: true, Settings: other})
	if _, kind := lookup(t, tb, "a.aether.internal"); kind != table.Foreign {
		t.Errorf("name of the old domain: kind %d, want foreign", kind)
	}
}

// Readers never see a part of a change: two names that always change together.
func TestApplyIsAtomic(t *testing.T) {
	tb := table.New()
	both := func(n int) table.Change {
		return table.Change{SetNames: map[string]table.VIP{"a.aether.internal": vip(n), "b.aether.internal": vip(n)}}
	}
	first := both(0)
	first.Full, first.Settings = true, settings()
	apply(t, tb, first)
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				m := tb.Message()
				if a, b := m.GetNames()[0].GetVip4(), m.GetNames()[1].GetVip4(); a != b {
					t.Errorf("saw %s and %s", a, b)
					return
				}
			}
		})
	}
	for i := range 300 {
		c := both(i)
		c.Full = i%2 == 0
		c.Settings = settings()
		apply(t, tb, c)
	}
	close(stop)
	readers.Wait()
}

func BenchmarkLookup(b *testing.B) {
	tb := table.New()
	names := map[string]table.VIP{}
	for i := range 20000 {
		names[fmt.Sprintf("service-%d.aether.internal", i)] = vip(i)
	}
	if _, err := tb.Apply(table.Change{Full: true, Settings: settings(), SetNames: names}); err != nil {
		b.Fatal(err)
	}
	name := []byte("\x0cservice-7777\x06aether\x08internal")
	b.ReportAllocs()
	for b.Loop() {
		if _, kind := tb.Lookup(name); kind != table.Known {
			b.Fatal(kind)
		}
	}
}

// One changed name costs the same whatever the size of the table.
func BenchmarkApplyOneName(b *testing.B) {
	for _, size := range []int{1000, 100000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			tb := table.New()
			names := map[string]table.VIP{}
			for i := range size {
				names[fmt.Sprintf("service-%d.aether.internal", i)] = vip(i)
			}
			if _, err := tb.Apply(table.Change{Full: true, Settings: settings(), SetNames: names}); err != nil {
				b.Fatal(err)
			}
			i := 0
			for b.Loop() {
				i++
				if _, err := tb.Apply(table.Change{SetNames: map[string]table.VIP{"service-7.aether.internal": vip(i)}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
