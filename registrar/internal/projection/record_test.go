package projection

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// XDS-12 and XDS-03: when a new pod has the address of a dead one whose record is still
// there, the new pod owns it, in whatever order the events come; when the newer goes
// first, the older has it back.
func TestSharedAddress(t *testing.T) {
	dead := pod("z-dead", "default/payments", "10.0.0.1", "8080*+")
	dead.Since = t0
	live := pod("a-live", "shop/ledger", "10.0.0.1", "8080*+")
	live.Since = t0.Add(time.Second)
	for _, order := range [][]model.Endpoint{{dead, live}, {live, dead}} {
		e := newEngine(t, testConfig(), order...)
		got, _ := e.Cluster("ledger.shop.aether.internal")
		if len(got.Endpoints) != 1 || got.Endpoints[0].UID != "a-live" ||
			!slices.Equal(got.Identities, []string{"spiffe://aether.internal/ns/shop/sa/ledger"}) {
			t.Errorf("the new pod's cluster: %+v", got)
		}
		if got, ok := e.Cluster("payments.aether.internal"); ok && len(got.Endpoints) != 0 {
			t.Errorf("the dead pod is still in its cluster: %+v", got)
		}
		remove(e, "a-live")
		got, _ = e.Cluster("payments.aether.internal")
		if len(got.Endpoints) != 1 || got.Endpoints[0].UID != "z-dead" {
			t.Errorf("the older record is not back: %+v", got)
		}
	}
	// The same within a service, and with a client that serves nothing as the new owner.
	live.Service, live.Identity.Namespace = key("default/payments"), "default"
	client := pod("client", "default/cron", "10.0.0.1", "")
	client.Since = t0.Add(time.Minute)
	for _, order := range [][]model.Endpoint{{dead, live, client}, {client, live, dead}, {live, client, dead}} {
		e := newEngine(t, testConfig(), order...)
		upsert(t, e, pod("other", "default/payments", "10.0.0.9", "8080*+"))
		check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: other"})
		remove(e, "client")
		check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a-live other"})
		if len(e.records) != 3 {
			t.Errorf("%d records", len(e.records))
		}
	}
	// Without times the UID decides, in any order.
	x, y := pod("x", "default/payments", "10.0.0.1", "8080*+"), pod("y", "default/payments", "10.0.0.1", "8080*+")
	for _, order := range [][]model.Endpoint{{x, y}, {y, x}} {
		check(t, "by UID", clusters(view(t, newEngine(t, testConfig(), order...), "default/payments")), []string{"payments 8080 http: y"})
	}
}

// A node can write whatever it likes of its own pods, so its word about an address never
// takes it from a pod of the reader's node. Everywhere else the later one has it, as when
// an address is used again, on the same node or on another. All of this in any order of
// events; and when the owner goes, the other has the address.
func TestClaimedAddress(t *testing.T) {
	at := func(uid, node string, since time.Duration) model.Endpoint {
		p := pod(uid, "default/s", "10.0.0.1", "8080*+")
		p.Node, p.Since = node, t0.Add(since)
		return p
	}
	const later = 1000 * time.Hour
	for _, tt := range []struct {
		name      string
		pods      []model.Endpoint
		owner     string
		contested int
		then      string // who has it when the owner has gone
	}{
		{"a remote node claims a local pod's", []model.Endpoint{at("mine", "here", 0), at("claim", "evil", later)}, "mine", 1, "claim"},
		{"two of them do", []model.Endpoint{at("mine", "here", 0), at("claim1", "evil", later), at("claim2", "worse", 2*later)}, "mine", 1, "claim2"},
		{"used again on this node", []model.Endpoint{at("old", "here", 0), at("new", "here", 1)}, "new", 0, "old"},
		{"used again here, a claim between", []model.Endpoint{at("old", "here", 0), at("claim", "evil", later), at("new", "here", 1)}, "new", 1, "old"},
		{"used again here after a remote pod", []model.Endpoint{at("old", "there", 0), at("new", "here", 1)}, "new", 1, "old"},
		{"used again on a remote node", []model.Endpoint{at("old", "there", 0), at("new", "there", 1)}, "new", 0, "old"},
		{"used again on another remote node", []model.Endpoint{at("old", "there", 0), at("new", "elsewhere", 1)}, "new", 1, "old"},
		{"no node has a name", []model.Endpoint{at("old", "", 0), at("new", "", 1)}, "new", 0, "old"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig()
			cfg.Node = "here"
			forward := slices.Clone(tt.pods)
			slices.Reverse(forward)
			for _, order := range [][]model.Endpoint{tt.pods, forward} {
				e := newEngine(t, cfg, order...)
				check(t, "clusters", clusters(view(t, e, "default/s")), []string{"s 8080 http: " + tt.owner})
				if news := e.TakeContests(); len(news) != tt.contested || e.Contested() != tt.contested || len(e.TakeContests()) != 0 {
					t.Errorf("%d contested, told of %+v, want %d", e.Contested(), news, tt.contested)
				}
				remove(e, tt.owner)
				check(t, "clusters", clusters(view(t, e, "default/s")), []string{"s 8080 http: " + tt.then})
				for _, p := range tt.pods {
					if e.Has(p.UID) {
						remove(e, p.UID)
					}
				}
				if len(e.TakeContests()) != 0 || e.Contested() != 0 || len(e.addrs.owner) != 0 || len(e.addrs.shadow) != 0 {
					t.Errorf("%d contested, %d owned, %d shadowed in the end", e.Contested(), len(e.addrs.owner), len(e.addrs.shadow))
				}
			}
		})
	}
	// What is told names both; a claim that gets new words is told of once; and a record
	// that moves to another node is judged anew.
	cfg := testConfig()
	cfg.Node = "here"
	e := newEngine(t, cfg, at("mine", "here", 0))
	claim := at("claim", "evil", later)
	for range 3 {
		claim.Generation++
		claim.Since = claim.Since.Add(time.Hour)
		upsert(t, e, claim)
	}
	told := e.TakeContests()
	claim.Since = claim.Since.Add(time.Hour)
	upsert(t, e, claim)
	told = append(told, e.TakeContests()...)
	want := []Contest{{
		Addr:  netip.MustParseAddr("10.0.0.1"),
		Owner: Claim{UID: "mine", Node: "here", Service: key("default/s")},
		Other: Claim{UID: "claim", Node: "evil", Service: key("default/s")},
	}}
	if !slices.Equal(told, want) {
		t.Errorf("told of %+v, want %+v", told, want)
	}
	moved := at("mine", "there", 0)
	moved.Generation = 2
	upsert(t, e, moved)
	check(t, "clusters", clusters(view(t, e, "default/s")), []string{"s 8080 http: claim"})
}

// Generations (contract 4.7, XDS-47): an older record or delete is ignored, a deleted
// record stays deleted for late updates, a re-created object is a higher generation.
func TestGenerations(t *testing.T) {
	const svc = "default/payments"
	at := func(generation uint64, ports string) model.Endpoint {
		p := pod("a", svc, "10.0.0.1", ports)
		p.Generation = generation
		return p
	}
	e := newEngine(t, testConfig(), pod("b", svc, "10.0.0.2", "8080*+"))
	do := func(p model.Endpoint) {
		t.Helper()
		if err := e.Upsert(p, t0); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, want ...string) {
		t.Helper()
		check(t, what, clusters(view(t, e, svc)), want)
	}
	do(at(5, "8080*+"))
	do(at(4, "8080*-"))
	do(at(5, "8080*-"))
	want("older and equal are ignored", "payments 8080 http: a b")
	e.Delete("a", 4, t0)
	want("older delete is ignored", "payments 8080 http: a b")
	e.Delete("a", 6, t0)
	do(at(6, "8080*+"))
	do(at(5, "8080*+"))
	want("deleted stays deleted", "payments 8080 http: b")
	if e.Has("a") || !e.Has("b") {
		t.Error("Has does not follow")
	}
	e.Delete("c", 3, t0)
	p := at(3, "8080*+")
	p.UID = "c"
	do(p)
	want("a delete before its update", "payments 8080 http: b")
	do(at(7, "8080*+"))
	want("created again", "payments 8080 http: a b")

	e.Expire(t0.Add(time.Hour))
	if n := len(e.graves.generation); n != 0 {
		t.Errorf("%d deleted records are remembered for ever", n)
	}
}

// A record that cannot be projected is refused with the reason, and what was known of
// the pod stays. No workload can be pinned into another namespace's service (MESH-27).
func TestUpsertRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		spoil      func(*model.Endpoint)
	}{
		{"no UID", "it has no UID", func(p *model.Endpoint) { p.UID = "" }},
		{"service", `service "shop/A_b" is not two DNS labels`, func(p *model.Endpoint) { p.Service = key("shop/A_b") }},
		{"trust domain", `identity "spiffe:///ns/default/sa/payments" is incomplete`, func(p *model.Endpoint) { p.Identity.TrustDomain = "" }},
		{"account", `identity "spiffe://aether.internal/ns/default/sa/" is incomplete`, func(p *model.Endpoint) { p.Identity.Account = "" }},
		{"foreign identity", `identity "spiffe://aether.internal/ns/shop/sa/payments" is not of the service's namespace "default"`, func(p *model.Endpoint) { p.Identity.Namespace = "shop" }},
		{"no address", "it has no usable address", func(p *model.Endpoint) { p.Addresses = nil }},
		{"zone", "it has no usable address", func(p *model.Endpoint) { p.Addresses[0] = netip.MustParseAddr("fe80::1%eth0") }},
		{"weight 0", "weight 0 is not in 1-65535", func(p *model.Endpoint) { p.Weight = 0 }},
		{"weight", "weight 65536 is not in 1-65535", func(p *model.Endpoint) { p.Weight = 65536 }},
		{"port 0", "ports are not ascending from 1 at 0", func(p *model.Endpoint) { p.Ports[0].Number = 0 }},
		{"order", "ports are not ascending from 1 at 8080", func(p *model.Endpoint) { p.Ports = append(p.Ports, p.Ports[0]) }},
		{"default", "default port 9999 is not among its ports", func(p *model.Endpoint) { p.Default = 9999 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			good := pod("a", "default/payments", "10.0.0.1", "8080*+")
			e := newEngine(t, testConfig(), good)
			bad := pod("a", "default/payments", "10.0.0.1", "8080*+")
			bad.Generation = 2
			tt.spoil(&bad)
			err := e.Upsert(bad, t0)
			want := fmt.Sprintf("endpoint %q of %s: %s", bad.UID, bad.Service, tt.want)
			if err == nil || err.Error() != want {
				t.Errorf("got  %v\nwant %s", err, want)
			}
			check(t, "clusters", clusters(view(t, e, "default/payments")), []string{"payments 8080 http: a"})
			if c := e.TakeDirty(); len(c) != 0 {
				t.Errorf("changes: %+v", c)
			}
		})
	}
}

// Only what left is gone: an address that a pod gave up is nobody's at once, one of
// three pods that goes takes no other with it, and a pod that changes its service
// leaves the former one alone (XDS-08, XDS-15).
func TestOnlyWhatLeftIsGone(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "8080*+"), pod("b", "default/s", "10.0.0.2", "8080*+"),
		pod("c", "default/s", "10.0.0.3", "8080*+"), pod("x", "default/t", "10.0.0.9", "8080*+"))
	upsert(t, e, pod("a", "default/s", "10.0.0.7", "8080*+"))
	check(t, "clusters of s", clusters(view(t, e, "default/s")), []string{"s 8080 http: b c a"})
	if r := e.addrs.owner[netip.MustParseAddr("10.0.0.1")]; r != nil || len(e.addrs.owner) != 4 || len(e.addrs.shadow) != 0 {
		t.Errorf("10.0.0.1 belongs to %v; %d addresses, %d shadowed", r, len(e.addrs.owner), len(e.addrs.shadow))
	}
	remove(e, "b")
	check(t, "clusters of s", clusters(view(t, e, "default/s")), []string{"s 8080 http: c a"})
	upsert(t, e, pod("c", "default/t", "10.0.0.3", "8080*+"))
	check(t, "clusters of s", clusters(view(t, e, "default/s")), []string{"s 8080 http: a"})
	check(t, "clusters of t", clusters(view(t, e, "default/t")), []string{"t 8080 http: c x"})
	remove(e, "a")
	check(t, "clusters of t", clusters(view(t, e, "default/t")), []string{"t 8080 http: c x"})
}

// Thousands of pods that never become ready, each of which is gone when the next
// hundred have come, are in no load assignment; what is remembered of them is bounded
// by those that there are, once their deletes are old (XDS-77).
func TestNeverReady(t *testing.T) {
	e := newEngine(t, testConfig(), pod("good", "default/s", "10.9.9.9", "8080*+"))
	const pods, alive = 20_000, 100
	for i := range pods {
		now := t0.Add(time.Duration(i) * 100 * time.Millisecond)
		p := pod(fmt.Sprint("p", i), "default/s", "10.0.0.1", "8080*-")
		p.Addresses[0] = netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		if err := e.Upsert(p, now); err != nil {
			t.Fatal(err)
		}
		if i >= alive {
			e.Delete(fmt.Sprint("p", i-alive), 1, now)
		}
		if i%1000 == 0 {
			check(t, "clusters of s", clusters(view(t, e, "default/s")), []string{"s 8080 http: good"})
		}
		e.TakeDirty()
	}
	end := t0.Add(pods*100*time.Millisecond + DefaultRetention)
	e.Expire(end)
	if len(e.records) != alive+1 || len(e.addrs.owner) != alive+1 || len(e.addrs.shadow) != 0 || len(e.graves.generation) != 0 {
		t.Errorf("%d records, %d addresses, %d shadowed, %d deletes are remembered; want %d, %d, 0 and 0",
			len(e.records), len(e.addrs.owner), len(e.addrs.shadow), len(e.graves.generation), alive+1, alive+1)
	}
}
